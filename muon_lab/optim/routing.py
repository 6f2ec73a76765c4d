r"""Which parameter goes to which optimizer, by declared rules, and said aloud.

Muon and its relatives are made for the matrices inside a network. Shape alone does not tell them: an embedding and a
head are matrices too, a convolution is one in disguise, a stack of experts is many. So a parameter is judged by the
modules that own it and by its name. The first rule that applies decides (`RULES`); a parameter to which none applies is
an error, with its name.

The default rules, in order:

1. vectors and numbers, all norms: ``other``;
2. embeddings, by their module's type, also where a head shares them: ``other``;
3. heads, by name (``heads``): ``other``;
4. depthwise convolutions: ``other``; convolutions: ``matrix``, flattened, each group for itself;
5. linear layers: ``matrix``; the fused projection of `torch.nn.MultiheadAttention`: ``matrix``, three of them.

``views`` come before all of these: what is declared a matrix is one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from muon_lab.compiling import as_written
from muon_lab.optim.matrices import FLATTENED, View, check_parameter, fused
from muon_lab.optim.optimizer import MatrixOptimizer, Owned, StepReport, nonfinite_gradients
from muon_lab.optim.step import check_rate
from muon_lab.parallel.factors import agreed

#: Names of modules that make logits: the last part of their path. ``fc`` and ``output`` are not among them, as hidden
#: layers and projections of attention are called that too: where they are heads, say so by ``heads`` of `split`.
HEADS: Final = ("head", "lm_head", "unembedding", "embed_out", "classifier", "score", "qa_outputs")

NORMS: Final = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)

CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: Where parameters go that are named frozen: nowhere.
FROZEN: Final = "frozen"


@dataclass(frozen=True, eq=False)
class Site:
    """A parameter, under all names that it has, with the modules that own it.

    Attributes
    ----------
    names : tuple of str
        The first is that of `torch.nn.Module.named_parameters`; more if it is tied.
    parameter : Tensor
        The parameter.
    owners : tuple of (str, Module)
        Path and module of each owner.
    """

    names: tuple[str, ...]
    parameter: Tensor
    owners: tuple[tuple[str, nn.Module], ...]

    def owned_by(self, *kinds: type[nn.Module]) -> bool:
        """Say whether one of the owners is of one of these types."""
        return any(isinstance(module, kinds) for _, module in self.owners)


@dataclass(frozen=True)
class Rule:
    """Parameters to which something applies go to one optimizer, for a reason.

    Attributes
    ----------
    reason : str
        For the table.
    to : str
        The label of an optimizer, such as ``"matrix"`` or ``"other"``.
    applies : callable
        From a `Site` to bool.
    view : View or callable, optional
        How the parameter is read as matrices, or from a `Site` to that.

    Examples
    --------
    >>> rule = Rule("router", "other", lambda site: site.names[0].endswith("router.weight"))
    >>> rule.applies(Site(("blocks.0.router.weight",), torch.zeros(4, 8), ()))
    True
    """

    reason: str
    to: str
    applies: Callable[[Site], bool]
    view: View | Callable[[Site], View | None] | None = None

    def viewed(self, site: Site) -> View | None:
        """Return the view of a parameter to which the rule applies."""
        return self.view(site) if callable(self.view) else self.view


def named_head(heads: Iterable[str]) -> Rule:
    """Return the rule for output layers by the last part of their module's path.

    Examples
    --------
    >>> owner = ("decoder.to_logits", nn.Identity())
    >>> named_head(["to_logits"]).applies(Site(("decoder.to_logits.weight",), torch.zeros(4, 8), (owner,)))
    True
    """
    known = tuple(heads)
    return Rule("head", "other", lambda site: any(path.rpartition(".")[2] in known for path, _ in site.owners))


def convolution_view(site: Site) -> View:
    """Return the view of a convolution (out, in / groups, *kernel): every group a matrix of its own.

    Examples
    --------
    >>> layer = nn.utils.skip_init(nn.Conv2d, 8, 16, 3, groups=4)
    >>> convolution_view(Site(("conv.weight",), layer.weight, (("conv", layer),))).shapes(layer.weight.shape)
    ((4, 4, 18),)
    """
    layer = next(module for _, module in site.owners if isinstance(module, CONVOLUTIONS))
    return FLATTENED if layer.groups == 1 else View(head=layer.out_channels // layer.groups)


def _is_depthwise(site: Site) -> bool:
    layers = [module for _, module in site.owners if isinstance(module, CONVOLUTIONS)]
    return any(layer.groups > 1 and layer.in_channels == layer.groups for layer in layers)


def _is_fused_attention(site: Site) -> bool:
    return site.owned_by(nn.MultiheadAttention) and site.names[0].endswith("in_proj_weight")


def _thirds(site: Site) -> View:
    rows = site.parameter.shape[0] // 3
    return fused(rows, rows, rows)


BEFORE_HEADS: Final = (
    Rule("vector or number", "other", lambda site: site.parameter.ndim < 2),
    Rule("norm", "other", lambda site: site.owned_by(*NORMS)),
    Rule("embedding", "other", lambda site: site.owned_by(nn.Embedding, nn.EmbeddingBag)),
)

AFTER_HEADS: Final = (
    Rule("depthwise convolution", "other", _is_depthwise),
    Rule("convolution", "matrix", lambda site: site.owned_by(*CONVOLUTIONS), convolution_view),
    Rule("fused attention", "matrix", _is_fused_attention, _thirds),
    Rule("attention", "matrix", lambda site: site.owned_by(nn.MultiheadAttention) and site.parameter.ndim == 2),
    Rule("linear layer", "matrix", lambda site: site.owned_by(nn.Linear) and site.parameter.ndim == 2),
)

#: The default rules in order.
RULES: Final = (*BEFORE_HEADS, named_head(HEADS), *AFTER_HEADS)


@dataclass(frozen=True, eq=False)
class Route:
    """Where a parameter goes, why, and as which matrices."""

    site: Site
    to: str
    reason: str
    view: View | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        shape = "×".join(map(str, self.site.parameter.shape)) or "()"
        shapes = [] if self.view is None else self.view.shapes(self.site.parameter.shape)
        matrices = " + ".join(f"{m}×{n}" if count == 1 else f"{count} of {m}×{n}" for count, m, n in shapes)
        tied = f", tied with {', '.join(self.site.names[1:])}" if len(self.site.names) > 1 else ""
        return self.site.names[0], shape, self.to, matrices, self.reason + tied


@dataclass(frozen=True, eq=False)
class Routes:
    """Where all parameters of a model go; printed, it is a table.

    Attributes
    ----------
    routes : tuple of Route
        One a parameter, in the model's order.
    """

    routes: tuple[Route, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "to", "as", "why")
        rows = [head, *(route.cells for route in self.routes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for label in self.labels(frozen=True):
            here = [route.site.parameter for route in self.routes if route.to == label]
            lines.append(f"{label}: {len(here)} parameters, {sum(p.numel() for p in here):,} numbers")
        return "\n".join(lines)

    def labels(self, frozen: bool = False) -> tuple[str, ...]:
        """Return where parameters go, in the order in which that first happens."""
        return tuple(dict.fromkeys(route.to for route in self.routes if frozen or route.to != FROZEN))

    def groups(self, label: str) -> list[dict[str, Any]]:
        """Return what goes to one optimizer as groups of named parameters, a group a view.

        A group has the key ``view`` only if it has one.

        Raises
        ------
        ValueError
            If nothing goes there.
        """
        views: dict[View | None, list[tuple[str, Tensor]]] = {}
        for route in self.routes:
            if route.to == label:
                views.setdefault(route.view, []).append((route.site.names[0], route.site.parameter))
        if not views:
            raise ValueError(f"nothing goes to {label!r}, needed one of {', '.join(self.labels())}")
        return [{"params": named} | ({} if view is None else {"view": view}) for view, named in views.items()]

    def optimizer(self, **makers: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> "Joint":
        """Return one optimizer of all parameters, made by a function of groups for each label.

        Raises
        ------
        ValueError
            If the functions are not exactly for the labels in use.
        """
        if set(makers) != set(self.labels()):
            raise ValueError(f"optimizers for {sorted(makers)}, needed for {sorted(self.labels())}")
        return Joint({label: make(self.groups(label)) for label, make in makers.items()})


def split(
    model: nn.Module,
    *,
    views: Mapping[str, View] | None = None,
    heads: Sequence[str] = HEADS,
    rules: Sequence[Rule] = (),
    show: Callable[[str], object] | None = print,
) -> Routes:
    """Say where each parameter of a model goes.

    Parameters
    ----------
    model : Module
        Parameters that need no gradient are listed as frozen and go nowhere. A tied parameter goes somewhere once.
    views : mapping of pattern to View, optional
        Parameters whose names match (`fnmatch`), as matrices.
    heads : sequence of str
        Last parts of the paths of output layers.
    rules : sequence of Rule
        Your own, asked after `views` and before the others.
    show : callable, optional
        What is done with the table.

    Raises
    ------
    ValueError
        If no rule applies to a parameter, a pattern matches none, or a view does not fit; with the names.

    Examples
    --------
    >>> from functools import partial
    >>> from muon_lab import optim
    >>> from muon_lab.problems.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(width=8, depth=1, heads=2, context=4), torch.Generator().manual_seed(0))
    >>> routes = split(model, views={"*.qkv.weight": optim.fused(8, 8, 8)})
    parameter                       shape  to      as               why
    embedding.weight                256×8  other                    embedding
    blocks.0.attention_norm.weight  8      other                    vector or number
    blocks.0.attention.qkv.weight   24×8   matrix  8×8 + 8×8 + 8×8  declared
    blocks.0.attention.out.weight   8×8    matrix  8×8              linear layer
    blocks.0.mlp_norm.weight        8      other                    vector or number
    blocks.0.mlp.up.weight          32×8   matrix  32×8             linear layer
    blocks.0.mlp.down.weight        8×32   matrix  8×32             linear layer
    norm.weight                     8      other                    vector or number
    head.weight                     256×8  other                    head
    other: 5 parameters, 4,120 numbers
    matrix: 4 parameters, 768 numbers
    >>> optimizer = routes.optimizer(matrix=partial(optim.Muon, lr=0.02), other=partial(torch.optim.AdamW, lr=3e-4))
    """
    declared = dict(views or {})
    chain = (*(_declared(pattern, view) for pattern, view in declared.items()), *rules)
    chain = (*chain, *BEFORE_HEADS, named_head(heads), *AFTER_HEADS)
    found = sites(model)
    for pattern in declared:
        if not any(_matches(site, pattern) for site in found):
            raise ValueError(f"views has the pattern {pattern!r}, needed one that matches a parameter's name")
    routed = [(site, _routed(site, chain)) for site in found]
    left = [f"{site.names[0]} {tuple(site.parameter.shape)}" for site, route in routed if route is None]
    if left:
        raise ValueError(
            f"no rule applies to {', '.join(left)}: needed a view (then it is a matrix) or a rule of yours"
        )
    routes = Routes(tuple(route for _, route in routed if route is not None))
    if show is not None:
        show(str(routes))
    return routes


def sites(model: nn.Module) -> list[Site]:
    """Return the parameters of a model with their names and owners, in the model's order, each once."""
    names: dict[Tensor, list[str]] = {}
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).append(f"{path}.{attribute}" if path else attribute)
            owners.setdefault(parameter, []).append((path, module))
    return [Site(tuple(names[p]), p, tuple(owners[p])) for p in model.parameters()]


def _declared(pattern: str, view: View) -> Rule:
    return Rule("declared", "matrix", lambda site: _matches(site, pattern), view)


def _matches(site: Site, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in site.names)


def _routed(site: Site, rules: Iterable[Rule]) -> Route | None:
    """Return where a parameter goes, or None if no rule applies."""
    if not site.parameter.requires_grad:
        return Route(site, FROZEN, "needs no gradient")
    for rule in rules:
        if rule.applies(site):
            view = rule.viewed(site)
            if rule.to == "matrix" or view is not None:
                view = check_parameter(site.parameter, view, site.names[0])
            return Route(site, rule.to, rule.reason, view)
    return None


class Joint(torch.optim.Optimizer):
    """Several optimizers that take one step: all of them, or none.

    A gradient that is not finite, anywhere, leaves everything as it was (`report` says where it is). Matrix optimizers
    compute their steps before any weight is written, and write them after the others have stepped; should one of those
    raise, they are all put back. For that a step copies what they own, unless there is one alone and it is torch's
    `AdamW`, `Adam` or `SGD`, whose rates and state are checked instead.

    Where a matrix optimizer is on shards (a layout is its direction), the ranks agree at every step on which gradients
    of all parameters are not finite (`parallel.factors.agreed`).

    Hooks of a part run too: those of matrix optimizers before anything is computed and after everything is written
    (what they return is not used), those of the others around their own steps.

    Parameters
    ----------
    optimizers : mapping of label to Optimizer
        No parameter in two of them, and none that needs a closure, as `torch.optim.LBFGS` does. Their groups are those
        of this optimizer, so schedulers reach all; one may also have a scheduler of its own.

    Attributes
    ----------
    report : StepReport
        What the last step did.

    Raises
    ------
    ValueError
        If a parameter has two optimizers, one of them needs a closure, or there are no optimizers.

    Examples
    --------
    >>> from muon_lab import optim
    >>> W, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    >>> joint = Joint({"matrix": optim.Muon([W], lr=0.1), "other": torch.optim.AdamW([b], lr=0.1)})
    >>> W.grad, b.grad = torch.eye(2), torch.tensor([1.0, float("nan")])
    >>> joint.step()
    >>> joint.report.nonfinite, W.detach().sum()
    (('parameter 0 of group 1',), tensor(4.))
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.report = StepReport()
        for label, each in self.optimizers.items():
            if _needs_closure(each):
                raise ValueError(
                    f"{label} is {type(each).__name__}, whose step needs a closure that it calls as often as it likes, "
                    "needed an optimizer of one gradient a step"
                )
        owned = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(set(owned)) < len(owned):
            raise ValueError(f"the optimizers have {len(owned)} parameters, needed each of them once")
        super().__init__(self.param_groups, {})
        for ranks in {id(each.shards.ranks): each.shards.ranks for each in self._matrix()}.values():
            if ranks is not None:
                agreed(self, ranks)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizers, as they are now."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @param_groups.setter
    def param_groups(self, _: list[dict[str, Any]]) -> None:
        """Do nothing: torch's constructor starts with no groups, but here they are there already."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group that none of the optimizers has: it has to be added to one of them.

        Raises
        ------
        ValueError
            For such a group.
        """
        if not any(param_group is group for group in self.param_groups):
            raise ValueError(f"a group belongs to one of the optimizers {', '.join(self.optimizers)}: add it there")

    @as_written
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of every optimizer, or of none, and return what the closure returned.

        Raises
        ------
        ValueError
            As for `MatrixOptimizer.step`, and for a learning rate of any group that is not a finite number of at least
            0; then nothing has changed.
        Exception
            What one of the others raises; then nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrix = self._matrix()
        others = [each for each in self.optimizers.values() if not isinstance(each, MatrixOptimizer)]
        for own in matrix:
            _run(own._optimizer_step_pre_hooks, own)
        report = StepReport(nonfinite_gradients(self._present()))
        if report.taken:
            self._check_rates()
            plans = [own.plan(own.present()) for own in matrix]
            _step_all(others)
            for own, plan in zip(matrix, plans, strict=True):
                own.carry_out(plan)
        for own in matrix:
            own.report = report
        self.report = report
        for each in self.optimizers.values():
            each._opt_called = True  # type: ignore[attr-defined]  # what a scheduler of a part looks for
        for own in matrix:
            _run(own._optimizer_step_post_hooks, own)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the dictionaries of the optimizers by label."""
        return {label: each.state_dict() for label, each in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load all optimizers from their dictionaries, or none.

        Raises
        ------
        ValueError
            If the labels differ, or as the optimizers do; nothing has changed then.
        """
        if set(state_dict) != set(self.optimizers):
            raise ValueError(f"the loaded state is of {sorted(state_dict)}, needed {sorted(self.optimizers)}")
        before = {
            label: {"state": each.state, "param_groups": each.param_groups} for label, each in self.optimizers.items()
        }
        try:
            for label, each in self.optimizers.items():
                each.load_state_dict(state_dict[label])
        except Exception:
            for label, each in self.optimizers.items():
                each.__setstate__(before[label])
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": {}, "state": self.state, "optimizers": self.optimizers, "report": self.report}

    def _matrix(self) -> list[MatrixOptimizer]:
        return [each for each in self.optimizers.values() if isinstance(each, MatrixOptimizer)]

    def _check_rates(self) -> None:
        """Raise ``ValueError`` for a learning rate with which no step can be taken."""
        for label, each in self.optimizers.items():
            for group in each.param_groups:
                if "lr" in group:
                    check_rate(f"{label}: lr", group["lr"])

    def _present(self) -> list[Owned]:
        """Return the parameters that have a gradient, with their names."""
        found = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [
                f"parameter {i} of group {number}" for i in range(len(group["params"]))
            ]
            found += [Owned(p, name, FLATTENED, number, {}) for p, name in zip(group["params"], names, strict=True)]
        return [owned for owned in found if owned.parameter.grad is not None]


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a step has to be given something."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = signature(optimizer.step).parameters.values()
    return any(each.kind in kinds and each.default is Parameter.empty for each in needed)


def _run(hooks: Mapping[int, Callable[..., Any]], optimizer: torch.optim.Optimizer) -> None:
    """Call hooks of an optimizer's steps."""
    for hook in list(hooks.values()):
        hook(optimizer, (optimizer,), {})


def _step_all(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Step every optimizer; if one raises, all of them are as they were.

    An `AdamW` (`Adam`, `SGD`) alone, without hooks, needs no copy: once rates and state fit, nothing is left to raise.
    """
    (safe,) = optimizers if len(optimizers) == 1 else (None,)
    if safe is not None and _writes_last(safe):
        _check_state(safe)
        safe.step()
        return
    before = [_Copy(each) for each in optimizers]
    try:
        for each in optimizers:
            each.step()
    except BaseException:
        for copy in before:
            copy.restore()
        raise


def _writes_last(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a step of an optimizer is torch's own, and raises before it writes if rates and state fit."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) and not hooked


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` if an entry of the state is neither a number nor of the shape of its parameter."""
    for parameter, entries in optimizer.state.items():
        for name, entry in entries.items():
            if isinstance(entry, Tensor) and entry.numel() != 1 and entry.shape != parameter.shape:
                raise ValueError(
                    f"{type(optimizer).__name__}: {name} has shape {tuple(entry.shape)}, needed "
                    f"{tuple(parameter.shape)}, that of its parameter"
                )


class _Copy:
    """What a step of an optimizer may change, in memory of its own: weights, state, and the settings of groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        parameters = [p for group in self.groups for p in group["params"]]
        self.weights = [(p, p.detach().clone()) for p in parameters if p.grad is not None]
        self.idle = {p for p in parameters if p.grad is None}
        moving = {key: entries for key, entries in optimizer.state.items() if key not in self.idle}
        self.state = {key: {name: _cloned(value) for name, value in moving[key].items()} for key in moving}

    def restore(self) -> None:
        """Put everything back."""
        for p, W in self.weights:
            p.detach().copy_(W)
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(settings)
        for key in [key for key in self.optimizer.state if key not in self.idle]:
            del self.optimizer.state[key]
        self.optimizer.state.update(self.state)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
