r"""What matrix optimizers have in common: from parameters to stacks of matrices and back, a step that is taken whole.

A rule says how the state of a stack of matrices begins and what one gradient makes of it; it is a subclass of
`MatrixOptimizer` with two pure methods. Everything else is here.

A step, in order:

1. The closure, if there is one, is called once with gradients enabled. Parameters without gradient are left alone.
2. All gradients of all groups are looked at. If a single entry of one is not finite, nothing changes, no weight, no
   state, no counter, and `MatrixOptimizer.report` names the parameters.
3. Parameters become matrices by their `View`. Matrices of one shape, device, dtype, group and age become one stack, for
   which the rule is asked once (stacks are as long as `polar.batches` finds worth it).
4. If a new weight or state is not finite, ``ValueError`` names the parameter, and nothing has changed.
5. All weights and states are written. Until then the step holds a second copy of each: that is the price of 4.

Weights and gradients are computed with in float32, or float64 if the parameter is float64, and the new weight is
rounded once. State is kept in that dtype too, whatever the parameter's: an average in bfloat16 stalls, as what a step
adds to it is below its spacing. ``state_dtype`` in a group chooses another.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from math import prod
from numbers import Number
from types import FunctionType
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.optimizer import ParamsT

from muon_lab.compiling import as_written
from muon_lab.nearest import unknown
from muon_lab.optim.matrices import View, check_parameter
from muon_lab.optim.step import check_flag, check_rate
from muon_lab.parallel.layouts import ALONE, Whole
from muon_lab.polar import batches

#: The state of a stack: tensors with a leading axis of matrices, and integers that all of them share, such as a count.
State = dict[str, Tensor | int]

#: Options of torch's optimizers that ask for another way to do the same step.
FOREIGN = ("foreach", "fused", "capturable", "differentiable", "maximize")

#: What torch's schedulers keep in groups.
SCHEDULED: Final = ("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr")

#: Settings of the rules that are true or false.
FLAGS: Final = ("nesterov", "correct_bias", "correct_shampoo_bias", "kl")

#: Arguments of the rules that are the same for all groups: values, which a checkpoint keeps in words.
WHOLE: Final = ("direction", "adapt", "arithmetic")


@dataclass(frozen=True)
class StepReport:
    """What the last step did.

    Attributes
    ----------
    nonfinite : tuple of str
        The parameters whose gradients were not finite.

    Examples
    --------
    >>> StepReport().taken, StepReport(("head.weight",)).taken
    (True, False)
    """

    nonfinite: tuple[str, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether anything changed."""
        return not self.nonfinite


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter with its name, view and settings, the number of its group, and the dtypes of its work and state."""

    parameter: Tensor
    name: str
    view: View
    group: int
    settings: Mapping[str, Any]

    @property
    def work(self) -> torch.dtype:
        """The dtype in which the step is computed."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32

    @property
    def kept(self) -> torch.dtype:
        """The dtype in which the state is kept."""
        chosen: torch.dtype | None = self.settings["state_dtype"]
        return self.work if chosen is None else chosen


@dataclass(frozen=True, eq=False)
class Piece:
    """One part of one parameter at work: which, its weights (count, m, n), gradients and state."""

    owned: Owned
    part: int
    W: Tensor
    G: Tensor
    state: State

    @property
    def kind(self) -> Hashable:
        """What must be equal for two pieces to be stacked."""
        ages = tuple((name, value) for name, value in self.state.items() if isinstance(value, int))
        return self.owned.group, self.W.shape[1:], self.W.device, self.owned.work, ages


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step will write: the weight of a parameter and the entries of its state."""

    owned: Owned
    W: Tensor
    state: State


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer of matrices; a rule is a subclass with `begin` and `advance`.

    Parameters
    ----------
    params : iterable of parameters, of named parameters, or of groups
        As for torch. A group may have a ``view``, how its parameters form matrices, and a ``state_dtype``.
    defaults : dict
        Of the settings of a group, ``lr`` among them.

    Attributes
    ----------
    report : StepReport
        What the last step did.
    like_weight : tuple of str
        Entries of the state that have the shape of the weight: kept in the shape of the parameter under their name.
        Every other entry is kept as the stack that it is, under its name if the parameter has one part, else under
        ``name.0``, ``name.1``, ...

    Raises
    ------
    ValueError
        When made or extended by `add_param_group`, with the name of the parameter: see `matrices.check_parameter`; for
        a setting out of range or one that the rule does not have; for an option of torch's that is not supported.
    """

    like_weight: tuple[str, ...] = ()

    #: Attributes of the rule beyond groups and state, which copies and pickles of the optimizer carry along.
    carried: ClassVar[tuple[str, ...]] = ("report", "like_weight")

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.report = StepReport()
        super().__init__(params, {"view": None, "state_dtype": None, **defaults})

    # --- what a rule says ---------------------------------------------------------------------------------------------

    @property
    def shards(self) -> Whole:
        """What the rule knows of whole matrices where it sees shards; by default it sees all."""
        return ALONE

    def begin(self, W: Float[Tensor, "count m n"], settings: Mapping[str, Any]) -> State:
        """Return the whole state before the first gradient; W may be on the meta device."""
        raise NotImplementedError

    def advance(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: State, settings: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "count m n"], State]:
        """Return the weights and the state after one gradient, all of whose entries are finite.

        Pure: arguments may share memory with parameters, gradients and state, and are never written to.
        """
        raise NotImplementedError

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group with ``lr`` as a number, or raise ``ValueError``; rules check theirs too."""
        lr = check_rate(f"{type(self).__name__}: lr", settings["lr"])
        kept = settings["state_dtype"]
        if kept is not None and not (isinstance(kept, torch.dtype) and kept.is_floating_point and kept.itemsize > 1):
            raise ValueError(f"state_dtype is {kept!r}, needed a torch dtype of at least 16 floating-point bits")
        flags = {
            name: check_flag(f"{type(self).__name__}: {name}", settings[name]) for name in FLAGS if name in settings
        }
        return {**settings, "lr": lr, **flags}

    # --- what torch asks ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; if it is refused, nothing is added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_foreign(type(self).__name__, group)
            self._refuse_unknown(group)
            members = list(self._members(len(self.param_groups) - 1, group))
            if len({id(member.parameter) for member in members}) < len(members):
                raise ValueError(f"a group has {len(members)} parameters, needed each of them once")
            for member in members:
                self._check_shards(member)
        except ValueError:
            self.param_groups.pop()
            raise

    @as_written
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, whole or not at all, and return what the closure returned.

        It runs as written where its caller is compiled.

        Raises
        ------
        ValueError
            For a sparse gradient, a setting out of range, or a step that leaves the range of the dtype; then nothing
            has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = self.present()
        report = StepReport(nonfinite_gradients(present))
        if report.taken:
            self.carry_out(self.plan(present))
        self.report = report
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary, with views as plain dictionaries and what is the same for all groups in words."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            group.update(self._whole(), view=_plain(group["view"]))
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state and settings, into memory of its own and in this optimizer's dtypes.

        Views and ``state_dtype`` are those of this optimizer; other settings are the loaded ones where there are any.
        Groups say in words which ``direction``, ``adapt`` and ``arithmetic`` they were saved with; where they do not,
        as those of other optimizers or with the entry removed, nothing is compared.

        Raises
        ------
        ValueError
            If state or views do not fit, with the name of the parameter; if a loaded setting is out of range; if what
            the groups say is not how this optimizer was made. Nothing has changed then.
        """
        loaded: dict[str, Any] = {}

        def fitted(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            if not {"state", "param_groups"} <= set(saved):
                raise ValueError(f"the loaded state has {sorted(saved)}, needed 'state' and 'param_groups'")
            loaded.update(saved, param_groups=self._fitting_groups(saved["param_groups"]))
            self._check_fitting(loaded)
            return loaded

        hook = self.register_load_state_dict_pre_hook(fitted)  # the last: users' hooks have adapted what comes
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            hook.remove()
        for number, owned in _numbered(loaded, self.owned()):
            if number in loaded["state"]:  # torch has cast it to the dtype of the parameter
                entries = loaded["state"][number].items()
                self.state[owned.parameter] = {name: _kept(value, owned) for name, value in entries}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, **{name: getattr(self, name) for name in self.carried}}

    # --- a step in two halves -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def plan(self, present: Sequence[Owned]) -> list[Plan]:
        """Compute a step for parameters whose gradients are finite, and change nothing.

        Raises
        ------
        ValueError
            If a new weight or state is not finite, with the name of its parameter.
        """
        pieces = [piece for owned in present for piece in self._pieces(owned)]
        by_parameter: dict[int, list[Piece]] = {}
        for stack in stacks(pieces, self.shards):
            for piece in self._advanced(stack):
                by_parameter.setdefault(id(piece.owned.parameter), []).append(piece)
        plans = [self._planned(sorted(done, key=lambda piece: piece.part)) for done in by_parameter.values()]
        self._refuse_overflow(plans)
        return plans

    @torch.no_grad()
    def carry_out(self, plans: Sequence[Plan]) -> None:
        """Write the weights and states of a plan."""
        for plan in plans:
            parameter = plan.owned.parameter
            parameter.copy_(plan.W)
            kept = self.state[parameter]
            for key, value in plan.state.items():
                if isinstance(value, Tensor) and key in kept:
                    kept[key].copy_(value)
                else:
                    kept[key] = _kept(value, plan.owned)

    # --- parameters and their parts -----------------------------------------------------------------------------------

    def present(self) -> list[Owned]:
        """Return the parameters that have a gradient."""
        return [owned for owned in self.owned() if owned.parameter.grad is not None]

    def owned(self) -> list[Owned]:
        """Return all parameters with their names, views and settings.

        Raises
        ------
        ValueError
            If a setting is out of range.
        """
        return [owned for number, group in enumerate(self.param_groups) for owned in self._members(number, group)]

    def state_bytes(self) -> int:
        """Return the memory of the state in bytes, as it is once every parameter has had a gradient."""
        return sum(
            entry.numel() * owned.kept.itemsize
            for owned in self.owned()
            for entry in self._blank(owned).values()
            if isinstance(entry, Tensor)
        )

    def _refuse_unknown(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if a group has what no step would look at."""
        rule = type(self).__name__
        for name in group:
            if name in WHOLE and hasattr(self, name):
                raise ValueError(f"a group has {name!r}, needed as an argument of {rule}: all groups share it")
            if name not in (*self.defaults, *FOREIGN, *SCHEDULED, "params", "param_names"):
                raise unknown(f"setting of a group of {rule}", name, sorted(self.defaults))

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group, checked."""
        return self.check({k: v for k, v in group.items() if k not in ("params", "param_names", "view")})

    def _members(self, number: int, group: dict[str, Any]) -> Iterator[Owned]:
        settings = self._settings(group)
        names: Sequence[str] = group.get("param_names") or [
            f"parameter {i} of group {number}" for i in range(len(group["params"]))
        ]
        for parameter, name in zip(group["params"], names, strict=True):
            yield Owned(parameter, name, check_parameter(parameter, group["view"], name), number, settings)

    def _check_shards(self, owned: Owned) -> None:
        """Raise ``ValueError`` if the matrices of a parameter are not the shards that the rule sees."""
        for shape in owned.view.shapes(owned.parameter.shape, owned.name):
            try:
                self.shards.whole_shape(shape)
            except ValueError as error:
                raise ValueError(f"{owned.name}: {error}") from error

    def _pieces(self, owned: Owned) -> Iterator[Piece]:
        """Yield the parts of a parameter with their gradients and states."""
        weights = owned.view.parts(owned.parameter.detach())
        gradients = owned.view.parts(owned.parameter.grad.detach())  # type: ignore[union-attr]
        stored: State = self.state.get(owned.parameter) or {}
        for part, (W, G) in enumerate(zip(weights, gradients, strict=True)):
            yield Piece(owned, part, W, G, self._part_state(owned, part, W, stored))

    def _part_state(self, owned: Owned, part: int, W: Tensor, stored: State) -> State:
        """Return the state of one part."""
        if not stored:
            return self.begin(W, owned.settings)
        state: State = {}
        for name, key in self._keys(owned, part, self.begin(W.to("meta"), owned.settings)):
            value = stored[key]
            if isinstance(value, Tensor):
                value = owned.view.parts(value)[part] if name in self.like_weight else value
            state[name] = value
        return state

    def _keys(self, owned: Owned, part: int, state: State) -> Iterator[tuple[str, str]]:
        """Yield the names of the entries of a part's state, and the keys under which they are stored."""
        count = len(owned.view.shapes(owned.parameter.shape))
        for name, value in state.items():
            alone = count == 1 or name in self.like_weight or isinstance(value, int)
            yield name, name if alone else f"{name}.{part}"

    def _advanced(self, stack: list[Piece]) -> list[Piece]:
        """Return the pieces of a stack after the step."""
        counts, work = [len(piece.W) for piece in stack], stack[0].owned.work
        W, G = (joined([getattr(piece, name) for piece in stack]).to(work) for name in ("W", "G"))
        before = {name: _joined_entry(name, stack) for name in stack[0].state}
        try:
            W, state = self.advance(W, G, before, stack[0].owned.settings)
        except ValueError as error:
            raise ValueError(f"{', '.join(piece.owned.name for piece in stack)}: {error}") from error
        weights = W.split(counts)
        parted = {
            name: value.split(counts) if isinstance(value, Tensor) else [value] * len(counts)
            for name, value in state.items()
        }
        return [
            Piece(piece.owned, piece.part, weights[i], piece.G, {name: parted[name][i] for name in parted})
            for i, piece in enumerate(stack)
        ]

    def _planned(self, pieces: list[Piece]) -> Plan:
        """Return the new weight and the entries of the new state as they are stored, from all pieces of a parameter."""
        owned = pieces[0].owned
        shape = owned.parameter.shape
        W = owned.view.whole([piece.W for piece in pieces], shape).to(owned.parameter.dtype)
        stored: State = {}
        for piece in pieces:
            for name, key in self._keys(owned, piece.part, piece.state):
                value = piece.state[name]
                if isinstance(value, Tensor) and name in self.like_weight:
                    if piece.part == 0:
                        whole = owned.view.whole([other.state[name] for other in pieces], shape)  # type: ignore[misc]
                        stored[key] = whole.to(owned.kept)
                else:
                    stored[key] = value.to(owned.kept) if isinstance(value, Tensor) else value
        return Plan(owned, W, stored)

    def _refuse_overflow(self, plans: Sequence[Plan]) -> None:
        """Raise ``ValueError`` on all ranks that hold the matrices if what one of them would write is not finite."""
        try:
            refuse_overflow(plans)
            refused = None
        except ValueError as error:
            refused = error
        ranks = self.shards.ranks
        if ranks is not None:
            flag = torch.tensor([float(refused is not None)], device=ranks.device)
            if ranks.tagged(phase="agree").all_reduce(flag, "max").wait().item() and refused is None:
                refused = ValueError("the step leaves the range of its dtype on another rank, needed it finite on all")
        if refused is not None:
            raise refused

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _whole(self) -> dict[str, str]:
        """Return what is the same for all groups, in words."""
        return {name: said(getattr(self, name)) for name in WHOLE if hasattr(self, name)}

    def _blank(self, owned: Owned) -> State:
        """Return the first state of a parameter as it would be stored, on the meta device."""
        pieces = []
        for part, W in enumerate(owned.view.parts(owned.parameter.detach().to("meta"))):
            pieces.append(Piece(owned, part, W, W, self.begin(W, owned.settings)))
        return self._planned(pieces).state

    def _fitting_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved groups with this optimizer's settings where they have none, and its views."""
        if len(saved) != len(self.param_groups):
            raise ValueError(f"the loaded state has {len(saved)} groups, needed {len(self.param_groups)}")
        groups = []
        for own, loaded in zip(self.param_groups, saved, strict=True):
            if _plain(loaded.get("view", own["view"])) != _plain(own["view"]):
                raise ValueError(f"the loaded state has the view {loaded['view']}, needed {_plain(own['view'])}")
            for name, needed in self._whole().items():
                if loaded.get(name, needed) != needed:
                    raise ValueError(f"the loaded state was made with {name} {loaded[name]}, needed {needed}")
            settings = {name: value for name, value in own.items() if name != "params"}
            given = {name: value for name, value in loaded.items() if name not in WHOLE}
            groups.append({**settings, **given, "view": own["view"], "state_dtype": own["state_dtype"]})
            self._settings(groups[-1])
        return groups

    def _check_fitting(self, loaded: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless every loaded entry has a place, and every place an entry."""
        for number, owned in _numbered(loaded, self.owned()):
            if number not in loaded["state"]:
                continue
            given, needed = (_outline(state) for state in (loaded["state"][number], self._blank(owned)))
            if given != needed:
                raise ValueError(f"{owned.name}: the loaded state has {given}, needed {needed}")


def stacks(pieces: Iterable[Piece], shards: Whole = ALONE) -> Iterator[list[Piece]]:
    """Yield pieces of equal shape together, in their order, as many at a time as gain from company.

    Of shards the whole matrices count, so that ranks with unequal ones make the same stacks, and those of one rank.
    """
    kinds: dict[Hashable, list[Piece]] = {}
    for piece in pieces:
        kinds.setdefault(piece.kind, []).append(piece)
    for alike in kinds.values():
        stack: list[Piece] = []
        for piece in alike:
            if stack and not (shards.together or _fits(stack, piece, shards)):
                yield stack
                stack = []
            stack.append(piece)
        yield stack


def _fits(stack: list[Piece], piece: Piece, shards: Whole) -> bool:
    """Say whether a piece gains from joining a stack: large matrices on a CPU run at full rate by themselves."""
    if piece.W.device.type == "cpu" and prod(shards.whole_shape(piece.W.shape[1:])) > batches.ALONE:
        return False
    return sum(prod(shards.whole_shape(other.W.shape)) for other in (*stack, piece)) <= batches.ENTRIES


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return stacks one behind the other.

    Examples
    --------
    >>> joined([torch.zeros(2, 1, 1), torch.ones(1, 1, 1)]).flatten().tolist()
    [0.0, 0.0, 1.0]
    """
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined_entry(name: str, stack: list[Piece]) -> Tensor | int:
    """Return an entry of the state of a stack."""
    first = stack[0].state[name]
    if isinstance(first, int):
        return first
    return joined([piece.state[name] for piece in stack]).to(stack[0].owned.work)  # type: ignore[misc]


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Say which tensors have finite entries only, with one reading of each and one wait for each device.

    Examples
    --------
    >>> finite([torch.ones(2, 2), torch.tensor([1.0, float("nan")]), torch.ones(0)])
    [True, False, True]
    """
    found = [True] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, X in enumerate(tensors):
        if X.numel():
            by_device.setdefault(X.device, []).append(i)
    for indices in by_device.values():
        told = torch.stack([torch.stack(torch.aminmax(_real(tensors[i]))).isfinite().all() for i in indices])
        for i, fine in zip(indices, told.tolist(), strict=True):
            found[i] = fine
    return found


def _real(X: Tensor) -> Tensor:
    """Return the real and imaginary parts of complex numbers."""
    return torch.view_as_real(X.resolve_conj()) if X.is_complex() else X


def nonfinite_gradients(present: Sequence[Owned]) -> tuple[str, ...]:
    """Return the names of the parameters whose gradients are not finite.

    Raises
    ------
    ValueError
        For a sparse gradient.
    """
    gradients = []
    for owned in present:
        gradient = owned.parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            raise ValueError(f"{owned.name} has a gradient that is sparse, needed a dense one")
        gradients.append(gradient.detach())
    return tuple(owned.name for owned, fine in zip(present, finite(gradients), strict=True) if not fine)


def refuse_overflow(plans: Sequence[Plan]) -> None:
    """Raise ``ValueError`` if a new weight or state is not finite, with the name of its parameter."""
    named = [(plan.owned.name, X) for plan in plans for X in (plan.W, *plan.state.values()) if isinstance(X, Tensor)]
    for (name, X), fine in zip(named, finite([X for _, X in named]), strict=True):
        if not fine:
            raise ValueError(
                f"{name}: the step leaves the range of {X.dtype}, needed finite weights and smaller gradients or rates"
            )


def refuse_foreign(rule: str, options: Mapping[str, object], strict: bool = False) -> None:
    """Refuse the options of torch's optimizers that are not supported, unless they ask for nothing.

    Parameters
    ----------
    rule : str
        The optimizer's name, for the message.
    options : mapping
        What was given.
    strict : bool
        Whether any other option is refused too.

    Raises
    ------
    ValueError
        With the name of the option.

    Examples
    --------
    >>> refuse_foreign("Muon", {"foreach": False})
    """
    for name, value in options.items():
        if strict and name not in FOREIGN:
            raise ValueError(f"{rule} has no option {name!r}")
        if name in FOREIGN and value:
            raise ValueError(f"{rule}: {name} is {value!r}, needed without: it is not supported")


def _kept(value: Tensor | int, owned: Owned) -> Tensor | int:
    """Return an entry in memory of its own, in the dtype of the state and on the device of the parameter."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(owned.parameter.device, owned.kept, copy=True, memory_format=torch.contiguous_format)


def said(value: object) -> str:
    """Return a value in words that are the same in every process: what it holds, without addresses and sources.

    A function is said by its name and the frozen values, functions and texts that it encloses; two that only differ in
    code or in enclosed numbers, which may be counters, are the same.

    Examples
    --------
    >>> from muon_lab import polar
    >>> said(polar.svd()), said(lambda C: C), said(None)
    ('Direct(method=SVD(), roundoff=None, dtype=torch.float64)', '<lambda>', 'None')
    """
    return _said(value, ())


def _said(value: object, within: tuple[object, ...]) -> str:
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = {name: cell.cell_contents for name, cell in cells}
        lasting = {name: each for name, each in held.items() if _lasts(each) and all(each is not x for x in within)}
        inner = ", ".join(f"{name}={_said(each, (*within, value))}" for name, each in lasting.items())
        return f"{value.__qualname__}({inner})" if inner else value.__qualname__
    if is_dataclass(value) and _is_value(value):
        shown = [field.name for field in fields(value) if field.repr and field.name != "source"]
        entries = [f"{name}={_said(getattr(value, name), within)}" for name in shown]
        return f"{type(value).__name__}({', '.join(entries)})"
    if isinstance(value, Number) and hasattr(value, "item"):
        value = value.item()  # NumPy's numbers are said as Python's, to which they are equal
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _lasts(value: object) -> bool:
    """Say whether something that a function encloses is part of what it is."""
    return isinstance(value, (FunctionType, str, torch.dtype)) or _is_value(value)


def _is_value(value: object) -> bool:
    """Say whether something is a frozen dataclass."""
    frozen = getattr(value, "__dataclass_params__", None)
    return frozen is not None and frozen.frozen and not isinstance(value, type)


def _plain(view: View | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a view as a dictionary of tuples and numbers."""
    if view is None:
        return None
    fields = asdict(view) if isinstance(view, View) else view
    return {name: tuple(value) if isinstance(value, (list, tuple)) else value for name, value in fields.items()}


def _numbered(loaded: Mapping[str, Any], owned: Sequence[Owned]) -> Iterator[tuple[int, Owned]]:
    """Yield the numbers of the parameters in a dictionary, and the parameters."""
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    if len(numbers) != len(owned):
        raise ValueError(f"the loaded state has {len(numbers)} parameters, needed {len(owned)}")
    yield from zip(numbers, owned, strict=True)


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of the tensors of a state, and the types of the rest."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        for name, value in sorted(state.items())
    }
