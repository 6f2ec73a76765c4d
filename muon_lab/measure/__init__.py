"""Distances to the truth. Imports nothing that it judges."""

from muon_lab.measure import bounds, polar

__all__ = ["bounds", "polar"]
