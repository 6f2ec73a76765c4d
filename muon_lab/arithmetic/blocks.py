r"""Blocks of a tensor of any rank as tiles of a batch of matrices, a piece at a time.

Blocks of b entries along an axis are 1×b tiles of the matrix whose rows are that axis if the axis is the last one in
memory, and b×1 tiles otherwise; b×b tiles stay what they are. In all three cases the tensor is a batch of matrices
B×R×C in its own memory order (no transposition), and a *piece* of it is a view of shape (B', R'/p, p, C'/q, q): the
tiles are the axes 2 and 4. Rows and columns that don't fill a tile make pieces of smaller tiles, which is the same as
padding each row with zeros.

Pieces are small, so that scratch memory stays in cache: passes over memory, not arithmetic, are what rounding costs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

#: Entries of a piece: 2 MiB of float32. From 2¹⁷ to 2²⁰ the speed hardly depends on it.
PIECE = 2**19


@dataclass(frozen=True)
class Layout:
    """How a tensor is seen as a batch of matrices in tiles.

    Parameters
    ----------
    order : tuple of int
        The tensor's axes from slow to fast in memory.
    axes : tuple of int
        The axis of the matrices (0 batch, 1 row, 2 column) that each axis, in this order, is part of.
    shape : tuple of int
        Batch size, rows, columns.
    tile : tuple of int
        Rows and columns of a tile.
    """

    order: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, int, int]
    tile: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles along the batch, the rows and the columns."""
        return self.shape[0], -(-self.shape[1] // self.tile[0]), -(-self.shape[2] // self.tile[1])

    def matrices(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "b r c"]:
        """Return a tensor of this layout as a batch of matrices: a view if its memory is in order, else a copy."""
        return x.permute(self.order).reshape(self.shape)

    @property
    def back(self) -> list[int]:
        """The permutation that undoes `order`."""
        return [self.order.index(axis) for axis in range(len(self.order))]

    def new(self, x: Shaped[Tensor, "..."], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        """Return an empty tensor of x's shape, in order."""
        sizes = [x.shape[axis] for axis in self.order]
        return torch.empty(sizes, dtype=dtype, device=x.device).permute(self.back)

    def spread(self, per_tile: Shaped[Tensor, "b nr nc"], x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return what there is one of a tile with the axes of x, of which those in tiles are shorter."""
        sizes = [x.shape[axis] for axis in self.order]
        for part, edge in zip((1, 2), self.tile, strict=True):
            if edge > 1:
                position = self.axes.index(part)
                sizes[position] = -(-sizes[position] // edge)
        return per_tile.reshape(sizes).permute(self.back)


@dataclass(frozen=True)
class Piece:
    """A part of a batch of matrices that holds whole tiles, all of one size.

    Parameters
    ----------
    parts : tuple of slice
        Which batch entries, rows and columns.
    tile : tuple of int
        Rows and columns of its tiles.
    grid : tuple of slice
        The same part, counted in tiles of the layout.
    """

    parts: tuple[slice, slice, slice]
    tile: tuple[int, int]
    grid: tuple[slice, slice, slice]

    def of(self, matrices: Shaped[Tensor, "b r c"]) -> Shaped[Tensor, "b2 nr p nc q"]:
        """Return this part as a view in tiles."""
        (p, q), part = self.tile, matrices[self.parts]
        b, r, c = part.shape
        return part.view(b, r // p, p, c // q, q)

    def scales(self, per_tile: Shaped[Tensor, "b nr nc"]) -> Shaped[Tensor, "b2 nr2 1 nc2 1"]:
        """Return what there is one of a tile of this part, as a view that broadcasts to it."""
        return per_tile[self.grid].unsqueeze(-1).unsqueeze(2)


def along(x: Shaped[Tensor, "..."], axis: int, block: int) -> Layout:
    """Return the layout of blocks along an axis.

    Examples
    --------
    >>> import torch
    >>> W = torch.empty(64, 96)
    >>> [(l.shape, l.tile) for l in (along(W, 1, 32), along(W, 0, 32), along(W.mT, 1, 32))]
    [((1, 64, 96), (1, 32)), ((1, 64, 96), (32, 1)), ((1, 64, 96), (32, 1))]
    """
    order = _order(x)
    sizes = [x.shape[axis] for axis in order]
    position = order.index(axis)
    before, n, after = math.prod(sizes[:position]), sizes[position], math.prod(sizes[position + 1 :])
    if after == 1:
        axes = tuple(2 if i == position else 1 for i in range(len(sizes)))
        return Layout(order, axes, (1, before, n), (1, block))
    axes = tuple(0 if i < position else 1 if i == position else 2 for i in range(len(sizes)))
    return Layout(order, axes, (before, n, after), (block, 1))


def tiles(x: Shaped[Tensor, "..."], edge: int) -> Layout:
    """Return the layout of square tiles over the last two axes.

    Examples
    --------
    >>> import torch
    >>> layout = tiles(torch.empty(3, 64, 100), 32)
    >>> layout.shape, layout.tile, layout.grid
    ((3, 64, 100), (32, 32), (3, 2, 4))
    """
    order = _order(x)
    if set(order[-2:]) != {x.ndim - 2, x.ndim - 1}:
        order = tuple(range(x.ndim))
    sizes = [x.shape[axis] for axis in order]
    axes = (0,) * (x.ndim - 2) + (1, 2)
    return Layout(order, axes, (math.prod(sizes[:-2]), sizes[-2], sizes[-1]), (edge, edge))


def whole(x: Shaped[Tensor, "..."]) -> Layout:
    """Return the layout of a tensor without blocks: one long row, every entry its own tile."""
    return Layout(_order(x), (2,) * x.ndim, (1, 1, x.numel()), (1, 1))


def pieces(layout: Layout, entries: int = PIECE) -> Iterator[Piece]:
    """Yield the pieces of a layout in memory order, each of about so many entries.

    Examples
    --------
    >>> import torch
    >>> [piece.parts[2] for piece in pieces(along(torch.empty(4, 40), 1, 32))]
    [slice(0, 32, None), slice(32, 40, None)]
    """
    batch, rows, columns = layout.shape
    p, q = layout.tile
    if not batch * rows * columns:
        return
    across = _at_least_one(entries // min(p, rows), q, columns)
    down = _at_least_one(entries // across, p, rows)
    deep = _at_least_one(entries // (across * down), 1, batch)
    for b in _spans(batch, 1, deep):
        for r in _spans(rows, p, down):
            for c in _spans(columns, q, across):
                tile = min(p, r.stop - r.start), min(q, c.stop - c.start)
                yield Piece((b, r, c), tile, (b, _in_tiles(r, p), _in_tiles(c, q)))


def _spans(n: int, edge: int, step: int) -> Iterator[slice]:
    """Cover 0..n with spans of whole tiles, then one with what is left."""
    filled = n - n % edge
    for start in range(0, filled, step):
        yield slice(start, min(start + step, filled))
    if filled < n:
        yield slice(filled, n)


def _in_tiles(span: slice, edge: int) -> slice:
    return slice(span.start // edge, -(-span.stop // edge))


def _at_least_one(wanted: int, edge: int, n: int) -> int:
    """Return about so many entries, in whole tiles, and no more than there are."""
    return max(edge, min(wanted, n) // edge * edge)


def _order(x: Tensor) -> tuple[int, ...]:
    """Return the axes from slow to fast if that makes the memory of x one run, else as they are."""
    order = tuple(sorted(range(x.ndim), key=lambda axis: (-x.stride()[axis], axis)))
    return order if x.permute(order).is_contiguous() else tuple(range(x.ndim))
