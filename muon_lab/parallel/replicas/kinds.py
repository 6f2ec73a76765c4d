"""Which data parallelism an optimizer gets: by what it does to a parameter."""

import inspect
from typing import Any

import torch

from muon_lab.nearest import unknown
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas.elementwise import ElementwiseOptimizer, is_elementwise
from muon_lab.parallel.replicas.joint import JointOptimizer, is_mixed
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer

Distributed = LayerwiseOptimizer | ElementwiseOptimizer | JointOptimizer

#: The options of whole layers, of which slices take some; with their defaults.
OPTIONS = {
    name: option.default
    for name, option in inspect.signature(LayerwiseOptimizer).parameters.items()
    if name not in ("optimizer", "group")
}


def distribute(optimizer: torch.optim.Optimizer, group: Collectives, **options: Any) -> Distributed:
    """Wrap an optimizer for data parallelism: whole layers for matrix optimizers, slices for element-wise ones.

    Whole layers are right for every optimizer that steps its parameters one by one; slices are for those of which it is
    known that they treat every entry by itself (`elementwise.is_elementwise`). Of several optimizers joined, each is
    wrapped by its kind, and all take one step (`joint.JointOptimizer`); but for ``reduce="none"``, with which all are
    stepped in whole layers.

    Parameters
    ----------
    optimizer : Optimizer
        Of all parameters, the same on every rank.
    group : Collectives
        The ranks.
    **options
        Those of `LayerwiseOptimizer`, such as ``owners``, ``clip``, ``defer`` and ``overlap``; for slices those of
        `ElementwiseOptimizer`.

    Raises
    ------
    ValueError
        For an option that there is not, or that this kind does not take; and as the wrappers do.

    Examples
    --------
    >>> from muon_lab.parallel.rendezvous import alone
    >>> W = torch.nn.Parameter(torch.ones(2, 2))
    >>> type(distribute(torch.optim.AdamW([W]), alone())).__name__
    'ElementwiseOptimizer'
    >>> type(distribute(torch.optim.Muon([W]), alone(), clip=1.0)).__name__
    'LayerwiseOptimizer'
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown("option of distribute", name, OPTIONS)
    if is_elementwise(optimizer):
        return ElementwiseOptimizer(optimizer, group, **_of_slices(type(optimizer).__name__, options))
    if is_mixed(optimizer) and options.get("reduce") != "none":
        return JointOptimizer(optimizer, group, **options)
    return LayerwiseOptimizer(optimizer, group, **options)


def _of_slices(rule: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of slices, refusing others unless they ask for nothing."""
    taken = [name for name in inspect.signature(ElementwiseOptimizer).parameters if name in OPTIONS]
    for name, value in options.items():
        if name not in taken and value is not OPTIONS[name] and value != OPTIONS[name]:
            raise ValueError(
                f"distribute was given {name} for {rule}, whose slices take {', '.join(taken)} alone: needed without"
            )
    return {name: value for name, value in options.items() if name in taken}
