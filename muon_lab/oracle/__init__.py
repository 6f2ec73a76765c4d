"""The truth, slowly: NumPy float64 and mpmath. Imports nothing else of the lab."""

from muon_lab.oracle import multiprecision, polar, rounding

__all__ = ["multiprecision", "polar", "rounding"]
