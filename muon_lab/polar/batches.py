"""Many matrices at once: those of one shape in one batch, so that a small product costs no more than its flops."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from muon_lab.polar.engine import Orthogonalizer, check, not_finite

#: On a CPU a matrix with more entries goes alone: its products run at full rate by themselves, in a batch a bit below.
ALONE = 2**14

#: The most entries in a batch.
ENTRIES = 2**22


def together(
    choose: Callable[[tuple[int, ...]], Orthogonalizer],
    matrices: Sequence[Tensor],
    *,
    alone: int | None = None,
    entries: int = ENTRIES,
) -> list[Tensor]:
    """Orthogonalize matrices, equal shapes in batches.

    Parameters
    ----------
    choose : callable
        From a shape to the orthogonalizer for it, such as ``lambda shape: polar.auto(shape, 5)``; asked once for every
        shape, dtype and device.
    matrices : sequence of tensor
        Of any shapes ``(*batch, m, n)``. Matrices of one shape, dtype and device are stacked.
    alone : int, optional
        A matrix with more entries is not stacked with others; by default 2¹⁴ on a CPU, anything on a GPU.
    entries : int
        The most entries in a batch.

    Returns
    -------
    list of tensor
        In the order of the input.

    Raises
    ------
    ValueError
        As `newton_schulz`, for the first matrix that cannot be orthogonalized; the message says which one it is.

    Examples
    --------
    >>> from muon_lab import polar
    >>> G = [torch.eye(2, 3), torch.ones(1, 4), 2 * torch.eye(2, 3)]
    >>> [tuple(X.shape) for X in together(lambda shape: polar.svd(), G)]
    [(2, 3), (1, 4), (2, 3)]
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, G in enumerate(matrices):
        with _named(matrices, [index]):
            check(G)
        groups[tuple(G.shape), G.dtype, G.device].append(index)
    found: dict[int, Tensor] = {}
    for (shape, *_), indices in groups.items():
        orthogonalize = choose(shape)  # type: ignore[arg-type]
        size = _batch(matrices[indices[0]], alone, entries)
        for first in range(0, len(indices), size):
            part = indices[first : first + size]
            with _named(matrices, part):
                found.update(zip(part, _orthogonalized(orthogonalize, [matrices[i] for i in part]), strict=True))
    return [found[index] for index in range(len(matrices))]


def _orthogonalized(orthogonalize: Orthogonalizer, equal: list[Tensor]) -> Sequence[Tensor]:
    """Return the factors of matrices of one shape; one alone is not stacked, which would copy it."""
    return [orthogonalize(equal[0])] if len(equal) == 1 else orthogonalize(torch.stack(equal)).unbind()


@contextlib.contextmanager
def _named(matrices: Sequence[Tensor], part: Sequence[int]) -> Iterator[None]:
    """Say in an error for some of the matrices which one it is about."""
    try:
        yield
    except ValueError as error:
        bad = part[0]
        if len(part) > 1:
            bad = next((index for index in part if not torch.isfinite(matrices[index]).all()), -1)
        if bad < 0:
            raise
        what = not_finite(matrices[bad]) if len(part) > 1 else error
        raise ValueError(f"matrix {bad} (of {len(matrices)}, counted from 0): {what}") from error


def _batch(G: Tensor, alone: int | None, entries: int) -> int:
    """Return how many matrices like G make a batch."""
    limit = alone if alone is not None else ALONE if G.device.type == "cpu" else entries
    return 1 if G.numel() > limit else max(1, entries // max(1, G.numel()))
