"""The grammar of methods: every good form gives the right matrix, every bad one a sentence."""

import warnings

import numpy as np
import pytest
import torch
from cases import distance, polar_factor, through_svd, with_singular_values

from muon_lab import arithmetic
from muon_lab.arithmetic import Counted, Exact
from muon_lab.polar import schedules, starts
from muon_lab.studies import methods

U64, U32 = 2.0**-53, 2.0**-24

#: A method, and what it means: the start, the rows of the schedule that are applied, and the form.
GOOD = {
    "quintic": ("frobenius", "quintic", 0, "plain"),
    "plain:quintic": ("frobenius", "quintic", 0, "plain"),
    "gram:quintic": ("frobenius", "quintic", 0, "gram"),
    "gram@none:quintic": ("frobenius", "quintic", 0, "gram"),
    "gram@2:quintic": ("frobenius", "quintic", 0, "gram"),
    "gram@1,3:simple": ("frobenius", "simple", 0, "gram"),
    "auto:quintic": ("frobenius", "quintic", 0, "auto"),
    "frobenius-1:quintic": ("frobenius", "quintic", 1, "plain"),
    "schatten4:simple": ("schatten4", "simple", 0, "plain"),
    "schatten4-1:quintic": ("schatten4", "quintic", 1, "plain"),
    "aol:quintic": ("aol", "quintic", 0, "plain"),
    "aol-1:simple": ("aol", "simple", 1, "plain"),
    "spectral:quintic": ("spectral", "quintic", 0, "plain"),
    "plain:spectral-2:quintic": ("spectral", "quintic", 2, "plain"),
    "gram:schatten4-1:quintic": ("schatten4", "quintic", 1, "gram"),
    "gram@2:aol-1:simple": ("aol", "simple", 1, "gram"),
    "auto:frobenius-1:simple": ("frobenius", "simple", 1, "auto"),
    "polar_express_1.02_5": ("frobenius", "polar_express_1.02_5", 0, "plain"),
    "minimax(lower=1e-2)": ("frobenius", "minimax(lower=1e-2)", 0, "plain"),
    "gram@3:minimax(lower=1e-2,cushion=0.02)": ("frobenius", "minimax(lower=1e-2,cushion=0.02)", 0, "gram"),
}

BAD = {
    "quintik": "unknown method 'quintik': did you mean 'quintic'",
    "": "unknown method ''",
    "grm:quintic": "unknown form or start 'grm': did you mean 'gram'",
    "aoll:quintic": "unknown form or start 'aoll': did you mean 'aol'",
    "qdwh:quintic": "unknown form or start 'qdwh'",
    ":quintic": "unknown form or start ''",
    "gram@:quintic": "unknown form or start 'gram@'",
    "gram@x:quintic": "unknown form or start 'gram@x'",
    "gram@2,:quintic": "unknown form or start 'gram@2,'",
    "gram@-1:quintic": "unknown form or start 'gram@-1'",
    "plain@2:quintic": "unknown form or start 'plain@2'",
    "auto@2:quintic": "unknown form or start 'auto@2'",
    "aol-:quintic": "unknown form or start 'aol-'",
    "aol-x:quintic": "unknown form or start 'aol-x'",
    "aol--1:quintic": "unknown form or start 'aol--1'",
    "gram:": "unknown schedule ''",
    "gram:svd": "unknown schedule 'svd'",
    "gram:quintik": "unknown schedule 'quintik': did you mean 'quintic'",
    "gram:auto:quintic": "each part at most once",
    "gram@2:plain:quintic": "each part at most once",
    "aol:schatten4:quintic": "each part at most once",
    "aol:gram:quintic": "must be written [FORM:][START[-DROP]:]SCHEDULE",
    "auto:aol:quintic": "the form is chosen for matrices divided by their Frobenius norm",
    "aol-5:quintic": "drops 5 of 5 steps",
    "gram@0:quintic": "restarts before step 0: there are 1 to 4",
    "gram@5:quintic": "restarts before step 5: there are 1 to 4",
    "gram@4:aol-1:quintic": "restarts before step 4: there are 1 to 3",
    "gram:cans_cubic7": "has exactly 7 steps",
    "minimax(lower=2)": "lower of a minimax design must be above 0 and below 1, not 2.0",
    "gram:minimax(uper=2)": "is not a design",
}


def matrix(shape=(12, 30)):
    return with_singular_values(*shape, np.geomspace(1, 0.02, min(shape)), seed=3)


def divided(G, start):
    """Return a matrix after its start, in NumPy's words."""
    if start == "aol":
        wide = G if G.shape[0] <= G.shape[1] else G.T
        wide = wide / np.sqrt(np.abs(wide @ wide.T).sum(axis=1, keepdims=True))
        return wide if G.shape[0] <= G.shape[1] else wide.T
    order = {"frobenius": 2, "schatten4": 4, "spectral": np.inf}[start]
    return G / np.linalg.norm(np.linalg.svd(G, compute_uv=False), order)


def expected(G, method):
    """Return the image of a matrix in exact arithmetic."""
    start, name, drop, _ = GOOD[method]
    begun, rows = divided(G, start), schedules.get(name, 5).coefficients[drop:]
    size = np.linalg.norm(begun)

    def through(unit):
        sigma = size * unit
        for a, b, c in rows:
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        return sigma

    return through_svd(begun, through)


def tolerance(G, method, unit):
    """X is rounded to u: a direction of size σ is known to u/σ, in the Gram form, where R is rounded to u, to u/σ²."""
    smallest = np.linalg.svd(divided(G, GOOD[method][0]), compute_uv=False)[-1]
    return 10 * unit / (smallest if GOOD[method][3] == "plain" else smallest**2)


@pytest.mark.filterwarnings("ignore::muon_lab.polar.ScheduleWarning")
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (12, 12)])
@pytest.mark.parametrize("method", GOOD)
def test_a_method_gives_the_matrix_that_it_says(method, shape):
    G = matrix(shape)
    steps = methods.settle(method, 5)
    image = expected(G, method)
    X = methods.build(method, steps, "float64")(torch.tensor(G)).numpy()
    assert distance(X, image) < tolerance(G, method, U64)
    assert distance(methods.image(method, steps, G, polar_factor(G)), image) < 1e3 * U64
    single = methods.build(method, steps, "float32")(torch.tensor(G, dtype=torch.float32)).double().numpy()
    assert distance(single, image) < tolerance(G, method, U32)


@pytest.mark.parametrize("method", GOOD)
def test_a_method_is_read_as_it_is_written(method):
    start, name, drop, form = GOOD[method]
    found = methods.parse(method, 5)
    assert (found.start, found.drop, found.form) == (start, drop, form)
    assert found.schedule.coefficients == schedules.get(name, 5).coefficients[drop:]
    assert found.restarts == {"gram@none": (), "gram@2": (2,), "gram@1,3": (1, 3), "gram@3": (3,)}.get(
        method.split(":")[0]
    )


def test_a_wrong_start_is_seen():
    """The control of the oracle above: another start, or a step more, is far away."""
    G = matrix()
    X = methods.build("schatten4-1:quintic", 5, "float64")(torch.tensor(G)).numpy()
    for other in ("quintic", "aol:quintic", "frobenius-1:quintic", "spectral:quintic"):
        assert distance(X, expected(G, other)) > 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (12, 12)])
@pytest.mark.parametrize("method", methods.EXACT)
def test_an_exact_method_gives_the_polar_factor_whatever_the_steps(method, shape, dtype):
    """Condition 50: the cast of the input is off by 50 u, squares of it in the Gram matrix by 2500 u of float64."""
    G = matrix(shape)
    assert methods.settle(method, 5) is None
    X = methods.build(method, None, dtype)(torch.tensor(G, dtype=methods.data_dtype(dtype)))
    unit = {"float64": U64 * (2500 if method == "gram_eigh" else 50), "float32": U32 * 50}[dtype]
    assert distance(X.double().numpy(), polar_factor(G)) < 10 * unit
    assert methods.image(method, None, G, polar_factor(G)) is not None
    assert methods.work(method, None, *shape) is None


@pytest.mark.parametrize("method", BAD)
def test_a_bad_method_is_one_sentence(method):
    with pytest.raises(ValueError) as caught:
        methods.settle(method, 5)
    assert BAD[method] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["quintic", "gram:quintic", "aol-1:quintic", "minimax(lower=1e-3)"])
@pytest.mark.parametrize("steps", [0, -1])
def test_steps_below_one_are_refused(method, steps):
    with pytest.raises(ValueError, match=r"positive integer|at least one must be left"):
        methods.settle(method, steps)


def test_a_collapsing_number_of_steps_is_a_warning_also_behind_a_form():
    with pytest.warns(schedules.ScheduleWarning, match="collapses at 6 steps"):
        methods.settle("gram:quintic", 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert methods.settle("aol-1:quintic", 5) == 5


def test_names_of_starts_are_those_of_the_iteration():
    """They are written twice, so that reading a method does not import torch."""
    assert starts.known() == methods.STARTS


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "method", ["quintic", "gram:quintic", "gram@none:simple", "gram@1,3:aol-1:quintic", "deepseekv4", "gram:deepseekv4"]
)
def test_work_is_that_of_the_products_that_run(method, dtype, monkeypatch):
    steps = 10 if "deepseekv4" in method else 5
    counted = Counted(Exact(getattr(torch, dtype)))
    monkeypatch.setattr(arithmetic, "Exact", lambda dtype: counted)
    orthogonalize = methods.build(method, steps, dtype)
    monkeypatch.undo()
    orthogonalize(torch.tensor(matrix((16, 40)), dtype=methods.data_dtype(dtype)))
    assert counted.flops == methods.work(method, steps, 16, 40, dtype) == methods.work(method, steps, 40, 16, dtype)


def test_work_of_auto_is_that_of_its_choice_in_the_dtype():
    wide = (512, 2048)
    plain = methods.work("quintic", 5, *wide)
    assert methods.work("auto:quintic", 5, *wide) < 0.6 * plain
    assert methods.work("auto:quintic", 5, *wide, "bfloat16") > 0.8 * plain  # plain loop, symmetric products
    assert methods.work("gram:quintic", 5, *wide, "bfloat16") > methods.work("gram:quintic", 5, *wide)  # restarts


def test_auto_asks_for_its_choice_once_a_shape(monkeypatch):
    from muon_lab import polar

    asked, auto = [], polar.auto
    monkeypatch.setattr(polar, "auto", lambda shape, **given: asked.append(shape) or auto(shape, **given))
    orthogonalize = methods.build("auto:quintic", 5, "float32")
    for shape in ((4, 8), (4, 8), (2, 4, 8), (4, 4), (4, 8)):
        orthogonalize(torch.ones(shape))
    assert asked == [(4, 8), (2, 4, 8), (4, 4)]
