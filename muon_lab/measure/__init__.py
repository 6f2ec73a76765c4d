"""Distances to the truth. Imports nothing that it judges."""

from muon_lab.measure import bounds, certificate, eigen, polar

__all__ = ["bounds", "certificate", "eigen", "polar"]
