"""Orthogonalization: schedules as data, one iteration engine, exact polar factors."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.polar import schedules
    from muon_lab.polar.direct import svd
    from muon_lab.polar.engine import Orthogonalizer, iterates, newton_schulz
    from muon_lab.polar.schedules import Schedule, ScheduleWarning

__all__ = ["Orthogonalizer", "Schedule", "ScheduleWarning", "iterates", "newton_schulz", "schedules", "svd"]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "schedules": "schedules",
        "Schedule": "schedules",
        "ScheduleWarning": "schedules",
        "Orthogonalizer": "engine",
        "iterates": "engine",
        "newton_schulz": "engine",
        "svd": "direct",
    },
)
