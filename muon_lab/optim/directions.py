"""How a direction is named: a schedule and its steps, in the cheapest form for each shape, or any orthogonalizer."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.parallel.layouts import OwnerOfList
from muon_lab.polar import choice, schedules
from muon_lab.polar.engine import Orthogonalizer
from muon_lab.polar.schedules import Schedule

#: What `get` makes an orthogonalizer of.
Direction = Orthogonalizer | Schedule | str | tuple[str, int]


@dataclass(frozen=True)
class Automatic:
    """The orthogonalizer that applies a schedule in the form that `polar.auto` chooses for the shape at hand.

    Attributes
    ----------
    schedule : Schedule
        The polynomials.

    Examples
    --------
    >>> direction = Automatic(schedules.get("quintic", 5))
    >>> direction.choice((64, 256), torch.float32).form, direction.choice((64, 64), torch.float32).form
    ('gram', 'plain')
    """

    schedule: Schedule

    def __call__(self, G: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
        """Return the approximate polar factor of each matrix."""
        return self.choice((G.shape[-2], G.shape[-1]), G.dtype)(G)

    def choice(self, shape: tuple[int, int], dtype: torch.dtype) -> choice.Choice:
        """Return what is chosen for a shape and dtype."""
        return _chosen(self.schedule, shape, dtype)


@lru_cache
def _chosen(schedule: Schedule, shape: tuple[int, int], dtype: torch.dtype) -> choice.Choice:
    return choice.auto(shape, schedule=schedule, dtype=dtype)


def get(direction: Direction) -> Orthogonalizer:
    """Return an orthogonalizer: itself, or that of a schedule, a schedule's name, or a name and a number of steps.

    Raises
    ------
    ValueError
        For what is none of these, for the layout `owner` of a list, and for an unknown name or an impossible number of
        steps.

    Examples
    --------
    >>> get(("polar_express", 8)).schedule.name
    'polar_express'
    """
    if isinstance(direction, str):
        return Automatic(schedules.get(direction))
    if isinstance(direction, tuple) and len(direction) == 2:
        return Automatic(schedules.get(*direction))
    if isinstance(direction, Schedule):
        return Automatic(direction)
    if not callable(direction):
        raise ValueError(
            f"direction is {direction!r}, needed an orthogonalizer, a schedule, or its name, alone or with its steps"
        )
    if isinstance(direction, OwnerOfList):
        raise ValueError(
            f"direction is owner of a list of {len(direction.placements)} matrices, needed that of a stack, "
            "layouts.owner(orthogonalize, collectives, placement) with one placement"
        )
    return direction
