"""What optimizers that wrap another one for data parallelism have in common: groups, names, the frame of a step."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from muon_lab.compiling import as_written
from muon_lab.parallel.calls import named
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas import agreement
from muon_lab.parallel.replicas.agreement import Report


class Wrapper(torch.optim.Optimizer):
    """An optimizer whose groups are those of another one, and whose steps the ranks of a group take together.

    Attributes
    ----------
    optimizer : Optimizer
        What is wrapped.
    group : Collectives
        The ranks.
    names : tuple of str
        Of all parameters, in the order of the groups.
    report : Report
        What the last step did, the same on every rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Collectives, clip: float | None) -> None:
        rule = type(self).__name__
        if isinstance(optimizer, Wrapper):
            raise ValueError(f"{rule} was given a {type(optimizer).__name__}, needed an optimizer that is not wrapped")
        agreement.check_limit(clip)
        self.optimizer, self.group, self.clip = optimizer, group, clip
        self.report = Report()
        self.parameters: list[Tensor] = [p for each in optimizer.param_groups for p in each["params"]]
        self.names = tuple(_names(optimizer))
        if len({id(p) for p in self.parameters}) < len(self.parameters):
            raise ValueError(f"{rule} was given {len(self.parameters)} parameters, needed each of them once")
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

    @abstractmethod
    def _take(self) -> None:
        """Average gradients, agree on what they are, and step."""

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

        Raises
        ------
        ValueError
            On every rank.
        """
        rule = f"{type(self).__name__}:"
        kinds = {
            f"{name} (shape or dtype)": (tuple(p.shape), str(p.dtype))
            for name, p in zip(self.names, self.parameters, strict=True)
        }
        agreement.require_same(self.group, f"{rule} options", {**options, "clip": self.clip, **kinds})
        weights = {name: agreement.fingerprint(p) for name, p in zip(self.names, self.parameters, strict=True)}
        agreement.require_same(self.group, f"{rule} weights", weights)

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

    def _require_settings(self, total: float, squares: float) -> None:
        r"""Refuse to step by settings that differ, given :math:`\sum_r d_r` and :math:`\sum_r d_r^2` of `_settings`.

        They are equal where :math:`p \sum_r d_r^2 = (\sum_r d_r)^2` (Cauchy and Schwarz), exact for up to 1,448 ranks.

        Raises
        ------
        ValueError
            On all ranks if settings differ, and on one that has been given other parameters.
        """
        if [id(p) for group in self.param_groups for p in group["params"]] != [id(p) for p in self.parameters]:
            raise ValueError(
                f"{type(self).__name__} finds other parameters in its groups than ranks have agreed on, needed the same"
            )
        if self.group.size * squares != total * total:
            raise ValueError(
                f"{type(self).__name__}: groups differ between {named(self.group.ranks)}, needed the same parameters "
                "and settings, learning rates among them, on all"
            )

    def _tagged(self, phase: str) -> Collectives:
        return self.group.tagged(phase=phase)

    def _named(self, numbers: object) -> tuple[str, ...]:
        return tuple(self.names[number] for number in numbers)  # type: ignore[attr-defined]


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
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
