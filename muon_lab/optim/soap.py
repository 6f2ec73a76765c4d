r"""SOAP: Adam in the eigenbases of the two Kronecker factors of the gradient of every matrix.

One step on a weight W (m, n) with gradient G, in "current" order:

1. G enters the factors L and R (`eigen.factors`), by the Kullback-Leibler correction or plainly.
2. When the number of the Adam step is a multiple of `frequency`, and at the first gradient, the bases are made anew
   (`eigen.track`): by a decomposition, or by orthogonal iteration from the old ones, the first always by a
   decomposition. The first moment goes along, and the second as `second_moment` says (`eigen.precondition`).
3. Decay. That of the form `l2` enters here: the factors see the raw gradient.
4. :math:`G' = Q_L^T G\, Q_R`, the Adam step U' on it, :math:`U = Q_L U' Q_R^T`, its RMS limited where `max_rms` is set.
5. :math:`W \leftarrow W - \eta U`.

In "lagged" order 1 and 2 come after 5, so that a gradient is projected with bases that have not seen it.

What was decided
----------------
- *First step.* In exact arithmetic the first G' is diagonal, the bases being those of G itself: Adam divides what
  rounding leaves off the diagonal by its own size plus :math:`\epsilon`. "apply" does so; "skip" lets the first
  gradient make the bases and nothing else: no decay, no moments, and Adam's count stays at 0.
- *Second step.* After "apply" the second moments of most entries are squares of rounding, and `unchanged` moments meet
  gradients of full size in the new bases: with :math:`\epsilon = 10^{-8}` and Gaussian gradients of 32 by 64 the RMS of
  that update reaches a thousand. It stays near 1 with `rotated` moments, which spread with the bases, and near 2 after
  "skip"; `max_rms` caps it.
- *A solver that fails* is asked again in float64; if that fails too the previous basis stays. Either way there is an
  `EigensolverWarning`, and `SOAP.troubles` counts by parameter.
- *Overflow.* :math:`\|G\|^2` must be in the range of the dtype; with the correction :math:`\|G\|^2 / \epsilon`. A step
  that leaves it raises and changes nothing.

State
-----
For each matrix, in float32, or float64 for a float64 parameter: M and V (m, n), L and Q_L (m, m), R and Q_R (n, n),
the values Lambda_L (m) and Lambda_R (n), and the counts `retried` and `kept` (2): together
:math:`2mn + 2m^2 + 2n^2 + m + n + 4` numbers. Two integers for each parameter: `step`, Adam steps taken, and `seen`,
gradients in the factors.

References
----------
Vyas et al. (2025), *SOAP* (arXiv 2409.11321), and nikhilvyas/SOAP for the lagged order; Lin et al. (2025), *KL-Shampoo*
(arXiv 2509.03378); NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), and release 0.3.0.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.optimizer import ParamsT

from muon_lab.arithmetic.policy import Arithmetic, Exact
from muon_lab.eigen import factors, precondition, track
from muon_lab.eigen.factors import Factors
from muon_lab.eigen.precondition import SECOND_MOMENTS, Adam, Bases, Moments
from muon_lab.eigen.track import Eigenbasis, Outcome, Tracked
from muon_lab.optim.optimizer import MatrixOptimizer, State, refuse_foreign
from muon_lab.optim.step import (
    DECAYS,
    check_flag,
    check_fraction,
    check_name,
    check_positive,
    check_rate,
    decayed,
    moved,
    number,
)

EIGENBASES = ("eigh", "iteration")
FIRST_STEPS = ("apply", "skip")
ORDERS = ("current", "lagged")

#: Products in the dtype of the data.
EXACT = Exact()


class EigensolverWarning(UserWarning):
    """A solver returned a bad eigenbasis; what is used instead is in the message."""


class SOAPState(NamedTuple):
    """The counts, the moments in the eigenbases, the factors with their bases and values, of a stack of matrices."""

    #: Adam steps taken.
    step: int
    #: Gradients in the factors.
    seen: int
    M: Float[Tensor, "count m n"]
    V: Float[Tensor, "count m n"]
    L: Float[Tensor, "count m m"]
    R: Float[Tensor, "count n n"]
    Q_L: Float[Tensor, "count m m"]
    Q_R: Float[Tensor, "count n n"]
    #: Values of the last refresh, those of L in the basis Q_L and those of R in Q_R.
    Lambda_L: Float[Tensor, "count m"]
    Lambda_R: Float[Tensor, "count n"]
    #: Refreshes of L and of R that were solved in float64 after a bad result.
    retried: Float[Tensor, "count 2"]
    #: Refreshes of L and of R that found no good basis and kept the old one.
    kept: Float[Tensor, "count 2"]

    @property
    def bases(self) -> Bases:
        """Both bases."""
        return Bases(self.Q_L, self.Q_R)


class Troubles(NamedTuple):
    """How often the eigensolver failed for the factors of a parameter."""

    #: Solved in float64.
    retried: int
    #: Not solved: the previous basis stayed.
    kept: int


@dataclass(frozen=True)
class Rule:
    r"""The hyperparameters of SOAP, and what one gradient does to a stack of matrices.

    Attributes
    ----------
    lr : float
        The learning rate :math:`\eta`.
    betas, eps, nesterov, correct_bias
        Of Adam; eps is also the floor of the values in the Kullback-Leibler correction.
    shampoo_beta, correct_shampoo_bias : float and bool
        The coefficient of the factors, in [0, 1), and its correction.
    weight_decay, decay : float and str
        How much, and in which of the forms `step.DECAYS`.
    eigenbasis, power_steps, frequency : str, int and int
        One of `EIGENBASES`; how many products and QR decompositions an iteration has; refreshes at its multiples.
    second_moment, first_step, order : str
        One of `SECOND_MOMENTS`, `FIRST_STEPS` and `ORDERS`.
    kl : bool
        The Kullback-Leibler correction.
    max_rms : float, optional
        The limit of the RMS of the update.
    start : float
        The values with which the correction divides before the first refresh; below eps they count as eps.
    arithmetic : Arithmetic
        Of the products: in the factors, the projections and the iteration. Decompositions are in the dtype of the work.

    Raises
    ------
    ValueError
        If a value is out of its range, a name is unknown, or the order is "lagged" and the first step is not skipped.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    shampoo_beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: str = "decoupled"
    nesterov: bool = False
    correct_bias: bool = True
    correct_shampoo_bias: bool = True
    eigenbasis: str = "eigh"
    power_steps: int = 1
    frequency: int = 1
    second_moment: str = "unchanged"
    first_step: str = "apply"
    order: str = "current"
    kl: bool = False
    max_rms: float | None = None
    start: float = 0.0
    arithmetic: Arithmetic = EXACT

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "start"):
            check_rate(f"SOAP: {name}", getattr(self, name))
        check_fraction("SOAP: beta1", self.betas[0])
        check_fraction("SOAP: beta2", self.betas[1])
        check_fraction("SOAP: shampoo_beta", self.shampoo_beta)
        check_positive("SOAP: eps", self.eps)
        check_positive("SOAP: max_rms", 1.0 if self.max_rms is None else self.max_rms)
        for name in ("nesterov", "correct_bias", "correct_shampoo_bias", "kl"):
            check_flag(f"SOAP: {name}", getattr(self, name))
        for name in ("power_steps", "frequency"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"SOAP: {name} is {value!r}, needed an integer of at least 1")
        check_name("decay", self.decay, DECAYS)
        check_name("eigenbasis", self.eigenbasis, EIGENBASES)
        check_name("second moment", self.second_moment, SECOND_MOMENTS)
        check_name("first step", self.first_step, FIRST_STEPS)
        check_name("order", self.order, ORDERS)
        if self.order == "lagged" and self.first_step == "apply":
            raise ValueError("SOAP: order is 'lagged' and first_step 'apply', needed 'skip': there is no basis yet")

    def begin(self, W: Float[Tensor, "count m n"]) -> SOAPState:
        """Return the state before the first gradient: zero factors with the identity as their bases."""
        count, m, n = W.shape
        bases = (torch.eye(k, dtype=W.dtype, device=W.device).repeat(count, 1, 1) for k in (m, n))
        values = (W.new_full((count, k), self.start) for k in (m, n))
        squares = (W.new_zeros(count, k, k) for k in (m, n))
        counts = (W.new_zeros(count, 2) for _ in range(2))
        return SOAPState(0, 0, torch.zeros_like(W), torch.zeros_like(W), *squares, *bases, *values, *counts)

    def advance(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: SOAPState
    ) -> tuple[Float[Tensor, "count m n"], SOAPState]:
        """Return the weights and the state after one gradient."""
        first = state.seen == 0
        if self.order == "lagged":
            if not first:
                W, state = self.updated(W, G, state)
            state = self.accumulated(state, G)
            return W, self.refreshed(state) if first or state.step % self.frequency == 0 else state
        state = self.accumulated(state, G)
        if first or (state.step + 1) % self.frequency == 0:
            state = self.refreshed(state)
        return (W, state) if first and self.first_step == "skip" else self.updated(W, G, state)

    def accumulated(self, state: SOAPState, G: Float[Tensor, "count m n"]) -> SOAPState:
        """Return the state with the gradient in the factors."""
        t = state.seen + 1
        beta = factors.coefficient(self.shampoo_beta, t) if self.correct_shampoo_bias else self.shampoo_beta
        if self.kl:
            left, right = Eigenbasis(state.Lambda_L, state.Q_L), Eigenbasis(state.Lambda_R, state.Q_R)
            new = factors.corrected(G, left, right, self.eps, self.arithmetic)
        else:
            new = factors.squares(G, self.arithmetic)
        L, R = factors.averaged(Factors(state.L, state.R), new, beta)
        return state._replace(seen=t, L=L, R=R)

    def refreshed(self, state: SOAPState) -> SOAPState:
        """Return the state in new bases; as it is if a factor has overflowed, which the step then refuses."""
        if not (state.L.isfinite().all() and state.R.isfinite().all()):
            return state
        bases, V = state.bases, state.V
        if self.second_moment == "permuted":
            rows, columns = (
                track.by_rayleigh_quotient(state.L, bases.Q_L),
                track.by_rayleigh_quotient(state.R, bases.Q_R),
            )
            bases = Bases(track.sorted_columns(bases.Q_L, rows), track.sorted_columns(bases.Q_R, columns))
            V = precondition.permuted(V, rows, columns)
        left, right = (self.basis(K, Q, state.seen == 1) for K, Q in ((state.L, bases.Q_L), (state.R, bases.Q_R)))
        new = Bases(left.basis.Q, right.basis.Q)
        if self.second_moment == "rotated":
            V = precondition.rotated(V, bases, new)
        outcomes = torch.stack([left.outcome, right.outcome], dim=-1)
        tell(outcomes, state.L.dtype)
        return state._replace(
            M=precondition.turned(state.M, state.bases, new, self.arithmetic),
            V=V,
            Q_L=new.Q_L,
            Q_R=new.Q_R,
            Lambda_L=left.basis.values,
            Lambda_R=right.basis.values,
            retried=state.retried + (outcomes == Outcome.RETRIED),
            kept=state.kept + (outcomes == Outcome.KEPT),
        )

    def basis(self, K: Float[Tensor, "count n n"], Q: Float[Tensor, "count n n"], first: bool) -> Tracked:
        """Return the new bases of a factor, and how they were found."""
        if first or self.eigenbasis == "eigh":
            return track.eigenbasis(K, Q)
        found = track.orthogonal_iteration(K, Q, self.power_steps, self.arithmetic)
        if self.second_moment == "permuted":
            return found
        values, outcome = found.basis.values, found.outcome
        stays = (outcome == Outcome.KEPT).unsqueeze(-1)
        order = values.argsort(dim=-1, descending=True, stable=True)
        order = torch.arange(values.shape[-1], device=values.device).where(stays, order)
        return Tracked(Eigenbasis(values.gather(-1, order), track.sorted_columns(found.basis.Q, order)), outcome)

    def updated(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: SOAPState
    ) -> tuple[Float[Tensor, "count m n"], SOAPState]:
        """Return the weights and the state after an Adam step in the bases."""
        W, G = decayed(W, G, self.lr, self.weight_decay, self.decay)
        adam = Adam(self.betas, self.eps, self.nesterov, self.correct_bias)
        t, projected = state.step + 1, precondition.project(G, state.bases, self.arithmetic)
        moments = adam.averaged(Moments(state.M, state.V), projected)
        U = precondition.back(adam.quotient(moments, projected, t), state.bases, self.arithmetic)
        if self.max_rms is not None:
            U = precondition.limited(U, self.max_rms)
        return moved(W, U, self.lr), state._replace(step=t, M=moments.M, V=moments.V)


#: What a group may set: everything but the arithmetic, which is no number.
SETTINGS = tuple(field.name for field in fields(Rule) if field.name != "arithmetic")

#: Settings that may come as a tensor of one number.
NUMBERS = ("shampoo_beta", "eps", "weight_decay", "max_rms", "start")


class SOAP(MatrixOptimizer):
    r"""Adam in the eigenbases of the Kronecker factors of the gradient.

    Parameters
    ----------
    params : iterable of parameters, of named parameters, or of groups
        As for `MatrixOptimizer`: a group may have its own value of everything below but the arithmetic, and a `view`.
    lr : float or tensor of one number
        The learning rate :math:`\eta`.
    betas : (float, float)
        Of Adam, in [0, 1).
    shampoo_beta : float
        Of the factors, in [0, 1).
    eps : float
        Of Adam, and the floor of the values in the Kullback-Leibler correction; in the unit of the gradient. Far below
        the gradient, the first step is rounding at full size.
    weight_decay, decay : float and str
        How much, and in which of the forms `step.DECAYS`.
    nesterov, correct_bias, correct_shampoo_bias : bool
        Adam's look-ahead, and the corrections of Adam's averages and of the factors for having started at zero.
    eigenbasis : str
        "eigh", a decomposition at every refresh, or "iteration", orthogonal iteration after the first.
    power_steps : int
        Products and QR decompositions of an iteration.
    frequency : int
        Bases are made anew at its multiples, counted in Adam steps, and at the first gradient.
    second_moment : str
        Its fate under a change of bases: "unchanged", "permuted" or "rotated".
    first_step : str
        "apply", or "skip": the first gradient makes the bases and nothing else.
    order : str
        "current": a gradient is in the factors before it is projected; "lagged": after, which has to skip.
    kl : bool
        The Kullback-Leibler correction.
    max_rms : float, optional
        The limit of the RMS of the update of a matrix, before the learning rate.
    start : float
        The values with which the correction divides before the first refresh. At zero, as in the public
        implementations, they count as eps, and the first factors are 1 / eps too large.
    arithmetic : Arithmetic
        Of the products.
    options
        torch's own, ``foreach=False`` say, are accepted as long as they ask for nothing.

    Raises
    ------
    ValueError
        As for `MatrixOptimizer` and `Rule`.

    Examples
    --------
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    >>> optimizer = SOAP([("weight", weight)], lr=1.0, betas=(0.95, 0.95), eps=1e-12)
    >>> weight.grad = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> optimizer.step()
    >>> weight.data.round(decimals=3) + 0.0  # minus the polar factor of the first gradient
    tensor([[-1.,  0.],
            [ 0., -1.]], dtype=torch.float64)
    >>> optimizer.troubles()
    {}
    """

    like_weight: tuple[str, ...] = ("M", "V")
    carried: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.carried, "arithmetic")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: Sequence[float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay: str = "decoupled",
        *,
        nesterov: bool = False,
        correct_bias: bool = True,
        correct_shampoo_bias: bool = True,
        eigenbasis: str = "eigh",
        power_steps: int = 1,
        frequency: int = 1,
        second_moment: str = "unchanged",
        first_step: str = "apply",
        order: str = "current",
        kl: bool = False,
        max_rms: float | None = None,
        start: float = 0.0,
        arithmetic: Arithmetic = EXACT,
        **options: object,
    ) -> None:
        refuse_foreign(type(self).__name__, options, strict=True)
        self.arithmetic = arithmetic
        adam = {"betas": betas, "eps": eps, "nesterov": nesterov, "correct_bias": correct_bias}
        averages = {
            "shampoo_beta": shampoo_beta,
            "correct_shampoo_bias": correct_shampoo_bias,
            "kl": kl,
            "start": start,
        }
        bases = {"eigenbasis": eigenbasis, "power_steps": power_steps, "frequency": frequency}
        choices = {"second_moment": second_moment, "first_step": first_step, "order": order, "max_rms": max_rms}
        step = {"lr": lr, "weight_decay": weight_decay, "decay": decay}
        super().__init__(params, {**step, **adam, **averages, **bases, **choices})

    def begin(self, W: Float[Tensor, "count m n"], settings: Mapping[str, Any]) -> State:
        """Return the whole state before the first gradient."""
        return self.rule(settings).begin(W)._asdict()

    def advance(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: State, settings: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "count m n"], State]:
        """Return the weights and the state after one gradient."""
        W, after = self.rule(settings).advance(W, G, SOAPState(**cast(dict[str, Any], state)))
        return W, after._asdict()

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group as plain numbers, or raise ``ValueError``."""
        numbers = {name: number(f"SOAP: {name}", settings[name]) for name in NUMBERS if settings[name] is not None}
        betas = _pair(settings["betas"])
        checked = {**super().check(settings), **numbers, "betas": betas}
        self.rule(checked)
        return checked

    def rule(self, settings: Mapping[str, Any]) -> Rule:
        """Return the rule with the settings of a group."""
        return Rule(**{name: settings[name] for name in SETTINGS}, arithmetic=self.arithmetic)

    def troubles(self) -> dict[str, Troubles]:
        """Return how often eigensolvers failed, for the parameters of which they did."""
        found = {}
        for owned in self.owned():
            entries = self.state.get(owned.parameter, {}).items()
            counts = Troubles(
                *(
                    sum(int(value.sum()) for key, value in entries if key.split(".")[0] == name)
                    for name in Troubles._fields
                )
            )
            if any(counts):
                found[owned.name] = counts
        return found


def _pair(betas: Any) -> tuple[float, ...]:
    """Return the two coefficients of Adam, or raise ``ValueError``."""
    try:
        found = tuple(number("SOAP: betas", beta) for beta in betas)
    except TypeError:
        found = ()
    if len(found) != 2:
        raise ValueError(f"SOAP: betas are {betas!r}, needed two numbers")
    return found


def tell(outcomes: Int[Tensor, "count 2"], dtype: torch.dtype) -> None:
    """Warn if a refresh of L or R was not solved at once.

    Warns
    -----
    EigensolverWarning
        How many factors that were, and what was done instead.
    """
    retried, kept = (int((outcomes == outcome).sum()) for outcome in (Outcome.RETRIED, Outcome.KEPT))
    if retried or kept:
        warnings.warn(
            f"the eigensolver failed in {dtype} for {retried + kept} of {outcomes.numel()} factors: "
            f"{retried} solved in float64, {kept} kept their previous basis",
            EigensolverWarning,
            stacklevel=2,
        )
