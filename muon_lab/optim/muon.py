r"""Muon: momentum, orthogonalized; and with a second moment AdaMuon, NorMuon and NAMO.

.. math:: D = O(C), \qquad W \leftarrow W - \eta\, x\, s(C, D)\, U

with the candidate C, the decay of W and the factor s of `step`, and U = D or what `second_moments` makes of D.

References
----------
Jordan et al. (2024), *Muon: An optimizer for hidden layers in neural networks*; Liu et al. (2025), *Muon is scalable
for LLM training*; NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.optimizer import ParamsT

from muon_lab.optim import directions, second_moments, step
from muon_lab.optim.optimizer import MatrixOptimizer, State, refuse_foreign
from muon_lab.optim.second_moments import SecondMoment
from muon_lab.parallel.factors import agreed
from muon_lab.parallel.layouts import Periodic, Whole, seen


class Muon(MatrixOptimizer):
    r"""Muon on matrices of any shape.

    Parameters
    ----------
    params : iterable of parameters, of named parameters, or of groups
        Each read as matrices by the ``view`` of its group; a plain matrix needs none. All settings but `direction` and
        `adapt` may differ between groups.
    lr : float or tensor of one number
        The learning rate :math:`\eta`.
    momentum : float
        The coefficient :math:`\mu`, in [0, 1).
    nesterov : bool
        Whether the candidate looks ahead.
    weight_decay, decay : float and str
        How much, and in which of the forms `step.DECAYS`.
    direction : orthogonalizer, Schedule, str, or (str, int)
        From candidates ``(count, m, n)`` to directions; a schedule, or its name with or without a number of steps,
        stands for the form that `polar.auto` chooses for each shape. For shards, a layout of `parallel.layouts`.
    scale, extra : str and float
        One of the modes `step.SCALES`, with m and n of the whole matrix, not of the parameter or of a shard, and the
        factor x.
    form : str
        One of the forms `step.FORMS`.
    adapt : str or SecondMoment, optional
        ``"adamuon"``, ``"normuon"`` or ``"namo"``, or a value of `second_moments`.
    options
        torch's own, ``foreach=False`` say, are accepted as long as they ask for nothing.

    Raises
    ------
    ValueError
        For a setting out of range, an unknown name, an option that is not supported, `namo` with decay of the form
        `l2` (its second moment is that of the raw gradient), an `adapt` that is not of `second_moments` on shards, a
        matrix that is no shard by the placement of the layout, and as for `MatrixOptimizer`.

    Notes
    -----
    State: ``momentum_buffer``, the shape of the parameter, and ``moment2_buffer`` with `adapt`; in float32, or float64
    for such parameters. That is 4 bytes a weight; `adamuon` takes 8, `normuon` 4 more for each of max(m, n), `namo` 4
    more a matrix (`MatrixOptimizer.state_bytes`). With the layout `periodic` there is a ``step``, a count.

    Shards: with a layout as direction each rank has an optimizer of its shards, with the same parameters in the same
    order, and weights become the shards of those of one rank: by `duplicated` and `owner` to the bit where neither the
    factor nor `adapt` is a sum over ranks, and to rounding where one is, and by `distributed` and `gram`; `blockwise`
    has the factor of the whole shape too. All matrices are cut by the one placement of the layout; others belong to
    another optimizer. Beside what the layout sends, each step has one all_reduce of 12 bytes a parameter by which no
    rank takes a step if a gradient on one of them is not finite (`parallel.factors.agreed`, hence no closure); and each
    stack of matrices some of float64: for `nuclear_norm` one number a matrix, for `normuon` two, and the other axis'
    length if it averages over the cut axis, for `namo` two.

    Where torch 2.13 differs: ``torch.optim.Muon`` iterates in bfloat16, which is here ``direction =
    polar.newton_schulz(polar.schedules.get("simple", 5), Rounded("bf16"))`` with ``nesterov=True, weight_decay=0.1,
    scale="shape_scaling"``; and it leaves small gradients short, as it divides by no norm below 1e-7.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.zeros(2, 2))
    >>> optimizer = Muon([W], lr=0.1, scale="none", direction=("deepseekv4", 10))
    >>> W.grad = torch.tensor([[2.0, 0.0], [0.0, -5.0]])
    >>> optimizer.step()
    >>> W.data.round(decimals=3) + 0.0
    tensor([[-0.1000,  0.0000],
            [ 0.0000,  0.1000]])

    The same matrix with a row on each of two ranks, and the factor of its own shape:

    >>> from muon_lab.parallel import layouts, worlds
    >>> from muon_lab.parallel.grid import even
    >>> rows, G = even(2, 2, dim=0), W.grad
    >>> def train(world):
    ...     shard = torch.nn.Parameter(torch.zeros(1, 2))
    ...     update = layouts.duplicated(directions.get(("deepseekv4", 10)), world, rows)
    ...     optimizer = Muon([shard], lr=0.1, scale="spectral", direction=update)
    ...     shard.grad = rows.shard(G, world.rank).clone()
    ...     optimizer.step()
    ...     return shard.data
    >>> torch.cat(worlds.run(train, ranks=2)).round(decimals=3) + 0.0
    tensor([[-0.1410,  0.0000],
            [ 0.0000,  0.1410]])
    """

    carried: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.carried, "direction", "adapt")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        direction: directions.Direction = ("quintic", 5),
        scale: str = "spectral",
        decay: str = "decoupled",
        form: str = "average",
        extra: float = 1.0,
        adapt: str | SecondMoment | None = None,
        **options: object,
    ) -> None:
        refuse_foreign(type(self).__name__, options, strict=True)
        self.direction = directions.get(direction)
        self.adapt = second_moments.get(adapt) if isinstance(adapt, str) else adapt
        if isinstance(adapt, type) or not isinstance(self.adapt, SecondMoment | None):
            raise ValueError(f"adapt is {adapt!r}, needed None, a name or a value such as NorMuon(beta2=0.95)")
        if self.adapt is not None and self.shards.ranks is not None:
            self.adapt = second_moments.on_shards(self.adapt, self.shards)
        self.like_weight = ("momentum_buffer",)
        if self.adapt is not None and self.adapt.like_weight:
            self.like_weight += ("moment2_buffer",)
        settings = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "decay": decay}
        super().__init__(params, {"lr": lr, **settings, "scale": scale, "form": form, "extra": extra})
        if self.shards.ranks is not None:
            agreed(self, self.shards.ranks)

    @property
    def shards(self) -> Whole:
        """What the direction knows of whole matrices."""
        return seen(self.direction)

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group as plain numbers, or raise ``ValueError``."""
        rule = type(self).__name__
        step.check_name("decay", settings["decay"], step.DECAYS)
        step.check_name("scale", settings["scale"], step.SCALES)
        step.check_name("momentum form", settings["form"], step.FORMS)
        if self.adapt is not None and self.adapt.raw_gradient and settings["decay"] == "l2":
            raise ValueError(f"{rule}: adapt is {self.adapt} and decay 'l2', needed another decay")
        rates = {name: step.check_rate(f"{rule}: {name}", settings[name]) for name in ("weight_decay", "extra")}
        return {
            **super().check(settings),
            **rates,
            "momentum": step.check_fraction(f"{rule}: momentum", settings["momentum"]),
        }

    def begin(self, W: Float[Tensor, "count m n"], settings: Mapping[str, Any]) -> State:
        """Return a momentum of zeros, the first second moment, and the count of steps if the direction asks for it."""
        state: State = {"momentum_buffer": torch.zeros_like(W)}
        if isinstance(self.direction, Periodic):
            state["step"] = 0
        if self.adapt is not None:
            state["moment2_buffer"] = self.adapt.begin(W)
        return state

    def advance(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: State, settings: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "count m n"], State]:
        """Return the weights and the state after one gradient."""
        lr, old = settings["lr"], state["momentum_buffer"]
        assert isinstance(old, Tensor)
        W, G = step.decayed(W, G, lr, settings["weight_decay"], settings["decay"])
        M, C = step.momentum(old, G, settings["momentum"], settings["form"], settings["nesterov"])
        new: State = {"momentum_buffer": M}
        if isinstance(self.direction, Periodic):
            count = state["step"]
            assert isinstance(count, int)
            D, new["step"] = self.direction(C, count), count + 1
        else:
            D = self.direction(C)
        if D.shape != C.shape:
            raise ValueError(
                f"the direction has shape {tuple(D.shape)}, needed {tuple(C.shape)}, that of the candidates"
            )
        U = D
        if self.adapt is not None:
            V = state["moment2_buffer"]
            assert isinstance(V, Tensor)
            new["moment2_buffer"], U = self.adapt.advance(V, D, G, C)
        return step.moved(W, U, lr * settings["extra"] * step.scale(settings["scale"], C, D, self.shards)), new
