"""Run one case, with the threads that it asks for: the bits of an SVD depend on their number."""

import contextlib
from collections.abc import Iterator

from muon_lab import studies
from muon_lab.studies.study import Case, Row


def run_case(study: str, case: Case) -> Row:
    """Return the row of one case, measured with one thread or with as many as its `threads` axis says."""
    with threads(case.get("threads") or 1):
        return studies.get(study).row(case)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with so many threads in torch and in NumPy's BLAS, and as before afterwards."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    with threadpool_limits(count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
