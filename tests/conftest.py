"""Strictness for every test: global random generators must not move, and shapes are checked at run time.

The long tail is without the checks of shapes, which cost two thirds of the time where calls are many and small.

One thread a process: small products wait longer for each other than they compute, and two processes fill two cores.
"""

import os
import signal
from importlib.util import find_spec

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for jobs in the background, and what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import numpy as np
import pytest

if find_spec("beartype"):  # absent on a bare GPU machine
    from jaxtyping import install_import_hook

    install_import_hook("muon_lab", "beartype.beartype")

#: What needs the libraries of the command line: a bare GPU machine has none.
collect_ignore = (
    []
    if find_spec("polars")
    else [
        *("sweep", "figures", "experiments", "notebooks", "test_plan.py", "layout_tables.py"),
        *(f"studies/test_{name}.py" for name in ("stability", "step_cost", "studies", "work_precision")),
    ]
)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def no_shapes_in_the_long_tail(request):
    """Leave the checks of shapes out of slow tests."""
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", before or request.node.get_closest_marker("slow") is not None)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def no_ambient_randomness():
    """Fail a test in which a global generator of torch or NumPy moved."""
    import torch

    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 (the guard itself)
    yield
    after = torch.random.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    assert torch.equal(before[0], after[0]), "torch's global generator moved"
    assert np.array_equal(before[1], after[1]), "NumPy's global generator moved"
