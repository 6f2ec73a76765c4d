"""The truth, slowly: NumPy float64 and mpmath. Imports nothing else of the lab."""

from muon_lab.oracle import eigen, marchenko_pastur, multiprecision, optimizers, polar, rounding

__all__ = ["eigen", "marchenko_pastur", "multiprecision", "optimizers", "polar", "rounding"]
