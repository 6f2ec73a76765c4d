"""What optimizers that wrap another one for data parallelism have in common: groups, names, the frame of a step."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from muon_lab.compiling import as_written
from muon_lab.nearest import unknown
from muon_lab.parallel.calls import named
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas import agreement
from muon_lab.parallel.replicas.agreement import Report


class Wrapper(torch.optim.Optimizer):
    """An optimizer whose groups are those of another one, and whose steps the ranks of a group take together.

    Ranks beside the group may hold other parts of the same parameters, as in tensor parallelism: what is agreed on is
    then agreed on with them too.

    Attributes
    ----------
    optimizer : Optimizer
        What is wrapped.
    group : Collectives
        The ranks.
    also : Collectives, optional
        Ranks that hold other parts of the same parameters.
    whole : frozenset of str
        The parameters of which these have no parts but the whole.
    names : tuple of str
        Of all parameters, in the order of the groups.
    report : Report
        What the last step did, the same on every rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Collectives,
        clip: float | None,
        also: Collectives | None = None,
        whole: Collection[str] = (),
    ) -> None:
        rule = type(self).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"{rule} was given a {type(optimizer).__name__}, needed an optimizer of torch")
        for name, ranks in (("group", group), ("also", also)):
            if not isinstance(ranks, Collectives) and not (name == "also" and ranks is None):
                raise ValueError(f"{name} is a {type(ranks).__name__}, needed Collectives such as those of a world")
        if isinstance(optimizer, Wrapper):
            raise ValueError(f"{rule} was given a {type(optimizer).__name__}, needed an optimizer that is not wrapped")
        agreement.check_limit(clip)
        self.optimizer, self.group, self.clip, self.also = optimizer, group, clip, also
        self.report = Report()
        self.parameters: list[Tensor] = [p for each in optimizer.param_groups for p in each["params"]]
        self.names = tuple(names_in(optimizer))
        if len({id(p) for p in self.parameters}) < len(self.parameters):
            raise ValueError(f"{rule} was given {len(self.parameters)} parameters, needed each of them once")
        self.whole = self._known(whole)
        self.dtypes = tuple(str(p.dtype).removeprefix("torch.") for p in self.parameters)
        self.device = self._one_device()
        self._number = {id(p): number for number, p in enumerate(self.parameters)}
        super().__init__(self.param_groups, {})
        self.defaults = optimizer.defaults

    # --- what torch asks ----------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer, as they are now: schedulers reach them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, _: list[dict[str, Any]]) -> None:
        """Do nothing: torch's constructor starts with no groups, but here they are there already."""

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, as far as this rank has it."""
        return self.optimizer.state

    @state.setter
    def state(self, _: object) -> None:
        """Do nothing: torch's constructor starts with no state."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group that the wrapped optimizer does not have: ranks have agreed on those that it had.

        Raises
        ------
        ValueError
            For such a group.
        """
        if not any(param_group is group for group in self.param_groups):
            raise ValueError(
                f"{type(self).__name__} has been given a group, needed before the optimizer is wrapped: ranks have "
                "agreed on its parameters"
            )

    @as_written
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the mean of all ranks' gradients, on every rank or on none, and return the closure's value.

        Raises
        ------
        Exception
            What the wrapped optimizer raises, on the rank where it does.
        ValueError
            On every other rank then. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take()
        return loss

    # --- one step -----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Average gradients, agree on what they are, and step: all parts, or none."""
        means = [part._means() for part in self._parts]
        found = [part._agreed(own) for part, own in zip(self._parts, means, strict=True)]
        report = _joined([one for one, _ in found])
        if report.taken:
            factor = agreement.clipping(report.norm, self.clip)
            at_work = [(part, present) for part, (_, present) in zip(self._parts, found, strict=True)]
            with ExitStack() as shown:
                for (part, present), own in zip(at_work, means, strict=True):
                    shown.enter_context(part._shown(own, present, factor))
                agreement.all_or_none(
                    [group.tagged(phase="agreement") for group in self._axes],
                    lambda: [part._advance(present) for part, present in at_work],
                    [weight for part, present in at_work for weight in part._changing(present)],
                    [state for part in self._parts for state in part._states()],
                )
            for part, present in at_work:
                part._send(present)
        self.report = report

    @property
    @abstractmethod
    def _parts(self) -> Sequence["Part"]:
        """What takes the step."""

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank, as the wrapped optimizer alone would have it; all ranks take part."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, saved on any number of ranks or by the wrapped optimizer alone."""

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(f"{type(self).__name__} cannot be copied or pickled: save its state_dict instead")

    # --- what wrappers share ------------------------------------------------------------------------------------------

    def _require_same(self, **options: object) -> None:
        """Refuse ranks that were given different things, by name; parameters must be equal bit for bit.

        Ranks that hold other parts may differ in shapes and in weights, but in those of whole parameters.

        Raises
        ------
        ValueError
            On every rank.
        """
        options = {**options, "clip": self.clip, "whole": sorted(self.whole)}
        if self.also is None:
            return self._require_same_here(options)
        error, reason = None, ""
        try:
            self._require_same_here({**options, "also": (self.also.size, self.also.rank)})
        except ValueError as caught:
            error, reason = caught, str(caught)
        reason = agreement.said_by_any([self.also], reason)
        if reason:
            raise error or ValueError(reason)
        rule = f"{type(self).__name__}:"
        kinds = {f"{name} (dtype)": str(p.dtype) for name, p in zip(self.names, self.parameters, strict=True)}
        place = {"place in the group": (self.group.size, self.group.rank)}
        agreement.require_same(self.also, f"{rule} options", {**options, **place, **kinds})
        agreement.require_same(self.also, f"{rule} weights", self._fingerprints(self.whole))

    def _require_same_here(self, options: Mapping[str, object]) -> None:
        """Refuse ranks of the group that were given different things."""
        rule = f"{type(self).__name__}:"
        kinds = {
            f"{name} (shape or dtype)": (tuple(p.shape), str(p.dtype))
            for name, p in zip(self.names, self.parameters, strict=True)
        }
        agreement.require_same(self.group, f"{rule} options", {**options, **kinds})
        agreement.require_same(self.group, f"{rule} weights", self._fingerprints(self.names))

    def _fingerprints(self, names: Collection[str]) -> dict[str, int]:
        named_ = zip(self.names, self.parameters, strict=True)
        return {name: agreement.fingerprint(p) for name, p in named_ if name in names}

    def _known(self, whole: Collection[str]) -> frozenset[str]:
        """Return the parameters that other ranks have whole, all of whose names are known."""
        if isinstance(whole, str):
            raise ValueError(f"whole is {whole!r}, needed a collection of names of parameters")
        for name in whole:
            if name not in self.names:
                raise unknown("parameter in whole", name, self.names)
        if whole and self.also is None:
            raise ValueError("whole names parameters and also is None, needed the ranks that have these whole")
        return frozenset(whole)

    @property
    def _axes(self) -> list[Collectives]:
        """The axes of the grid of ranks that take a step together."""
        return [self.group] if self.also is None else [self.group, self.also]

    def _counts(self, number: int) -> bool:
        """Say whether a parameter counts here in the norm of all: one that others have whole too counts once."""
        return self.also is None or self.also.rank == 0 or self.names[number] not in self.whole

    def _one_device(self) -> torch.device:
        """Return where the parameters are.

        Raises
        ------
        ValueError
            Unless that is one device, and that of the group if it talks between GPUs.
        """
        here = self.parameters[0].device if self.parameters else self.group.device
        needed = here if self.group.device.type == "cpu" else self.group.device
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.device != needed:
                raise ValueError(f"{name} is on {p.device}, needed on {needed} with the other parameters")
        return needed

    def _settings(self) -> float:
        """Return a whole number of 16 bits that stands for the groups as they are: their parameters and settings."""
        found = [
            (
                [self._number.get(id(p), -1) for p in group["params"]],
                {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")},
            )
            for group in self.param_groups
        ]
        return float(agreement.digest(found) & 0xFFFF)

    def _decided(
        self, have: Sequence[float], wrong: Sequence[float], norm: float, settings: tuple[float, float]
    ) -> tuple[Report, set[int], list[float]]:
        r"""Return what all ranks are about to do, the parameters that any has a gradient of, and how many have.

        With ranks that hold other parts, norms are put together in their order, each with those of the group: the
        result is bit for bit the same on all.

        Parameters
        ----------
        have, wrong : sequences of float
            How many ranks of the group have a gradient of each parameter, or a mean that is not finite.
        norm : float
            Of all means of the group that are finite and count here.
        settings : (float, float)
            :math:`\sum_r d_r` and :math:`\sum_r d_r^2` of `_settings`.

        Raises
        ------
        ValueError
            If settings differ.
        """
        ranks, same = self.group.size, self.group.size * settings[1] == settings[0] ** 2
        if self.also is not None:
            slots, mine = [0.0] * self.also.size, self._settings()
            slots[self.also.rank] = norm
            row = [*have, *wrong, *slots, float(same), mine, mine**2]
            ((*summed, agree, total, squares),) = agreement.tally(self.also.tagged(phase="agreement"), [row]).tolist()
            count = len(have)
            have, wrong, norm = summed[:count], summed[count : 2 * count], math.hypot(*summed[2 * count :])
            same = agree == self.also.size and self.also.size * squares == total**2
            ranks *= self.also.size
        self._require_settings(same)
        present = {number for number, some in enumerate(have) if some}
        nonfinite = self._named(number for number, flag in enumerate(wrong) if flag)
        report = Report(() if nonfinite else self._named(sorted(present)), nonfinite, math.nan if nonfinite else norm)
        return report, present, [some / ranks for some in have]

    def _require_settings(self, same: bool) -> None:
        r"""Refuse to step by settings that differ.

        Those of ranks are equal where :math:`p \sum_r d_r^2 = (\sum_r d_r)^2` (Cauchy and Schwarz), exact for up to
        1,448 ranks.

        Raises
        ------
        ValueError
            On all ranks if settings differ, and on one that has been given other parameters.
        """
        if [id(p) for group in self.param_groups for p in group["params"]] != [id(p) for p in self.parameters]:
            raise ValueError(
                f"{type(self).__name__} finds other parameters in its groups than ranks have agreed on, needed the same"
            )
        if not same:
            beside = "" if self.also is None else f" or {named(self.also.ranks)}"
            raise ValueError(
                f"{type(self).__name__}: groups differ between {named(self.group.ranks)}{beside}, needed the same "
                "parameters and settings, learning rates among them, on all"
            )

    def _tagged(self, phase: str) -> Collectives:
        return self.group.tagged(phase=phase)

    def _named(self, numbers: object) -> tuple[str, ...]:
        return tuple(self.names[number] for number in numbers)  # type: ignore[attr-defined]


class Part(Wrapper):
    """What takes a step of the parameters of one optimizer, alone or with other parts."""

    @property
    def _parts(self) -> Sequence["Part"]:
        return (self,)

    @abstractmethod
    def _means(self) -> dict[int, Tensor]:
        """Return the mean gradients that this rank has a use for, by parameter."""

    @abstractmethod
    def _agreed(self, means: Mapping[int, Tensor]) -> tuple[Report, set[int]]:
        """Return what all ranks are about to do, and the parameters that any rank has a gradient of."""

    @abstractmethod
    def _shown(self, means: Mapping[int, Tensor], present: set[int], factor: float) -> AbstractContextManager[None]:
        """Show the wrapped optimizer what this rank is to step, with mean gradients times a factor."""

    @abstractmethod
    def _advance(self, present: set[int]) -> None:
        """Take this rank's part of the step."""

    @abstractmethod
    def _changing(self, present: set[int]) -> list[Tensor]:
        """Return the weights that this rank's part may change."""

    @abstractmethod
    def _states(self) -> list[dict[Any, Any]]:
        """Return the states that this rank's part may change."""

    @abstractmethod
    def _send(self, present: set[int]) -> None:
        """Send new weights to all."""


def _joined(reports: Sequence[Report]) -> Report:
    """Return the report of a step of several parts."""
    nonfinite = tuple(name for one in reports for name in one.nonfinite)
    if nonfinite:
        return Report((), nonfinite, math.nan)
    return Report(tuple(name for one in reports for name in one.updated), (), math.hypot(*(r.norm for r in reports)))


def names_in(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of all parameters of an optimizer: their own, or those of their places.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2))
    >>> names_in(torch.optim.SGD([("w", W)])), names_in(torch.optim.SGD([W]))
    (['w'], ['parameter 0 of group 0'])
    """
    names: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        names += group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
    return names


def dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient as an ordinary tensor: a mean over ranks is sparse no more.

    Examples
    --------
    >>> dense(torch.eye(2).to_sparse()), dense(None)
    (tensor([[1., 0.],
            [0., 1.]]), None)
    """
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()


def _plain(value: object) -> Any:
    """Return a setting of a group as something that prints alike on all ranks; objects of any other kind are left out.

    A tensor of one number, such as a learning rate, is that number.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else ...
