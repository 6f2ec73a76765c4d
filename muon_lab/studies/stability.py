r"""Where does a low-precision number format hurt Muon?

*what* is one of

- ``products``: the orthogonalization's own products, with operands quantized in every one;
- ``gradient``: a matrix quantized, looked at in norm, element by element and row by row;
- ``momentum``: an average stored in the format, for a constant gradient;
- ``factor``: the Kronecker factor of the short side, G Gᵀ or GᵀG, stored in the format;
- ``polar``: the exact polar factor of the quantized matrix;
- ``training``: the small GPT trained with AdamW, forward and backward products emulated;
- ``optimizer``: a smaller GPT (gpt_small of `descent`) under AdamW, Muon, MOP, SOAP or REKLS, with one *place* in the
  format: the products forward and backward, or a part of the optimizer's state between steps (`storage`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from muon_lab.arithmetic import formats
from muon_lab.nearest import unknown
from muon_lab.polar import flops, schedules
from muon_lab.studies import convergence, sources, storage
from muon_lab.studies.orthogonalization import ESCAPED, shape_of
from muon_lab.studies.study import Case, Column, Ended, LeftOut, Metrics, Study, svd_flops

#: The effects, and the axes that each depends on besides the matrix.
WHATS: Mapping[str, tuple[str, ...]] = {
    "products": ("format", "scale_mode", "method", "steps"),
    "gradient": ("format", "scale_mode"),
    "momentum": ("format", "scale_mode", "beta", "rounding", "start"),
    "factor": ("format", "scale_mode"),
    "polar": ("format", "scale_mode"),
    "training": ("format", "scale_mode", "operands", "updates"),
    "optimizer": ("format", "scale_mode", "rounding", "updates"),
}

#: Effects that have no matrix.
TRAINED = ("training", "optimizer")

#: Places that a format can have under an optimizer: the products, or a part of its state.
PLACES = ("products", *storage.ENTRIES)

#: The best learning rate of each optimizer on this GPT in experiments/convergence.
RATES: Mapping[str, float] = {"adamw": 5e-3, "muon": 2e-2, "mop": 2e-2, "soap": 1e-2, "rekls": 1e-2}

#: Which operands of the GPT's products are quantized; `MIXED` is all of them, the gradients in MXFP8 E5M2.
MIXED, E5M2 = "e5m2_gradients", "mxfp8_e5m2"
OPERANDS = ("all", "weights", "activations", "gradients", MIXED)

#: Time constants after which an average counts as settled (`effects`), and passes over a matrix at each of its steps.
SETTLED, PASSES = 20.0, 20

#: A step as most are, for estimates.
QUINTIC = (1.0, 1.0, 1.0)

#: Runs of the schedule: in float64, in float32, in the format, and with its operands alone.
RUNS = 4

#: Size of the small GPT, and bytes of text a step, for estimates.
PARAMETERS, BYTES = 492_384, 8 * 128

SCALE_MODES = ("rceil", "floor", "ceil", "even")
ROUNDINGS = ("nearest", "stochastic")
#: Where an average starts: ``gradient`` is an unrelated one of equal size.
STARTS = ("zero", "gradient")

#: The axes whose values are names.
NAMES: Mapping[str, tuple[str, ...]] = {
    "scale_mode": SCALE_MODES,
    "rounding": ROUNDINGS,
    "start": STARTS,
    "operands": OPERANDS,
    "optimizer": tuple(RATES),
    "place": PLACES,
}


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    what: tuple[str, ...] = ("products",)
    """products, gradient, momentum, factor, polar, training or optimizer."""
    spectrum: tuple[str, ...] = ("gaussian", "geometric(100)", "geometric(1e4)")
    """A named spectrum such as geometric(1e3), `recorded[:PATTERN]`, or `file[:PATTERN]` with --matrices."""
    shape: tuple[str, ...] = ("256x512",)
    """ROWSxCOLS of planted matrices."""
    seed: tuple[int, ...] = (0,)
    """Draws of planted matrices."""
    format: tuple[str, ...] = ("bf16", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1")
    """A number format of arithmetic.formats: fp16, bf16, tf32, fp8_e4m3, mxfp8_e4m3, nvfp4 …"""
    scale_mode: tuple[str, ...] = ("rceil",)
    """How scales of MX blocks are rounded: rceil, floor, ceil, even."""
    method: tuple[str, ...] = ("simple", "quintic", "taylor")
    """A schedule (products)."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule (products)."""
    beta: tuple[float, ...] = (0.95,)
    """Decay of the average (momentum)."""
    rounding: tuple[str, ...] = ("nearest",)
    """How the average or the state is rounded: nearest or stochastic (momentum, optimizer)."""
    start: tuple[str, ...] = ("zero",)
    """Where the average starts: zero, or an unrelated gradient (momentum)."""
    operands: tuple[str, ...] = ("all",)
    """Which operands are quantized: all, weights, activations, gradients, e5m2_gradients (training)."""
    updates: tuple[int, ...] = (100,)
    """Steps of training."""
    optimizer: tuple[str, ...] = ("muon",)
    """adamw, muon, mop, soap or rekls (optimizer)."""
    place: tuple[str, ...] = ("momentum",)
    """What is in the format: products, momentum, second_moment or factors (optimizer)."""
    rate: tuple[float, ...] = (1.0,)
    """The learning rate, in units of the best one of the optimizer (optimizer)."""


COLUMNS = (
    Column(
        "error",
        "1",
        "distance to the same in higher precision, relative: of update, matrix, average, factor; of trained weights",
    ),
    Column("relative", "1", "‖X − U‖/‖U‖, U the exact polar factor"),
    Column("cosine", "1", "⟨X, U⟩/(‖X‖‖U‖)"),
    Column("orthogonality", "1", "‖XXᵀ − UUᵀ‖/√r on the short side"),
    Column("sigma_max", "1", "largest singular value of X"),
    Column("sigma_min", "1", "r-th singular value of X"),
    Column("sigma_in", "1", "largest singular value of the matrix divided by its Frobenius norm"),
    Column("escaped_step", "count", "first step after which a singular value is so large that the next enlarges it"),
    Column("truncation", "1", "‖p − U‖/‖U‖, p the schedule in float64"),
    Column("rounding_error", "1", "‖X₃₂ − p‖/‖U‖, float32 switched on alone"),
    Column("quantization", "1", "‖X_Q − p‖/‖U‖, quantized operands switched on alone"),
    Column("remainder", "1", "what the three leave of X − U: they act on one another"),
    Column("bound", "1", "‖δG‖/(σ_r √r), which the first-order error of the polar factor stays below"),
    Column("gain", "1", "⟨Q, G⟩/⟨G, G⟩: the share of the value that is kept"),
    Column("saturated", "1", "share of elements clamped to the largest number of their block, or of the format"),
    Column("flushed", "1", "share of non-zero elements that became zero"),
    Column("coarse", "1", "share of elements off by more than 1/8 of themselves"),
    Column("worst_row", "1", "largest relative error of a row"),
    Column("negative", "count", "negative eigenvalues of the factor"),
    Column("lowest", "1", "lowest eigenvalue of the factor over its largest"),
    Column("asymmetry", "1", "‖Q − Qᵀ‖/‖Q‖ of the factor"),
    Column("loss", "nat/byte", "validation loss after training"),
    Column("loss_gap", "nat/byte", "validation loss minus that of the float32 run of the same seed"),
    Column("loss_gap_bf16", "nat/byte", "validation loss minus that of the bfloat16 run of the same seed"),
    Column("gradient_cosine", "1", "cosine of the quantized to the exact gradient at the common start"),
    Column("gradient_gain", "1", "⟨quantized, exact⟩/⟨exact, exact⟩ at the common start"),
    Column("gradient_cosine_bf16", "1", "cosine of the quantized to the bfloat16 gradient at the common start"),
    Column("gradient_gain_bf16", "1", "⟨quantized, bfloat16⟩/⟨bfloat16, bfloat16⟩ at the common start"),
    Column("end_cosine", "1", "cosine to the exact gradient at the end, at the run's own weights"),
    Column("end_gain", "1", "gain over the exact gradient at the end, at the run's own weights"),
    Column("end_cosine_bf16", "1", "cosine to the bfloat16 gradient at the end, at the run's own weights"),
    Column("end_gain_bf16", "1", "gain over the bfloat16 gradient at the end, at the run's own weights"),
    Column("retried", "count", "refreshes of a basis that were solved in float64 after a bad result"),
    Column("kept", "count", "refreshes of a basis that found none and kept the old one"),
    Column("failed_step", "count", "first step that is not finite"),
)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    if point["what"] not in WHATS:
        raise unknown("what", point["what"], WHATS)
    rows, cols = shape_of(point["shape"])
    axes = _checked(point)
    cases = sources.settle(point["spectrum"], rows, cols, point["seed"], file)
    if point["what"] in TRAINED:
        list(cases)  # an unknown spectrum is wrong, though it doesn't matter
        nothing = dict.fromkeys(("spectrum", "shape", "rows", "cols", "matrix", "content"))
        yield {**nothing, "what": point["what"], "seed": point["seed"], **axes}
        return
    for case in cases:
        shape = {"spectrum": case["source"], "shape": f"{case['rows']}x{case['cols']}", "what": point["what"]}
        yield {**case, **shape, **axes}


def _checked(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of a point after checking them; None for those that do not matter, whose names must exist too."""
    format = formats.get(point["format"])
    for name, known in NAMES.items():
        if point[name] not in known:
            raise unknown(name.replace("_", " "), point[name], known)
    schedule = schedules.get(point["method"])
    if point["updates"] < 1:
        raise ValueError(f"updates must be at least 1, not {point['updates']}")
    if not 0 <= point["beta"] < 1:
        raise ValueError(f"beta must lie in [0, 1), not {point['beta']}")
    needed = WHATS[point["what"]]
    if format.name in ("e8m0", "int8"):
        raise LeftOut(f"format {format.name!r} is a scale or needs one, and is not measured alone")
    mixed = "operands" in needed and point["operands"] == MIXED
    if mixed and format.name == E5M2:
        raise LeftOut(f"operands {MIXED!r} in format {E5M2!r} are the arm 'all'")
    if "method" in needed:
        schedule = schedules.get(point["method"], point["steps"])
    scaled = mixed or (isinstance(format, formats.BlockFormat) and not format.global_scale)
    values = {
        "format": format.name,
        "scale_mode": point["scale_mode"] if scaled else None,
        "method": schedule.name,
        "steps": schedule.steps,
        "beta": float(point["beta"]),
        **{name: point[name] for name in ("rounding", "start", "operands", "updates")},
    }
    chosen = {name: value if name in needed else None for name, value in values.items()}
    return chosen | _placed(point) if point["what"] == "optimizer" else chosen


def _placed(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of a point that only the optimizers have, and which rounding matters there."""
    optimizer, place, rate = point["optimizer"], point["place"], float(point["rate"])
    if not 0 < rate < 1e3:
        raise ValueError(f"rate must lie above 0 and below 1000, not {rate!r}")
    if place != "products" and optimizer not in storage.ENTRIES[place]:
        raise LeftOut(f"{optimizer} has no {place.replace('_', ' ')} that could be stored")
    if place == "products" and point["rounding"] != "nearest":
        raise LeftOut("products are rounded to nearest, their operands have no other rounding")
    return {"optimizer": optimizer, "place": place, "rate": rate}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    if case["what"] == "training":
        return _trained(case)
    if case["what"] == "optimizer":
        from muon_lab.studies import low_precision

        return low_precision.measure(case, case["rate"] * RATES[case["optimizer"]])
    from muon_lab.studies.effects import EFFECTS

    metrics = dict(EFFECTS[case["what"]](case, sources.matrix(case), sources.truth(case)))
    metrics["rounding_error"] = metrics.pop("rounding", None)
    largest = metrics.get("sigma_max")
    if largest is not None and largest > ESCAPED:
        raise Ended("diverged", f"a singular value of {largest:.3g}", metrics)
    return metrics


def _trained(case: Case) -> Metrics:
    """Train the small GPT with quantized products, and compare with the float32 and the bfloat16 run of its seed."""
    from muon_lab.studies.training import compare, train

    start, end = 0, case["updates"]
    run = train(_products(case), steps=case["updates"], seed=case["seed"], probe=(start, end))
    single, half = _baselines(case["seed"], case["updates"])
    metrics: dict[str, float | int | None] = {
        "loss": run.validation,
        "loss_gap": compare(run, single).loss_gap,
        "loss_gap_bf16": compare(run, half).loss_gap,
        "failed_step": run.nonfinite,
    }
    for when, step in (("gradient", start), ("end", end)):
        if step in run.gradients:
            exact, bf16 = run.gradients[step]
            metrics |= {f"{when}_cosine": exact.cosine, f"{when}_gain": exact.gain}
            metrics |= {f"{when}_cosine_bf16": bf16.cosine, f"{when}_gain_bf16": bf16.gain}
    if run.nonfinite is not None:
        raise Ended("nonfinite", f"step {run.nonfinite} is not finite", metrics)
    return metrics


def _products(case: Case) -> Any:
    """Return the products of an arm. Where all operands are rounded, results are stored in a format that can hold them.

    So the arm in bfloat16 is the bfloat16 baseline itself.
    """
    from muon_lab.arithmetic.linear import Products
    from muon_lab.arithmetic.rounded import STORED

    everything = case["operands"] in ("all", MIXED)
    names = dict.fromkeys(
        ("weights", "activations", "gradients") if everything else (case["operands"],), case["format"]
    )
    if case["operands"] == MIXED:
        names["gradients"] = E5M2
    stored = case["format"] if everything and case["format"] in STORED else None
    return Products(**names, scale_mode=case["scale_mode"] or "rceil", stored=stored)


@lru_cache(maxsize=4)  # all arms of a seed are compared with the same two runs
def _baselines(seed: int, updates: int) -> Any:
    from muon_lab.arithmetic.linear import BF16
    from muon_lab.studies.training import train

    return tuple(train(products, steps=updates, seed=seed) for products in (None, BF16))


def _work(case: Case) -> float:
    """Estimate the flops of a case: products a parameter and byte, decompositions, and every step of what has steps."""
    if case["what"] == "training":
        return 6.0 * PARAMETERS * BYTES * case["updates"]
    if case["what"] == "optimizer":
        return 2.0 * convergence.GRADIENT["gpt_small"] * case["updates"]  # and the float32 run
    rows, cols = case["rows"], case["cols"]
    steps = 0.0
    if case["what"] == "products":
        steps = RUNS * case["steps"] * flops.plain([QUINTIC], rows, cols)
    elif case["what"] == "momentum":
        steps = SETTLED / (1 - case["beta"]) * PASSES * rows * cols
    return 6 * svd_flops(rows, cols) + steps


STUDY = Study(
    name="stability",
    question="Where does a low-precision number format hurt Muon?",
    version=2,
    axes=Axes,
    columns=COLUMNS,
    headline="error",
    group=("what", "format", "method", "shape", "spectrum", "scale_mode"),
    settle=settle,
    measure=measure,
    work=_work,
    facts=("rows", "cols", *sources.FACTS),
)
