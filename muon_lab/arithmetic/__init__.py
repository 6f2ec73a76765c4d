"""How numbers are kept and multiplied."""

from muon_lab.arithmetic.policy import Arithmetic, Exact, unit

__all__ = ["Arithmetic", "Exact", "unit"]
