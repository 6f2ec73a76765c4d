"""How numbers are kept and multiplied."""

from muon_lab.arithmetic.policy import Arithmetic, Exact, largest, unit

__all__ = ["Arithmetic", "Exact", "largest", "unit"]
