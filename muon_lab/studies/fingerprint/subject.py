"""The optimizer that is examined: how it is found, made and made to step.

Every probe takes an optimizer of its own, so that none remembers another probe. Between the steps of a probe the
weights go back to zero where only updates are of interest: whatever the optimizer makes of weights, decay for one, then
has nothing to act on, and the new weight is the update to the last bit.
"""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.nearest import nearest

#: From a class, parameters and keyword arguments to an optimizer.
Adapter = Callable[[type[torch.optim.Optimizer], list[torch.nn.Parameter], dict[str, Any]], torch.optim.Optimizer]

#: The ways to hand over parameters by name; any other name is the dotted path of an `Adapter`.
ADAPTERS = ("auto", "parameters", "groups")


class Raised(Exception):
    """A step ended in an exception; the message has its type and its text."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a few steps did.

    Attributes
    ----------
    weights : list of tensor
        The weights after each step.
    gradients : list of tensor
        The gradients as they were after the step that used them.
    dropped, drew : bool
        Whether the parameter had no gradient after the last step, and whether a step drew random numbers.
    state : dict
        The state of the parameter after the last step.
    """

    weights: list[Float[Tensor, "..."]]
    gradients: list[Float[Tensor, "..."]]
    dropped: bool
    drew: bool
    state: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """An optimizer class with the arguments of its constructor.

    Attributes
    ----------
    cls : type
        A subclass of ``torch.optim.Optimizer``.
    kwargs : mapping
        Keyword arguments of the constructor.
    adapter : str or callable
        How parameters are handed over: ``"parameters"`` as a list, ``"groups"`` as one group with ``use_muon=True``
        (keyword arguments that the constructor doesn't know go into the group), ``"auto"`` in the first of these ways
        that the constructor accepts; or a function of class, parameters and keyword arguments.
    path : str
        The dotted path under which it was found.

    Examples
    --------
    >>> subject = Subject(torch.optim.SGD, {"lr": 0.5})
    >>> subject.run(torch.ones(1, 1), [torch.ones(1, 1)]).weights
    [tensor([[0.5000]])]
    """

    cls: type[torch.optim.Optimizer]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | Adapter = "auto"
    path: str = ""

    @property
    def name(self) -> str:
        """The dotted path under which it was found, or that of its definition."""
        return self.path or f"{self.cls.__module__}.{self.cls.__qualname__}"

    def make(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Return an optimizer of one parameter.

        Raises
        ------
        ValueError
            If the constructor refuses; one sentence with its own words.
        """
        return self._made(parameter)[0]

    def way(self) -> str:
        """Return how the constructor takes parameters, in words.

        Raises
        ------
        ValueError
            If the constructor refuses.
        """
        return self._made(torch.nn.Parameter(torch.zeros(2, 2)))[1]

    def _made(self, parameter: torch.nn.Parameter) -> tuple[torch.optim.Optimizer, str]:
        """Return an optimizer of one parameter, and how it took it."""
        complaint = None
        if isinstance(self.adapter, str):
            wanted = (
                ("parameters", *(("groups",) if self._fits_group() else ()))
                if self.adapter == "auto"
                else (self.adapter,)
            )
            tried = {name: _WAYS[name] for name in wanted}
        else:
            tried = {getattr(self.adapter, "__name__", "an adapter"): self.adapter}
        for name, way in tried.items():
            try:
                made = way(self.cls, [parameter], dict(self.kwargs))
            except Exception as error:
                complaint = complaint or error
                continue
            if not any(parameter is owned for group in made.param_groups for owned in group["params"]):
                raise ValueError(f"{self.name} was made without the parameter that it was given")
            return made, name
        raise ValueError(f"{self.name} refuses to be made with {_listed(self.kwargs)}: {_words(complaint)}")

    def _fits_group(self) -> bool:
        """Say whether all arguments have a place when a group is handed over: a misspelt one must not hide there."""
        known = _named(self.cls)
        return len(known) == 1 or set(self.kwargs) <= known

    def settings(self) -> dict[str, Any]:
        """Return what a group of this optimizer holds beside its parameters.

        Raises
        ------
        ValueError
            If the constructor refuses.
        """
        group = self.make(torch.nn.Parameter(torch.zeros(2, 2))).param_groups[0]
        return {name: value for name, value in group.items() if name != "params"}

    def run(
        self,
        W: Float[Tensor, "..."],
        gradients: Sequence[Float[Tensor, "..."]],
        *,
        rate: float | None = None,
        decay: float | None = None,
        zeroed: bool = False,
    ) -> Run:
        """Take steps with given gradients.

        Parameters
        ----------
        W : tensor
            The first weights; their dtype is that of parameter and gradients.
        gradients : sequence of tensor
            One a step.
        rate, decay : float, optional
            Put into the groups as ``lr`` and, where they have one, ``weight_decay``.
        zeroed : bool
            Whether the weights are zero before every step.

        Raises
        ------
        ValueError
            If the constructor refuses.
        Raised
            If a step does.
        """
        parameter = torch.nn.Parameter(W.clone())
        with torch.random.fork_rng(devices=[]):  # whatever a step draws, the caller's generator stays where it was
            before = torch.Generator().manual_seed(0).get_state()
            torch.random.set_rng_state(before)
            optimizer = self.make(parameter)
            for group in optimizer.param_groups:
                if rate is not None:
                    group["lr"] = rate
                if decay is not None and "weight_decay" in group:
                    group["weight_decay"] = decay
            weights, used, dropped = [], [], False
            for G in gradients:
                if zeroed:
                    parameter.data.zero_()
                given = G.to(W.dtype).clone()
                parameter.grad = given
                try:
                    optimizer.step()
                except Exception as error:
                    raise Raised(_words(error)) from error
                weights.append(parameter.detach().clone())
                used.append(given)
                dropped = parameter.grad is None
            drew = not torch.equal(before, torch.random.get_rng_state())
        return Run(weights, used, dropped, drew, dict(optimizer.state[parameter]))

    def updates(
        self, gradients: Sequence[Float[Tensor, "m n"]], dtype: torch.dtype = torch.float32
    ) -> list[Float[Tensor, "m n"]]:
        """Return what each step subtracts from weights of zero at learning rate 1, without decay, in float64.

        Raises
        ------
        ValueError, Raised
            As `run`.
        """
        W = torch.zeros(gradients[0].shape, dtype=dtype)
        return [-W.double() for W in self.run(W, gradients, rate=1.0, decay=0.0, zeroed=True).weights]

    def tried(self, gradients: Sequence[Float[Tensor, "m n"]]) -> list[Float[Tensor, "m n"]]:
        """Return these updates, NaN all of them if a step raises, as it may where a schedule diverges."""
        try:
            return self.updates(gradients)
        except Raised:
            return [torch.full_like(G, float("nan"), dtype=torch.float64) for G in gradients]


def load(path: str) -> type[torch.optim.Optimizer]:
    """Return an optimizer class by its dotted path.

    Raises
    ------
    ValueError
        If there is no such module or class, if its import fails, or if it is no optimizer.

    Examples
    --------
    >>> load("torch.optim.Muon").__name__
    'Muon'
    >>> load("torch.optim.Moun")
    Traceback (most recent call last):
    ValueError: torch.optim has no Moun: did you mean torch.optim.Muon?
    """
    module, _, name = path.rpartition(".")
    found = _imported(path, module, name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"{path} is no subclass of torch.optim.Optimizer, needed one")
    return found


def adapter_named(name: str) -> str | Adapter:
    """Return a way to hand over parameters: one of `ADAPTERS`, or the function at a dotted path.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name in ADAPTERS:
        return name
    if "." not in name:
        raise ValueError(
            f"unknown adapter {name!r}: did you mean {nearest(name, ADAPTERS)!r}? Known: {', '.join(ADAPTERS)}, or the "
            "dotted path of a function of class, parameters and keyword arguments"
        )
    found = _imported(name, *name.rpartition(".")[::2])
    if not callable(found):
        raise ValueError(
            f"adapter {name} cannot be called, needed a function of class, parameters and keyword arguments"
        )
    return found


def keyword(text: str) -> tuple[str, Any]:
    """Read ``key=value``: a Python literal, ``true``, ``false``, ``none``, a torch name such as torch.float32, or text.

    Raises
    ------
    ValueError
        If there is no key.

    Examples
    --------
    >>> keyword("betas=(0.9, 0.95)"), keyword("nesterov=false"), keyword("ns_coeffs=quintic")
    (('betas', (0.9, 0.95)), ('nesterov', False), ('ns_coeffs', 'quintic'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"--kwargs takes key=value, not {text!r}")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return key, words[value.lower()]
    if value.startswith("torch.") and isinstance(getattr(torch, value[6:], None), torch.dtype):
        return key, getattr(torch, value[6:])
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _imported(path: str, module: str, name: str) -> Any:
    if not module:
        raise ValueError(f"{path!r} is no dotted path, needed one such as torch.optim.Muon")
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {error.name!r}, needed that of {path}") from error
        raise ValueError(f"the import of {module} fails: {_words(error)}") from error
    except Exception as error:
        raise ValueError(f"the import of {module} fails: {_words(error)}") from error
    if not hasattr(home, name):
        near = nearest(name, [known for known in dir(home) if not known.startswith("_")])
        raise ValueError(f"{module} has no {name}: did you mean {module}.{near}?")
    return getattr(home, name)


def _as_parameters(
    cls: type[torch.optim.Optimizer], parameters: list[torch.nn.Parameter], kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    return cls(parameters, **kwargs)


def _as_group(
    cls: type[torch.optim.Optimizer], parameters: list[torch.nn.Parameter], kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    """Hand over one group that is flagged for Muon."""
    known = _named(cls)
    own = {name: value for name, value in kwargs.items() if name in known}
    rest = {name: value for name, value in kwargs.items() if name not in known}
    return cls([{"params": parameters, "use_muon": True, **rest}], **own)


def _named(cls: type[torch.optim.Optimizer]) -> set[str]:
    """Return the arguments that a constructor names, its parameters among them."""
    entries = inspect.signature(cls).parameters.items()
    return {name for name, entry in entries if entry.kind is not inspect.Parameter.VAR_KEYWORD}


_WAYS: dict[str, Adapter] = {"parameters": _as_parameters, "groups": _as_group}


def _words(error: BaseException | None) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _listed(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "its defaults"
