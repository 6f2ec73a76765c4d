"""States of optimizers that ranks hold in parts, made whole and cut again.

What is saved is what one process would have saved, in the wrapped optimizer's own format: it can be loaded on any
number of ranks, and without any. An optimizer made of others (it has a mapping `optimizers`) is saved as a dictionary
of their dictionaries.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas.agreement import told

Packed = dict[str, Any]


def leaves(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold state: those that an optimizer is made of, or itself.

    Examples
    --------
    >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    >>> leaves(adam) == [adam]
    True
    """
    parts = getattr(optimizer, "optimizers", None)
    if not isinstance(parts, Mapping):
        return [optimizer]
    return [leaf for part in parts.values() for leaf in leaves(part)]


def everyones(group: Collectives, part: Any) -> list[Any]:
    """Return what every rank hands over, by place: dictionaries, lists, numbers, text and tensors (on the CPU).

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> worlds.run(lambda world: everyones(world, {"rank": world.rank}), ranks=2)[1]
    [{'rank': 0}, {'rank': 1}]
    """
    file = io.BytesIO()
    torch.save(part, file)
    messages = told(group, file.getvalue())
    return [torch.load(io.BytesIO(message), weights_only=True, map_location="cpu") for message in messages]


def gathered(group: Collectives, part: Packed) -> Packed:
    """Return the dictionary of all on every rank, from that of each; states are sent, settings are the own ones."""
    states = everyones(group, [leaf["state"] for leaf in _leaf_dictionaries(part)])
    return merged([_with_states(part, iter(each)) for each in states])


def merged(parts: Sequence[Packed]) -> Packed:
    """Return the dictionary of all from those of the ranks, each with the state of the parameters that it owns.

    Raises
    ------
    ValueError
        If two ranks have the state of one parameter.

    Examples
    --------
    >>> groups = [{"lr": 0.1, "params": [0, 1]}]
    >>> merged([{"state": {1: "b"}, "param_groups": groups}, {"state": {0: "a"}, "param_groups": groups}])
    {'state': {0: 'a', 1: 'b'}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    if "param_groups" not in parts[0]:
        return {label: merged([part[label] for part in parts]) for label in parts[0]}
    whole: dict[Any, Any] = {}
    for part in parts:
        if twice := whole.keys() & part["state"].keys():
            raise ValueError(f"the state of parameters {sorted(twice)} is held by two ranks, needed by one")
        whole.update(part["state"])
    return {**parts[0], "state": dict(sorted(whole.items()))}


def _leaf_dictionaries(part: Packed) -> list[Packed]:
    if "param_groups" in part:
        return [part]
    return [leaf for each in part.values() for leaf in _leaf_dictionaries(each)]


def _with_states(part: Packed, states: Iterator[Any]) -> Packed:
    """Return a dictionary with other states, which come in the order of `_leaf_dictionaries`."""
    if "param_groups" in part:
        return {**part, "state": next(states)}
    return {label: _with_states(each, states) for label, each in part.items()}


def restricted(whole: Mapping[str, Any], optimizer: torch.optim.Optimizer, wanted: Callable[[Tensor], bool]) -> Packed:
    """Return a dictionary with the state of some parameters only, in memory of its own.

    Torch's optimizers keep some tensors of what they load, and count in them.

    Raises
    ------
    ValueError
        If it is a dictionary of another number of parameters or of other optimizers.
    """
    parts = getattr(optimizer, "optimizers", None)
    if isinstance(parts, Mapping):
        if set(parts) != set(whole):
            raise ValueError(f"the loaded state is of {sorted(whole)}, needed {sorted(parts)}")
        return {label: restricted(whole[label], part, wanted) for label, part in parts.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(f"the loaded state has {len(numbers)} parameters, needed {len(parameters)}")
    kept = [number for number, p in zip(numbers, parameters, strict=True) if wanted(p) and number in whole["state"]]
    return {**whole, "state": {number: deepcopy(whole["state"][number]) for number in kept}}
