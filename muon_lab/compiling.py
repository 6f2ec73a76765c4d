"""What `torch.compile` must leave alone."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function so that it runs as it is written, also where its caller is compiled.

    A compiler may add numbers in another order, keep a number in more digits than its dtype has, or drop a rounding
    whose only purpose is to round: C++ made by torch 2.13 returns an MXFP8 orthogonalization that is off by 0.9. What
    emulates a format, scales by bits or depends on values must not go through it. The graph of the caller breaks here.

    Examples
    --------
    >>> @as_written
    ... def to_integers(x, shift=1.5 * 2**23):
    ...     return (x + shift) - shift
    >>> to_integers(torch.tensor([0.5, 1.5, 2.6]))
    tensor([0., 2., 3.])
    """

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return whole
