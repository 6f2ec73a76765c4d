"""What ranks must know of each other before they change anything, told in few small calls that all of them make."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from muon_lab.parallel.calls import named
from muon_lab.parallel.collectives import Collectives


@dataclass(frozen=True)
class Report:
    """What the last step did, the same on every rank.

    Attributes
    ----------
    updated : tuple of str
        The parameters that had a gradient on some rank and were stepped.
    nonfinite : tuple of str
        Those whose averaged gradients were not finite; if there are any, nothing has changed.
    norm : float
        The norm of the whole averaged gradient, before clipping; nan if it is not finite.

    Examples
    --------
    >>> Report().taken, Report(nonfinite=("head.weight",)).taken
    (True, False)
    """

    updated: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    norm: float = 0.0

    @property
    def taken(self) -> bool:
        """Whether anything was to change."""
        return not self.nonfinite


def told(group: Collectives, message: bytes) -> list[bytes]:
    """Return the messages of all ranks, by place: one call, and a second one if there is anything to tell.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> worlds.run(lambda world: told(world, b"ab" * world.rank), ranks=3)[0]
    [b'', b'ab', b'abab']
    """
    length = torch.tensor([len(message)], dtype=torch.int64, device=group.device)
    lengths = group.all_gather(length).wait().flatten().tolist()
    if not any(lengths):
        return [b""] * group.size
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
    joined = group.all_gather_v(mine.to(group.device), lengths).wait().cpu().numpy().tobytes()
    ends = [sum(lengths[: place + 1]) for place in range(group.size)]
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def require_same(group: Collectives, what: str, values: Mapping[str, object]) -> None:
    """Raise ``ValueError``, on every rank, unless all have the same values; the message names those that differ.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> def program(world):
    ...     try:
    ...         require_same(world, "options", {"clip": 1.0, "owners": (0, world.rank)})
    ...     except ValueError as error:
    ...         return str(error)
    >>> worlds.run(program, ranks=2)
    ['options differ between ranks 0, 1: owners', 'options differ between ranks 0, 1: owners']
    """
    digests = [digest(value) for value in values.values()]
    mine = torch.tensor([len(digests), digest(list(values)), *digests], dtype=torch.int64, device=group.device)
    lengths = {len(message) // 8 for message in told(group, mine.cpu().numpy().tobytes())}
    if len(lengths) > 1:
        raise ValueError(f"{what} differ between {named(group.ranks)}: their number")
    everyones = group.all_gather(mine).wait()
    differs = (everyones != everyones[0]).any(dim=0).tolist()
    names = ["their number", "their names", *values]
    if any(differs):
        found = ", ".join(name for name, bad in zip(names, differs, strict=True) if bad)
        raise ValueError(f"{what} differ between {named(group.ranks)}: {found}")


def digest(value: object) -> int:
    """Return a number of 64 bits that stands for a value as it prints.

    Examples
    --------
    >>> digest([1, "a"]) == digest([1, "a"]), digest([1, "a"]) == digest([1, "b"])
    (True, False)
    """
    found = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def fingerprint(x: Tensor) -> int:
    r"""Return a checksum of the bits of a tensor, whatever its strides: :math:`\sum_i (2i + 1) b_i` modulo 2⁶⁴.

    Examples
    --------
    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(b)
    (True, False)
    """
    flat = x.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(integers[flat.element_size()]).to(torch.int64)
    return int((bits * torch.arange(1, 2 * len(bits) + 1, 2, device=bits.device)).sum())


def norms(gradients: Sequence[Tensor]) -> list[float]:
    """Return the Frobenius norms of tensors in float64, safe from overflow; nan for one that is not finite.

    Examples
    --------
    >>> huge = 2.0**700 * torch.tensor([3.0, -4.0], dtype=torch.float64)
    >>> norms([torch.tensor([3.0, -4.0]), torch.ones(0), torch.tensor([1.0, float("inf")])])
    [5.0, 0.0, nan]
    >>> norms([huge])[0] / 2.0**700
    5.0
    """
    return torch.stack([_norm(G).to(gradients[0].device) for G in gradients]).tolist() if gradients else []


def tally(group: Collectives, rows: Sequence[Sequence[float]]) -> Float64[Tensor, "rows columns"]:
    """Return rows of numbers, added over all ranks."""
    return group.all_reduce(torch.tensor(rows, dtype=torch.float64, device=group.device)).wait().cpu()


def clipping(norm: float, limit: float | None) -> float:
    """Return the factor that brings a gradient of a norm down to a limit; 1 if it is below.

    Examples
    --------
    >>> clipping(10.0, 2.5), clipping(1.0, 2.5), clipping(10.0, None)
    (0.25, 1.0, 1.0)
    """
    return limit / norm if limit is not None and norm > limit else 1.0


def check_limit(limit: float | None) -> None:
    """Raise ``ValueError`` unless a limit of the norm is None or a finite number above 0."""
    if limit is not None and not (isinstance(limit, Real) and 0 < limit < math.inf):
        raise ValueError(f"clip is {limit!r}, needed a finite norm above 0 or None")


def said_by_any(groups: Sequence[Collectives], said: str) -> str:
    """Return what the first rank says that says anything, on all ranks; nothing if none does.

    Parameters
    ----------
    groups : sequence of Collectives
        The axes of a grid of ranks, asked one after the other.
    said : str
        What this rank says; "" for nothing.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> from muon_lab.parallel.grid import Grid
    >>> def program(world):
    ...     groups = [world.split(Grid(dp=2, tp=2).groups(axis)) for axis in ("dp", "tp")]
    ...     return said_by_any(groups, "no" if world.rank == 2 else "")
    >>> worlds.run(program, ranks=4)
    ['no', 'no', 'no', 'no']
    """
    for group in groups:
        said = next((message for message in told(group, said.encode()) if message), b"").decode()
    return said


def all_or_none(
    groups: Sequence[Collectives],
    step: Callable[[], object],
    weights: Iterable[Tensor],
    states: Sequence[dict[Any, Any]],
) -> None:
    """Take a step that some rank may fail to take: all take it, or none.

    Until all ranks have told, a second copy of what may change is held.

    Parameters
    ----------
    groups : sequence of Collectives
        Whose ranks all do this: the axes of a grid of ranks.
    step : callable
        Takes the step of this rank.
    weights : iterable of tensor
        What the step may change.
    states : sequence of dict
        The states of optimizers by parameter, which it may change too.

    Raises
    ------
    Exception
        On the rank whose step raised it.
    ValueError
        On all other ranks, with the reason.
    """
    kept = [(weight, weight.detach().clone()) for weight in weights]
    before = [
        {key: {name: _copy(v) for name, v in state[key].items()} for key, _ in kept if key in state} for state in states
    ]
    error: Exception | None = None
    try:
        step()
    except Exception as caught:
        error = caught
    rank = groups[0].ranks[groups[0].rank]
    mine = f"rank {rank} could not take its step, so no rank did: {type(error).__name__}: {error}" if error else ""
    if not (reason := said_by_any(groups, mine)):
        return
    with torch.no_grad():
        for weight, old in kept:
            weight.copy_(old)
    for state, old_state in zip(states, before, strict=True):
        for key, _ in kept:
            state.pop(key, None)
        state.update(old_state)
    if error is not None:
        raise error
    raise ValueError(reason)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _norm(G: Tensor) -> Float64[Tensor, ""]:
    if not G.numel():
        return torch.zeros((), dtype=torch.float64, device=G.device)
    low, high = torch.aminmax(G.detach())
    largest = torch.maximum(-low, high).to(torch.float64)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)  # a power of 2: nothing is rounded
    size = unit * torch.linalg.vector_norm(G.detach().to(torch.float64) / unit)
    return torch.where(largest == 0, 0.0, torch.where(largest.isfinite(), size, torch.nan))
