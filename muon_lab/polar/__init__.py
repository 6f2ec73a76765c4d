"""Orthogonalization: schedules as data, one iteration engine, exact polar factors."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.polar import minimax, provenance, rational, schedules
    from muon_lab.polar.batches import together
    from muon_lab.polar.choice import Choice, auto
    from muon_lab.polar.direct import Decomposition, Direct, gram_eigh, svd
    from muon_lab.polar.engine import NewtonSchulz, Orthogonalizer, iterates, newton_schulz
    from muon_lab.polar.gram import GramNewtonSchulz, gram_newton_schulz
    from muon_lab.polar.rational import halley, qdwh, scaled_newton
    from muon_lab.polar.schedules import Design, Schedule, ScheduleWarning

__all__ = [
    "Choice",
    "Decomposition",
    "Design",
    "Direct",
    "GramNewtonSchulz",
    "NewtonSchulz",
    "Orthogonalizer",
    "Schedule",
    "ScheduleWarning",
    "auto",
    "flops",
    "gram_eigh",
    "gram_newton_schulz",
    "halley",
    "iterates",
    "minimax",
    "newton_schulz",
    "provenance",
    "qdwh",
    "rational",
    "restarts",
    "scaled_newton",
    "schedules",
    "starts",
    "svd",
    "together",
]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        **{name: name for name in ("flops", "minimax", "provenance", "restarts", "schedules", "starts")},
        **dict.fromkeys(("Choice", "auto"), "choice"),
        "together": "batches",
        **dict.fromkeys(("GramNewtonSchulz", "gram_newton_schulz"), "gram"),
        "Design": "schedules",
        "Schedule": "schedules",
        "ScheduleWarning": "schedules",
        **dict.fromkeys(("NewtonSchulz", "Orthogonalizer", "iterates", "newton_schulz"), "engine"),
        "rational": "rational",
        **dict.fromkeys(("Decomposition", "Direct", "gram_eigh", "svd"), "direct"),
        **dict.fromkeys(("halley", "qdwh", "scaled_newton"), "rational"),
    },
)
