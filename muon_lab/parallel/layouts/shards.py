"""What a direction knows of the whole matrix of which it sees a part, for rules that depend on more than the part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement


class Whole:
    """What is seen is whole: the base of directions that see less, and what holds for all that say nothing."""

    @property
    def together(self) -> bool:
        """Whether matrices of one shape should come in one stack, however large."""
        return False

    @property
    def ranks(self) -> Collectives | None:
        """The ranks that hold a matrix together; None if one does."""
        return None

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole matrix (or batch), given that of what is seen."""
        return tuple(shape)

    def summed(self, X: Float[Tensor, "*batch p q"], axis: int | None = None) -> Float[Tensor, "*batch p q"]:
        """Return sums over whole matrices, given those over what is seen: along an axis, -2 or -1, or all entries."""
        return X


#: What an ordinary direction sees.
ALONE = Whole()


@dataclass(frozen=True)
class OnShards(Whole):
    """What a rank sees of a matrix cut over ranks: the base of the layouts.

    Parameters
    ----------
    collectives : Collectives
        The ranks that hold the matrix.
    placement : Placement
        What each rank holds.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> from muon_lab.parallel.grid import even
    >>> def look(world):
    ...     cut = OnShards(world, even(3, 2, dim=0))
    ...     sums = torch.tensor([[1.0 + world.rank]])
    ...     return cut.whole_shape((2 - world.rank, 5)), cut.summed(sums).item(), cut.summed(sums, axis=-1).item()
    >>> worlds.run(look, ranks=2)
    [((3, 5), 3.0, 1.0), ((3, 5), 3.0, 2.0)]
    """

    collectives: Collectives = field(repr=False)
    placement: Placement

    @property
    def ranks(self) -> Collectives | None:
        """The ranks that hold the matrix."""
        return self.collectives

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole matrix (or batch), given that of this rank's shard.

        Raises
        ------
        ValueError
            If the shard has another length than this rank holds.
        """
        return self.placement.whole(shape, self.collectives.rank)

    def summed(self, X: Float[Tensor, "*batch p q"], axis: int | None = None) -> Float[Tensor, "*batch p q"]:
        """Return sums over whole matrices: one all_reduce in float64, unless each rank has the whole of the axis."""
        if axis not in (None, self.placement.axis):
            return X
        total = self.collectives.tagged(phase="sum").all_reduce(X.to(torch.float64).contiguous()).wait()
        return total.to(X.dtype)


def seen(direction: Callable[..., Tensor]) -> Whole:
    """Return what a direction knows of the whole.

    Examples
    --------
    >>> seen(torch.sign).whole_shape((2, 3)), seen(torch.sign).ranks
    ((2, 3), None)
    """
    return direction if isinstance(direction, Whole) else ALONE
