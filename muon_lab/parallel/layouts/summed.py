"""Layouts that sum Gram matrices: each step one, or one in all."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Arithmetic, Exact, unit
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement
from muon_lab.parallel.layouts import resharding
from muon_lab.parallel.layouts.shards import OnShards
from muon_lab.parallel.sharded import Known, Sharded, filled
from muon_lab.parallel.volume import long_axis
from muon_lab.polar import Orthogonalizer, Schedule, gram_newton_schulz, newton_schulz
from muon_lab.polar.engine import check

#: Squared norms between which nothing that matters of a float32 Gram matrix overflows or vanishes: what is below the
#: smallest float32 is less than 2^-149 / 2^-80 = 2^-69 of the whole.
SAFE = (2.0**-80, 2.0**126)


def distributed(
    schedule: Schedule,
    collectives: Collectives,
    placement: Placement,
    arithmetic: Arithmetic = Exact(),  # noqa: B008 (a value)
    start: str = "frobenius",
    accumulate: torch.dtype | None = None,
) -> Orthogonalizer:
    r"""Return the layout in which ranks iterate on their shards and sum the Gram matrix in every step.

    It is `newton_schulz` with `Sharded` arithmetic. The Gram matrix is that of the axis that is not cut, so that axis
    has to be the short one: a matrix that is cut along its short axis is cut anew along the long one, by one all_to_all
    before and one after. The result is that of one rank but for the order of sums.

    Parameters
    ----------
    schedule : Schedule
        From `schedules.get`, or your own.
    collectives : Collectives
        The ranks that hold the matrix.
    placement : Placement
        What each rank holds.
    arithmetic : Arithmetic
        How numbers are kept and multiplied on a rank.
    start : str
        As in `newton_schulz`.
    accumulate : torch.dtype, optional
        As in `Sharded`.

    Returns
    -------
    callable
        From a shard ``(*batch, m, n)`` to the same shape and dtype.

    Raises
    ------
    ValueError
        As for `duplicated` and `newton_schulz`, on every rank.

    References
    ----------
    NVIDIA-NeMo/Emerging-Optimizers, ``newton_schulz_tp(tp_mode="distributed")``.

    Examples
    --------
    >>> from functools import partial
    >>> from muon_lab import polar
    >>> from muon_lab.parallel import worlds
    >>> from muon_lab.parallel.grid import even
    >>> rows, schedule = even(2, 2, dim=0), polar.schedules.get("polar_express", 8)
    >>> def update(world):
    ...     return distributed(schedule, world, rows)(torch.tensor([[1.0 + 6 * world.rank]]))
    >>> torch.cat(worlds.run(update, ranks=2)).T
    tensor([[0.1414, 0.9899]])
    """

    def on_long(shard: Tensor) -> Float[Tensor, "*batch k s"]:
        policy = Sharded(arithmetic, collectives, shard.shape[-1], accumulate)
        return policy.there(newton_schulz(schedule, policy, start)(_wide(shard)))

    return _along_the_long_axis(on_long, collectives, placement)


def gram(
    schedule: Schedule,
    collectives: Collectives,
    placement: Placement,
    arithmetic: Arithmetic = Exact(),  # noqa: B008 (a value)
    start: str = "frobenius",
) -> Orthogonalizer:
    r"""Return the layout that sums one Gram matrix, iterates on it on every rank, and multiplies the shards once.

    One all_reduce in float32 (float64 for float64 shards), whatever the number of steps: the norm of the matrix is the
    root of the trace of its Gram matrix. Only where squares leave the range of float32 the norm is asked for, and the
    sum taken once more. The iteration runs in the dtype of the sum, unless the arithmetic has one of its own.

    It is `gram_newton_schulz` without restarts: rounding of the Gram matrix grows with the steps for singular values
    below the root of the roundoff (`restarts` predicts how much). On a log-spaced spectrum of condition 1e4 in float32,
    five steps of polar_express are off by 7e-4 and eight by 2e-2, where `distributed` is off by 3e-5. An arithmetic of
    less range than float32 meets the matrix before it is normalised.

    Parameters
    ----------
    schedule, collectives, placement, arithmetic, start
        As for `distributed`.

    Returns
    -------
    callable
        From a shard ``(*batch, m, n)`` to the same shape and dtype.

    Raises
    ------
    ValueError
        As for `distributed`.

    References
    ----------
    Dao-AILab/gram-newton-schulz, for the iteration.

    Examples
    --------
    >>> from muon_lab import polar
    >>> from muon_lab.parallel import worlds
    >>> from muon_lab.parallel.grid import even
    >>> from muon_lab.parallel.ledger import Ledger
    >>> rows, schedule = even(2, 2, dim=0), polar.schedules.get("polar_express", 8)
    >>> def update(world):
    ...     ledger = Ledger(world)
    ...     return gram(schedule, ledger, rows)(torch.tensor([[1.0 + 6 * world.rank]])).item(), ledger.calls
    >>> [(round(value, 4), calls) for value, calls in worlds.run(update, ranks=2)]
    [(0.1414, 1), (0.9899, 1)]
    """

    def on_long(shard: Tensor) -> Float[Tensor, "*batch k s"]:
        X = shard.flatten(0, -3) if shard.ndim > 3 else shard
        X = X.to(torch.promote_types(X.dtype, torch.float32)).contiguous()
        norm, R = _norm_and_gram(X, arithmetic, collectives)
        known = Known(arithmetic, norm, R, X.shape[-1])
        update = known.there(gram_newton_schulz(schedule, known, restarts=(), start=start)(_wide(X)))
        return update.to(shard.dtype).reshape(shard.shape)

    return _along_the_long_axis(on_long, collectives, placement)


def _norm_and_gram(
    X: Float[Tensor, "*batch k s"], arithmetic: Arithmetic, collectives: Collectives
) -> tuple[Float[Tensor, "*batch 1 1"], Float[Tensor, "*batch k k"]]:
    """Return norm and normalised Gram matrix of the whole matrix, the cut axis last, on every rank."""
    policy = Sharded(arithmetic, collectives)
    R = policy.gram(X)
    square = _trace(R)
    if ((square >= SAFE[0]) & (square <= SAFE[1])).all():
        return square.sqrt(), (R / square).to(R.dtype)
    norm = policy.norm(X)
    if not torch.isfinite(norm).all():
        raise ValueError(
            f"the matrix to orthogonalize must be finite, but {int((~torch.isfinite(X)).sum())} of the {X.numel()} "
            "entries of this shard are not"
        )
    return norm, policy.gram(unit(X, norm))


def _trace(R: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch 1 1"]:
    return R.diagonal(dim1=-2, dim2=-1).double().sum(-1)[..., None, None]


def _wide(X: Float[Tensor, "*batch k s"]) -> Float[Tensor, "*batch k n"]:
    """Return a shard, its cut axis last, that the engine does not turn."""
    return filled(X, X.shape[-2])


@dataclass(frozen=True)
class _AlongTheLongAxis(OnShards):
    """What a rank does with its shard, cut along the long axis and lying so that this axis is the last."""

    on_long: Callable[[Tensor], Tensor]

    def __call__(self, shard: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
        check(shard)
        whole = self.whole_shape(shard.shape)
        if not torch.Size(whole).numel():
            return shard.clone()
        cut = long_axis(whole, self.placement)
        moving = cut != self.placement and self.collectives.size > 1
        ranks = self.collectives.tagged(phase="reshard")
        X = resharding.recut(shard, ranks, self.placement, cut) if moving else shard
        lying = X if cut.dim == 1 else X.mT
        update = self.on_long(lying)
        update = update if cut.dim == 1 else update.mT
        update = resharding.recut(update, ranks, cut, self.placement) if moving else update
        return update.contiguous()


def _along_the_long_axis(
    on_long: Callable[[Tensor], Tensor], collectives: Collectives, placement: Placement
) -> Orthogonalizer:
    resharding.check(placement, collectives)
    return _AlongTheLongAxis(collectives, placement, on_long)
