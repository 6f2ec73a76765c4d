r"""How a parameter of any shape is read as matrices, declared and not guessed.

A `View` names the axes that count matrices, those that form the rows, and the row sizes of what is fused; all other
axes form the columns, in their order. `View.parts` gives the matrices, a stack ``(count, m, n)`` for each part of
equal shape, and `View.whole` puts them back; the round trip is exact.

====================================== ==========================================================================
``FLATTENED``                          the first axis is the rows: a linear layer, a convolution (out, in, kh, kw)
``STACKED``                            the first axis counts matrices: experts (count, out, in)
``TRANSPOSED``                         the second axis is the rows: a weight stored (in, out)
``View(batch=(0,), rows=(2,))``        experts stored (count, in, out)
``fused(768, 768, 768)``               queries, keys and values one below the other, each a matrix
``fused(8, 8, 2, 2)``                  queries, gate, keys, values
``fused(256, 64, 64, groups=8)``       eight query groups, each with its queries, keys and values; the queries of all
                                       groups form one matrix
``fused(768, 768, 768, head=64)``      every head of 64 rows a matrix
``View(head=64)``                      the same for a weight of one kind; also the groups of a grouped convolution
====================================== ==========================================================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class View:
    """How the axes of a parameter form matrices.

    Attributes
    ----------
    batch : tuple of int
        Axes that count matrices.
    rows : tuple of int
        Axes that form the rows, at least one.
    blocks : tuple of int
        Row sizes of what is fused, in order; nothing is if there are none.
    groups : int
        How often the blocks repeat along the rows. Rows of one block from all groups form one matrix.
    head : int, optional
        Rows of a head: each block is cut into matrices of so many rows.

    Raises
    ------
    ValueError
        If a size is not a positive integer, an axis is named twice, no axis forms the rows, groups repeat nothing, or a
        block is not a whole number of heads.

    Examples
    --------
    >>> view = View(blocks=(4, 2, 2))
    >>> X = torch.arange(24.0).reshape(8, 3)
    >>> [tuple(part.shape) for part in view.parts(X)]
    [(1, 4, 3), (1, 2, 3), (1, 2, 3)]
    >>> torch.equal(view.whole(view.parts(X), X.shape), X)
    True
    """

    batch: tuple[int, ...] = ()
    rows: tuple[int, ...] = (0,)
    blocks: tuple[int, ...] = ()
    groups: int = 1
    head: int | None = None

    def __post_init__(self) -> None:
        sizes = (*self.blocks, self.groups, *(() if self.head is None else (self.head,)))
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"{self}: sizes are blocks {self.blocks}, groups {self.groups!r} and head {self.head!r}, "
                "needed positive integers"
            )
        axes = (*self.batch, *self.rows)
        if not self.rows or not all(type(axis) is int for axis in axes) or len(set(axes)) < len(axes):
            raise ValueError(f"batch is {self.batch} and rows {self.rows}, needed different axes and one for the rows")
        if self.groups > 1 and not self.blocks:
            raise ValueError(f"groups is {self.groups} without blocks, needed the row sizes of what repeats")
        if self.head is not None and any(block % self.head for block in self.blocks):
            raise ValueError(f"blocks are {self.blocks}, needed multiples of head = {self.head}")

    def shapes(self, shape: Sequence[int], name: str = "the parameter") -> tuple[tuple[int, int, int], ...]:
        """Return how many matrices of which shape a parameter has, (count, m, n) for each part.

        Raises
        ------
        ValueError
            If the view does not fit, with the name of the parameter and both numbers.

        Examples
        --------
        >>> FLATTENED.shapes((64, 32, 3, 3)), STACKED.shapes((8, 64, 32))
        (((1, 64, 288),), ((8, 64, 32),))
        """
        batch, rows, columns = self._axes(len(shape), name)
        count, m, n = (math.prod(shape[axis] for axis in axes) for axes in (batch, rows, columns))
        if self.blocks and self.groups * sum(self.blocks) != m:
            times = f"{self.groups} times " if self.groups > 1 else ""
            raise ValueError(
                f"{name} has {m} rows (shape {tuple(shape)}), needed {times}"
                f"{' + '.join(map(str, self.blocks))} = {self.groups * sum(self.blocks)} as its blocks say"
            )
        if self.head is None:
            return tuple((count, self.groups * block, n) for block in self.blocks) or ((count, m, n),)
        if not self.blocks and m % self.head:
            raise ValueError(f"{name} has {m} rows (shape {tuple(shape)}), needed a multiple of head = {self.head}")
        whole = tuple(self.groups * block for block in self.blocks) or (m,)
        return tuple((count * (block // self.head), self.head, n) for block in whole)

    def parts(self, X: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "_ _ _"], ...]:
        """Return the matrices, (count, m, n) for each part: views of X where its strides allow.

        Raises
        ------
        ValueError
            If the view does not fit.
        """
        shapes = self.shapes(X.shape)
        order, sizes = self._order(X.shape)
        count, m, n = sizes
        stack = X.permute(order).reshape(count, m, n)
        if not self.blocks:
            return (stack.reshape(shapes[0]),)
        repeated = stack.reshape(count, self.groups, m // self.groups, n).split(self.blocks, dim=2)
        return tuple(block.reshape(shape) for block, shape in zip(repeated, shapes, strict=True))

    def whole(self, parts: Sequence[Float[Tensor, "_ _ _"]], shape: Sequence[int]) -> Float[Tensor, "*shape"]:
        """Return the parameter-shaped tensor of which these are the parts.

        Raises
        ------
        ValueError
            If the view does not fit the shape.
        """
        self.shapes(shape)
        order, (count, _, n) = self._order(shape)
        if self.blocks:
            repeated = [
                part.reshape(count, self.groups, block, n) for part, block in zip(parts, self.blocks, strict=True)
            ]
            stack = torch.cat(repeated, dim=2)
        else:
            (stack,) = parts
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return stack.reshape([shape[axis] for axis in order]).permute(inverse)

    def _axes(self, ndim: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the axes that count, form rows and form columns, all of them not negative."""
        named = (*self.batch, *self.rows)
        if not all(-ndim <= axis < ndim for axis in named):
            raise ValueError(f"{name} has {ndim} axes, needed those that its view names: {named}")
        batch, rows = (tuple(axis % ndim for axis in axes) for axes in (self.batch, self.rows))
        columns = tuple(axis for axis in range(ndim) if axis not in (*batch, *rows))
        if not columns or len({*batch, *rows}) < len(named):
            raise ValueError(f"{name} has {ndim} axes, needed one for the columns beside {named}, all different")
        return batch, rows, columns

    def _order(self, shape: Sequence[int]) -> tuple[list[int], tuple[int, int, int]]:
        """Return the permutation of the axes, and the sizes of the stack that it makes."""
        axes = self._axes(len(shape), "the parameter")
        count, m, n = (math.prod(shape[axis] for axis in group) for group in axes)
        return [axis for group in axes for axis in group], (count, m, n)


FLATTENED = View()
STACKED = View(batch=(0,), rows=(1,))
TRANSPOSED = View(rows=(1,))


def fused(*blocks: int, groups: int = 1, head: int | None = None) -> View:
    """Return the view of a weight whose rows are several matrices.

    Parameters
    ----------
    blocks : int
        Their row sizes, in order.
    groups, head : int
        As for `View`.

    Raises
    ------
    ValueError
        As for `View`.

    Examples
    --------
    >>> fused(256, 64, 64, groups=2).shapes((768, 512))
    ((1, 512, 512), (1, 128, 512), (1, 128, 512))
    >>> fused(256, 64, 64, groups=2, head=64).shapes((768, 512))
    ((8, 64, 512), (2, 64, 512), (2, 64, 512))
    """
    return View(blocks=blocks, groups=groups, head=head)


def check_parameter(parameter: Tensor, view: object, name: str) -> View:
    """Return the view of a parameter, `FLATTENED` for a matrix with none declared, or say why it is no matrix.

    Raises
    ------
    ValueError
        For a parameter that is not real floating point or has fewer than two axes, for one with more and no view, and
        where the view is none or does not fit; the message has the name.

    Examples
    --------
    >>> check_parameter(torch.ones(3, 4), None, "weight") == FLATTENED
    True
    """
    shape = tuple(parameter.shape)
    if view is not None and not isinstance(view, View):
        raise ValueError(f"{name} has the view {view!r}, needed a View such as matrices.STACKED or matrices.fused(...)")
    if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"{name} has dtype {parameter.dtype}, needed a real one of float16, bfloat16, float32 and float64"
        )
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {shape}, needed a matrix: vectors and numbers belong to AdamW")
    if view is None and len(shape) > 2:
        raise ValueError(
            f"{name} has shape {shape} and no view, needed one, such as matrices.FLATTENED for a convolution or "
            "matrices.STACKED for experts"
        )
    view = FLATTENED if view is None else view
    view.shapes(shape, name)
    return view
