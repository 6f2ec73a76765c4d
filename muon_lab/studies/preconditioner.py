r"""How well are the first steps of SOAP and REKLS determined, and what helps?

A run is a sequence of Gaussian gradients, entries of variance 1, of which a share may be the same at every step and one
may be larger than the others:

.. math:: G_t = k_t \left(\sqrt{p}\, A + \sqrt{1 - p}\, N_t\right), \qquad k_t = k \text{ at one step, 1 elsewhere.}

A row is one step of it. Beside the run goes a twin, each of whose gradients is one rounding away; and the step itself
is taken again from the same state in float64, and with another eigensolver. Where these disagree, no implementation can
be right and none is wrong.

*remedy* is ``none``, or some of these joined by ``+``, each with a value of its own where it takes one:

- ``skip``: the first gradient makes the bases and nothing else;
- ``clip`` or ``clip=1``: the RMS of an update is at most that;
- ``eps`` or ``eps=1e-3``: a larger :math:`\epsilon`, in units of the RMS of the gradients;
- ``permuted``, ``rotated``: the fate of second moments under a change of bases;
- ``start`` or ``start=1``: the values by which the Kullback-Leibler correction divides the first gradient.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muon_lab.arithmetic import formats
from muon_lab.nearest import unknown
from muon_lab.studies.orthogonalization import shape_of
from muon_lab.studies.study import Case, Column, Ended, LeftOut, Metrics, Study

#: Settings of the optimizers, all of which make their bases anew at every step.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "soap": {},
    "soap_iteration": {"eigenbasis": "iteration"},
    "rekls": {"kl": True},
    "kl_iteration": {"eigenbasis": "iteration", "kl": True},
}

#: Settings of the remedies that take no value, and those that take one: the setting, and its value by default.
FIXED: Mapping[str, Mapping[str, Any]] = {
    "skip": {"first_step": "skip"},
    "permuted": {"second_moment": "permuted"},
    "rotated": {"second_moment": "rotated"},
}
VALUED: Mapping[str, tuple[str, float]] = {"clip": ("max_rms", 1.0), "eps": ("eps", 1e-3), "start": ("start", 1.0)}

#: No remedy, and products in the dtype of the data.
NONE, PLAIN = "none", "fp32"


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    optimizer: tuple[str, ...] = ("soap", "soap_iteration", "rekls")
    """soap, soap_iteration, rekls or kl_iteration."""
    shape: tuple[str, ...] = ("32x64",)
    """ROWSxCOLS of the weight."""
    seed: tuple[int, ...] = (0,)
    """Draws of the gradients."""
    persistent: tuple[float, ...] = (0.0,)
    """Share of the variance of the gradients that is the same at every step, from 0 to below 1."""
    spike: tuple[float, ...] = (1.0,)
    """How many times larger one gradient is."""
    spike_step: tuple[int, ...] = (20,)
    """At which step."""
    format: tuple[str, ...] = (PLAIN,)
    """fp32, or a number format to which operands of every product are rounded: tf32, bf16 …"""
    remedy: tuple[str, ...] = (NONE, "skip", "clip", "eps", "rotated", "start")
    """none, or some of skip, clip, eps, permuted, rotated, start joined by +."""
    step: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    """The step that a row tells of, from 1."""


COLUMNS = (
    Column("rms", "1", "root mean square of the entries of the update, the learning rate left out"),
    Column("largest", "1", "largest magnitude of an entry of the update"),
    Column("cosine", "1", "⟨U, G⟩/(‖U‖‖G‖), U the update and G its gradient"),
    Column("disagreement", "1", "‖U − U'‖/‖U‖, U' that of a run whose gradients are one rounding away"),
    Column("parted", "1", "the same of all that the two runs have moved since the start"),
    Column("step_error", "1", "‖U − U₆₄‖/‖U₆₄‖, U₆₄ the float64 step from the same state"),
    Column("solver_error", "1", "‖U − U_s‖/‖U_s‖, U_s the step from the same state with another eigensolver"),
    Column("turn_left", "rad", "angle by which a column of Q_L has turned since the previous step, root mean square"),
    Column("turn_right", "rad", "the same of Q_R"),
    Column("displaced", "count", "columns of the two bases that changed places"),
    Column("off_diagonal", "1", "‖QᵀKQ − diag(QᵀKQ)‖/‖K‖, the larger one of the two factors K"),
    Column("top_left", "1", "largest of the values of L"),
    Column("top_right", "1", "largest of the values of R"),
    Column("floored", "count", "values of L and R below eps, in the place of which the correction puts eps"),
    Column("troubles", "count", "bases so far that an eigensolver gave only in float64, or not at all"),
    Column("failed_step", "count", "first step that is not finite"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    rows, cols = shape_of(point["shape"])
    if point["optimizer"] not in OPTIMIZERS:
        raise unknown("optimizer", point["optimizer"], OPTIMIZERS)
    for name in ("step", "spike_step"):
        if point[name] < 1:
            raise ValueError(f"{name} must be at least 1, not {point[name]}")
    if not 0 <= point["persistent"] < 1:
        raise ValueError(f"persistent must lie in [0, 1), not {point['persistent']}")
    if not point["spike"] > 0:
        raise ValueError(f"spike must be above 0, not {point['spike']}")
    format, remedies = formats.of_numbers(point["format"]).name, parsed(point["remedy"])
    if "start" in remedies and "kl" not in OPTIMIZERS[point["optimizer"]]:
        raise LeftOut(f"remedy 'start' is one of the correction, which {point['optimizer']!r} has not")
    yield {
        **point,
        "shape": f"{rows}x{cols}",
        "rows": rows,
        "cols": cols,
        "persistent": float(point["persistent"]),
        "spike": float(point["spike"]),
        "spike_step": point["spike_step"] if point["spike"] != 1 else None,
        "format": format,
        "remedy": written(remedies),
    }


def parsed(text: str) -> dict[str, float | None]:
    """Return the remedies of a text with their values, None for those that take none.

    Raises
    ------
    ValueError
        For an unknown remedy, one that stands twice, two that contradict each other, or a value that is no positive
        number or has no place.

    Examples
    --------
    >>> parsed("clip+rotated"), parsed("eps=0.01"), parsed("none")
    ({'clip': 1.0, 'rotated': None}, {'eps': 0.01}, {})
    """
    found: dict[str, float | None] = {}
    for part in () if text == NONE else text.split("+"):
        name, given, value = part.partition("=")
        if name not in FIXED and name not in VALUED:
            raise unknown("remedy", name, (NONE, *FIXED, *VALUED))
        if name in found or {name, *found} >= {"permuted", "rotated"}:
            raise ValueError(f"remedy {text!r} sets one thing twice, needed each once")
        found[name] = _number(text, name, value) if given else VALUED.get(name, (None, None))[1]
    return found


def _number(text: str, name: str, value: str) -> float:
    if name in FIXED:
        raise ValueError(f"remedy {text!r} gives {name!r} a value, needed none")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"remedy {text!r} gives {name!r} the value {value!r}, needed a positive number")
    return number


def written(remedies: Mapping[str, float | None]) -> str:
    """Return remedies as one text, in a fixed order; values that are the default are left out.

    Examples
    --------
    >>> written(parsed("rotated+clip=1")), written(parsed("eps=0.010")), written({})
    ('clip+rotated', 'eps=0.01', 'none')
    """
    words = []
    for name in sorted(remedies, key=[*VALUED, *FIXED].index):
        usual = VALUED.get(name, (None, None))[1]
        words.append(name if remedies[name] == usual else f"{name}={remedies[name]:.12g}")
    return "+".join(words) or NONE


def settings(case: Case) -> dict[str, Any]:
    """Return what a case asks of `optim.SOAP` beyond its defaults, the arithmetic aside.

    Examples
    --------
    >>> settings({"optimizer": "rekls", "remedy": "start+rotated"})
    {'kl': True, 'start': 1.0, 'second_moment': 'rotated'}
    """
    asked = dict(OPTIMIZERS[case["optimizer"]])
    for name, value in parsed(case["remedy"]).items():
        asked |= {VALUED[name][0]: value} if name in VALUED else FIXED[name]
    return asked


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    from muon_lab.studies import startup

    snapshot = startup.run(case).at(case["step"])
    if isinstance(snapshot, int):
        raise Ended("nonfinite", f"step {snapshot} is not finite", {"failed_step": snapshot})
    return startup.metrics(snapshot)


def _work(case: Case) -> float:
    """Estimate the flops of a case: decompositions of both factors, for the run and its twin."""
    rows, cols = case["rows"], case["cols"]
    return float(case["step"]) * 2 * (20.0 * (rows**3 + cols**3) + 12.0 * rows * cols * (rows + cols))


STUDY = Study(
    name="preconditioner",
    question="How well are the first steps of SOAP and REKLS determined, and what helps?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="disagreement",
    group=("optimizer", "remedy", "shape", "format", "spike", "persistent"),
    settle=settle,
    measure=measure,
    work=_work,
    facts=("rows", "cols"),
)
