r"""Data parallelism for optimizers of matrices: every parameter is stepped whole, by the one rank that owns it.

Element-wise sharding cuts matrices where a flat buffer happens to end, and what is orthogonalized then is no gradient
of anything. Here each rank steps whole parameters of its own, with the mean gradient

.. math:: \bar G = \frac{1}{p} \sum_r G_r,

and sends the new weights to all. The wrapped optimizer never knows: on each rank it finds gradients on the parameters
that the rank owns, and none elsewhere. So whatever torch calls an optimizer and treats its parameters one by one can be
wrapped, and has its state (momentum, Kronecker factors) on one rank only.

A step, in order:

1. Gradients are averaged, by `all_reduce` or by `reduce_scatter` to their owners.
2. Ranks tell each other, in one small call, which parameters have a gradient on any rank, whose mean is not finite, and
   how long the means are. If any entry of any mean is not finite, nothing changes on any rank.
3. The gradient is clipped by the norm of the whole of it, which is bit for bit the same on all ranks and for every
   ownership. Where matrices are cut over ranks as well (`also`), that is the norm of all parts.
4. Each rank steps what it owns, giants with the help of their teams (`teams`). If the wrapped optimizer raises on one
   rank, no rank's weights or state have changed.
5. New weights are gathered, in shares of exact size or padded to the largest; at once, or where forward reads them.

What was decided
----------------
- *No gradient on some ranks.* It counts as zero there. No gradient on any rank: the parameter is left alone, weight,
  state and counters, and is not sent.
- *Every rank makes the same calls in the same order*, whatever it has gradients of, even if it owns nothing.
- *`.grad` stays what the rank's own backward made.* Means live in buffers, so no half-reduced gradient can be read.
- *Bits.* Moving is exact. A mean over ranks is rounded in the gradient's dtype, or in a wider one (`sums`), in an order
  that depends on the number of ranks and on where in its bucket an entry lies (`orders`).
- *Groups are checked at every step.* Parameters that were added to them, and settings that differ between ranks (a
  learning rate that follows the loss of one rank), are refused on all ranks.
- *Loss scaling.* `torch.amp.GradScaler` decides rank by rank whether to step, so ranks would wait for each other:
  unscale gradients and call `step` always, which itself takes no step with gradients that are not finite.
- *Sparse gradients* are made dense, since a mean over ranks is.

References
----------
NVIDIA/Megatron-LM, ``megatron/core/optimizer/layer_wise_optimizer.py``, commit d98e8a6 (August 2026), for both gathers;
KellerJordan/Muon (2024), whose ranks deal out layers and gather them; deepspeedai/DeepSpeed issue 7807 for what cut
matrices do.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from muon_lab.nearest import unknown
from muon_lab.parallel.balance import Price
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas import agreement, buckets, checkpoints, ownership
from muon_lab.parallel.replicas.agreement import Report
from muon_lab.parallel.replicas.elementwise import is_elementwise
from muon_lab.parallel.replicas.gathering import Gather
from muon_lab.parallel.replicas.ownership import Owners
from muon_lab.parallel.replicas.reducing import REDUCTIONS, Reduction, check_sums
from muon_lab.parallel.replicas.teams import Teams
from muon_lab.parallel.replicas.wrapping import Part
from muon_lab.parallel.traffic import GATHERS


class LayerwiseOptimizer(Part):
    """An optimizer whose parameters are owned, whole, by the ranks of a group.

    Parameters
    ----------
    optimizer : Optimizer
        Of all parameters, the same on every rank: Muon, MOP, SOAP, REKLS, one of torch's, or several joined. Its groups
        are those of this optimizer, so schedulers reach them.
    group : Collectives
        The ranks, each with equal weights and gradients of its own batch.
    owners : policy or its name in `balance.POLICIES`, sequence of int or mapping of name to int, optional
        Which rank owns what: a function of the costs of steps, of the number of ranks and, where it has a parameter of
        that name, of `elements`; the place of the owner of each parameter in the order of the groups, or by name;
        `balance.lpt_flops` without it. What `balance` makes of other costs can be given as it is, costs being those of
        all parameters in that order. Jobs that it divides among teams (`balance.hybrid`) are orthogonalized by these,
        which Muon can share if its direction is that of a schedule; their state and their weights are those of the
        first of the team. No bit of a result depends on owners, but for those of teams.
    price : callable or mapping, optional
        What it costs to step an m×n matrix, by m and n or by shape, for policies: a closed form such as those of
        `cost.flops`, or seconds measured. By default m n min(m, n); of what is stepped entry by entry, its
        elements (`ownership.priced`). Matrices are those that a group's ``view`` finds in a parameter, else its first
        axis by all others.
    gather : {"exact", "padded"}
        Shares as long as they are, or all as long as the longest; with `reduce_scatter` gradients are cut alike.
    reduce : {"all_reduce", "reduce_scatter", "none"}
        Mean gradients on all ranks, on their owners only, or none are made, since gradients are means already.
    clip : float, optional
        The largest norm of the whole gradient.
    also : Collectives, optional
        Ranks that hold other parts of the same parameters, such as the tensor-parallel group of this rank: the norm is
        that of all parts, and a gradient that is not finite, or a step that fails, on one rank of the grid stops the
        step on all. A step that talks to these ranks itself must not fail on some of them alone.
    whole : collection of str
        The parameters, by name, that are no parts but whole on each rank of `also`, with equal gradients there: they
        count once in the norm.
    sums : torch.dtype, optional
        The dtype in which gradients travel and are summed where theirs is narrower, such as float32 for weights in
        bfloat16; the optimizer gets means in the dtype of its parameters all the same. Their own by default.
    model : Module, optional
        Puts buckets into the order of its parameters; needed for `defer`.
    bucket : int, optional
        Bytes after which a bucket is full; without it everything of one dtype is in one.
    defer : bool
        Whether new weights are waited for where the model's forward first reads them (`gathering.Gather.defer_to`), not
        at the end of the step. Call `wait` before you read weights otherwise.
    overlap : bool
        Whether backward begins the reduction of every bucket that it has filled. Gradients then have to be what they
        are when backward ends; wrap all micro-batches but the last in `accumulate`. A parameter that is frozen now and
        not later holds its bucket back until `step`.

    Attributes
    ----------
    owners : dict of str to int
        The place of the rank that owns each parameter.
    report : Report
        What the last step did, the same on every rank.

    Raises
    ------
    ValueError
        On all ranks, if their options, parameters or weights differ; for an optimizer that is wrapped already or that
        treats all parameters as one (LBFGS); for a parameter without owner, or a team whose optimizer steps it whole;
        and for an option out of its range.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> def program(world):
    ...     layers = [nn.Parameter(torch.zeros(2, 2)) for _ in range(4)]
    ...     optimizer = LayerwiseOptimizer(torch.optim.SGD(layers, lr=1.0), world, owners=[0, 1, 0, 0])
    ...     for layer in layers:
    ...         layer.grad = torch.full((2, 2), float(world.rank))
    ...     optimizer.step()
    ...     return [layer[0, 0].item() for layer in layers], optimizer.report.norm, optimizer.owned
    >>> worlds.run(program, ranks=2)[1]
    ([-0.5, -0.5, -0.5, -0.5], 2.0, ('parameter 1 of group 0',))
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Collectives,
        owners: Owners | None = None,
        *,
        price: Price | None = None,
        gather: str = "exact",
        reduce: str = "all_reduce",
        clip: float | None = None,
        also: Collectives | None = None,
        whole: Collection[str] = (),
        sums: torch.dtype | None = None,
        model: nn.Module | None = None,
        bucket: int | None = None,
        defer: bool = False,
        overlap: bool = False,
    ) -> None:
        _check(optimizer, gather, reduce, bucket, model, defer, overlap, sums)
        super().__init__(optimizer, group, clip, also, whole)
        sizes = [p.numel() for p in self.parameters]
        costs, held = ownership.priced(self._matrices(), sizes, price), sizes
        if also is not None:  # ranks with other parts of the same matrices choose the same owners
            costs, held = _largest(also, costs), [int(size) for size in _largest(also, sizes)]
        chosen = ownership.chosen(owners, costs, group.size, held)
        self._owners, teams = ownership.assigned(chosen, self.names, costs, group.size), getattr(chosen, "teams", ())
        order = self._order(model)
        self._require_same(
            owners=self._owners, teams=teams, gather=gather, reduce=reduce, sums=sums, bucket=bucket, order=order
        )
        self._teams = Teams(group, optimizer, self.parameters, self.names, teams)
        self._forget_what_others_own()
        self._averaged_before = reduce == "none"
        self.buckets = buckets.cut(sizes, self.dtypes, self._owners, group.size, order, bucket)
        padded = gather == "padded"
        self._reduction = Reduction(group, self.parameters, self.names, self.buckets, reduce, padded, sums)
        self._gather = Gather(group, self.parameters, self.names, self.buckets, padded)
        if defer and model is not None:
            self._gather.defer_to(model)
        if overlap:
            self._reduction.during_backward()

    @property
    def owners(self) -> dict[str, int]:
        """The place of the rank that owns each parameter."""
        return dict(zip(self.names, self._owners, strict=True))

    @property
    def owned(self) -> tuple[str, ...]:
        """The parameters that this rank owns."""
        return tuple(name for name, owner in self.owners.items() if owner == self.group.rank)

    def wait(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Have the new weights of some parameters there, or of all: what reads them outside of forward calls it first.

        Any order will do, and ranks may differ in it.
        """
        wanted = None if parameters is None else [self._number.get(id(p), -1) for p in parameters]
        if wanted is not None and -1 in wanted:
            raise ValueError(
                f"parameter {wanted.index(-1)} to wait for is none of this optimizer's, needed one that is"
            )
        self._gather.wait(wanted)

    def accumulate(self) -> AbstractContextManager[None]:
        """Let gradients of micro-batches add up: for every backward before a step but the last, with `overlap`.

        Examples
        --------
        >>> from muon_lab.parallel.rendezvous import alone
        >>> W = nn.Parameter(torch.zeros(1))
        >>> optimizer = LayerwiseOptimizer(torch.optim.SGD([W], lr=1.0), alone(), overlap=True)
        >>> with optimizer.accumulate():
        ...     (2 * W).sum().backward()
        >>> (3 * W).sum().backward()
        >>> optimizer.step()
        >>> W.item()
        -5.0
        """
        return self._reduction.paused()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, on all ranks; also those that `overlap` has begun to reduce for a step that never came.

        In that case ranks finish together what they have begun: each must have had a gradient, of whatever parameter.
        """
        self._reduction.drop()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank, as the wrapped optimizer alone would have it; all ranks take part.

        `local_state_dict` of all ranks and `checkpoints.merged` give the same without sending anything.
        """
        self.wait()
        return checkpoints.gathered(self._tagged("checkpoint"), self.local_state_dict())

    def local_state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's dictionary, with the state of what this rank owns."""
        self.wait()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, saved on any number of ranks or by the wrapped optimizer alone.

        Raises
        ------
        ValueError
            If it does not fit, as the wrapped optimizer says.
        """
        self.wait()
        self.optimizer.load_state_dict(checkpoints.restricted(state_dict, self.optimizer, self._is_own))

    def close(self) -> None:
        """Wait for what is under way, and take the hooks off the model and its parameters."""
        self._reduction.drop()
        self._reduction.close()
        self._gather.close()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _means(self) -> dict[int, Tensor]:
        self.wait()
        return self._reduction.means()

    def _agreed(self, means: Mapping[int, Tensor]) -> tuple[Report, set[int]]:
        count = len(self.parameters)
        here = [float(p.grad is not None) for p in self.parameters]
        own = [number for number in means if self._owns(number)]
        norms, bad = [0.0] * count, [0.0] * count
        for number, norm in zip(own, agreement.norms([means[number] for number in own]), strict=True):
            finite = not math.isnan(norm)
            norms[number], bad[number] = norm if finite and self._counts(number) else 0.0, float(not finite)
        mine = self._settings()
        rows = [[*here, mine], [*bad, mine**2], [*norms, 0.0]]
        (*have, sets), (*wrong, squares), (*lengths, _) = agreement.tally(self._tagged("agreement"), rows).tolist()
        report, present, shares = self._decided(have, wrong, math.hypot(*lengths), (sets, squares))
        if self._averaged_before and (some := [i for i, share in enumerate(shares) if 0 < share < 1]):
            raise ValueError(
                f"{', '.join(self._named(some))} has a gradient on some ranks only, needed on all or none for means "
                "that are made before (reduce='none')"
            )
        return report, present

    @contextmanager
    def _shown(self, means: Mapping[int, Tensor], present: set[int], factor: float) -> Iterator[None]:
        """Show the wrapped optimizer mean gradients of what this rank owns, and no others."""
        before = [p.grad for p in self.parameters]
        try:
            for number, p in enumerate(self.parameters):
                G = means.get(number) if number in present and self._owns(number) else None
                p.grad = None if G is None else (G if factor == 1 else G * factor).reshape(p.shape).to(p.dtype)
            yield
        finally:
            for p, gradient in zip(self.parameters, before, strict=True):
                p.grad = gradient

    def _advance(self, present: set[int]) -> None:
        self._teams.step(self.optimizer.step, present)

    def _changing(self, present: set[int]) -> list[Tensor]:
        return [self.parameters[number] for number in sorted(present) if self._owns(number)]

    def _states(self) -> list[dict[Any, Any]]:
        return [leaf.state for leaf in checkpoints.leaves(self.optimizer)]

    def _send(self, present: set[int]) -> None:
        self._gather.begin(present)

    # --- who owns what ------------------------------------------------------------------------------------------------

    def _matrices(self) -> list[list[tuple[int, int, int]]]:
        """Return the matrices (count, m, n) that the optimizers find in each parameter; none if they step entries."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for leaf in checkpoints.leaves(self.optimizer):
            for group in leaf.param_groups:
                for p in group["params"]:
                    if is_elementwise(leaf) or p.ndim < 2:
                        found[id(p)] = []
                    elif (view := group.get("view")) is not None:
                        found[id(p)] = list(view.shapes(p.shape))
                    else:
                        found[id(p)] = [(1, p.shape[0], math.prod(p.shape[1:]))]
        return [found[id(p)] for p in self.parameters]

    def _owns(self, number: int) -> bool:
        return self._owners[number] == self.group.rank

    def _is_own(self, parameter: Tensor) -> bool:
        return self._owns(self._number[id(parameter)])

    def _forget_what_others_own(self) -> None:
        """Drop state that would go stale here: the owner has it too."""
        for leaf in checkpoints.leaves(self.optimizer):
            for p in [p for p in leaf.state if isinstance(p, Tensor) and not self._is_own(p)]:
                del leaf.state[p]

    def _order(self, model: nn.Module | None) -> list[int]:
        """Return the numbers of the parameters in the order of a model; those that it does not have, last."""
        known = [] if model is None else [self._number[id(p)] for p in model.parameters() if id(p) in self._number]
        return list(dict.fromkeys([*known, *range(len(self.parameters))]))


def _largest(ranks: Collectives, numbers: Sequence[float | int]) -> list[float]:
    """Return the largest of each number on any of some ranks."""
    own = torch.tensor(list(numbers), dtype=torch.float64, device=ranks.device)
    found: list[float] = ranks.all_reduce(own, "max").wait().tolist()
    return found


def _check(
    optimizer: torch.optim.Optimizer,
    gather: str,
    reduce: str,
    bucket: int | None,
    model: nn.Module | None,
    defer: bool,
    overlap: bool,
    sums: torch.dtype | None,
) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LayerwiseOptimizer was given LBFGS, needed an optimizer that steps each parameter by itself")
    if gather not in GATHERS:
        raise unknown("gather", gather, GATHERS)
    if reduce not in REDUCTIONS:
        raise unknown("reduce", reduce, REDUCTIONS)
    if bucket is not None and not (isinstance(bucket, Real) and bucket > 0):
        raise ValueError(f"bucket is {bucket!r}, needed a number of bytes above 0 or None")
    check_sums(sums)
    if defer and model is None:
        raise ValueError("defer is True and model None, needed the model in whose forward weights are waited for")
    if overlap and reduce == "none":
        raise ValueError("overlap is True and reduce 'none', needed a reduction that backward can begin")
