"""What a rank asks of its group, as pure data: compared across ranks, counted by ledgers, priced without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

#: Bytes of an entry, by the name of the dtype in torch.
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")

#: What each reduction is defined on. What every backend reduces, and no more: others are moved, as bytes.
REDUCTIONS: Mapping[str, tuple[str, ...]] = {
    "sum": FLOATS + INTEGERS,
    "mean": FLOATS,
    "max": FLOATS + INTEGERS,
    "min": FLOATS + INTEGERS,
}


class Mismatch(ValueError):
    """Ranks of one group asked for different things."""


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Parameters
    ----------
    verb : str
        Name of the collective.
    size : int
        Number of ranks in the group.
    dtype : str
        Name in torch, "" for a barrier.
    shape : tuple of int
        Shape of one row where rows are counted, else of the whole tensor.
    rows : tuple of int
        Rows that each rank puts in (`all_gather_v`), keeps (`reduce_scatter`) or is sent by this rank (`all_to_all`);
        one for each rank in `all_gather`, and one in all for `all_reduce` and `broadcast`.
    op : str
        The reduction, "" if nothing is reduced.
    root : int
        The place in the group that a broadcast comes from.
    received : tuple of int
        Rows that this rank is sent by each rank (`all_to_all`).

    Examples
    --------
    >>> call = all_gather_v((1024,), "float32", sizes=(3, 0, 1), rank=2)
    >>> call.parts, call.logical(rank=2), str(call)
    ((12288, 0, 4096), 4096, 'all_gather_v of float32 rows (1024,), 3+0+1 of them')
    """

    verb: str
    size: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    op: str = ""
    root: int = 0
    received: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an entry."""
        return ITEMSIZE[self.dtype] if self.dtype else 0

    @property
    def elements(self) -> int:
        """Entries of one row."""
        return prod(self.shape)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of the rows of each rank."""
        row = self.elements * self.itemsize
        return tuple(rows * row for rows in self.rows)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The places of each group (`split`)."""
        ends = tuple(accumulate(self.rows))
        return tuple(self.shape[end - length : end] for end, length in zip(ends, self.rows, strict=True))

    def logical(self, rank: int) -> int:
        """Return the bytes of the tensor that the rank in a place of the group hands over."""
        return self.parts[rank] if self.verb in ("all_gather", "all_gather_v") else sum(self.parts)

    @property
    def agreed(self) -> tuple[object, ...]:
        """What must be the same on every rank of the group."""
        rows = () if self.verb == "all_to_all" else self.rows
        return (self.verb, self.size, self.dtype, self.shape, rows, self.op, self.root)

    def __str__(self) -> str:
        if self.verb == "split":
            return f"split into {', '.join(map(str, self.groups))}"
        what = f" of {self.dtype} " if self.dtype else ""
        if self.verb in ("all_gather_v", "reduce_scatter"):
            what += f"rows {self.shape}, {'+'.join(map(str, self.rows))} of them"
        elif self.verb == "all_to_all":
            what += f"rows {self.shape}"
        elif self.dtype:
            what += f"{self.shape}"
        return self.verb + (f"({self.op})" if self.op else "") + what + (f" from {self.root}" if self.root else "")


def barrier(size: int) -> Call:
    """Wait for each other, and carry nothing."""
    return Call("barrier", size)


def split(groups: Sequence[Sequence[int]], size: int) -> Call:
    """Form subgroups, and carry nothing.

    Raises
    ------
    ValueError
        If the groups are no partition of all places, each in ascending order.

    Examples
    --------
    >>> str(split([[0, 2], [1, 3]], size=4))
    'split into (0, 2), (1, 3)'
    """
    places = tuple(place for group in groups for place in group)
    if sorted(places) != list(range(size)) or any(sorted(group) != list(group) or not group for group in groups):
        raise ValueError(
            f"groups must hold each of the places 0..{size - 1} once, in ascending order, but are "
            f"{tuple(map(tuple, groups))}"
        )
    return Call("split", size, shape=places, rows=tuple(len(group) for group in groups))


def all_reduce(shape: Sequence[int], dtype: str, size: int, op: str = "sum") -> Call:
    """Combine equal tensors, for everyone."""
    _reducible("all_reduce", dtype, op)
    return Call("all_reduce", size, _known(dtype), tuple(shape), (1,), op)


def broadcast(shape: Sequence[int], dtype: str, size: int, root: int = 0) -> Call:
    """Send a tensor of one rank to everyone.

    Raises
    ------
    ValueError
        If there is no such root.
    """
    if not 0 <= root < size:
        raise ValueError(f"root of a broadcast among {size} ranks must lie in 0..{size - 1}, not be {root}")
    return Call("broadcast", size, _known(dtype), tuple(shape), (1,), root=root)


def all_gather(shape: Sequence[int], dtype: str, size: int) -> Call:
    """Collect equal tensors, for everyone."""
    return Call("all_gather", size, _known(dtype), tuple(shape), (1,) * size)


def all_gather_v(row: Sequence[int], dtype: str, sizes: Sequence[int], rank: int, have: int | None = None) -> Call:
    """Collect rows, of each rank as many as agreed, for everyone.

    Raises
    ------
    ValueError
        If this rank has another number of rows than agreed.
    """
    call = Call("all_gather_v", len(sizes), _known(dtype), tuple(row), _counts("all_gather_v", sizes))
    if have is not None and have != sizes[rank]:
        raise ValueError(f"all_gather_v with sizes {tuple(sizes)} needs {sizes[rank]} rows of rank {rank}, not {have}")
    return call


def reduce_scatter(
    row: Sequence[int], dtype: str, sizes: Sequence[int], have: int | None = None, op: str = "sum"
) -> Call:
    """Combine equal tensors and keep, on each rank, its own rows.

    Raises
    ------
    ValueError
        If the tensor has another number of rows than are kept.
    """
    _reducible("reduce_scatter", dtype, op)
    call = Call("reduce_scatter", len(sizes), _known(dtype), tuple(row), _counts("reduce_scatter", sizes), op)
    if have is not None and have != sum(sizes):
        raise ValueError(f"reduce_scatter with sizes {tuple(sizes)} needs {sum(sizes)} rows, not {have}")
    return call


def all_to_all(
    row: Sequence[int], dtype: str, sent: Sequence[int], received: Sequence[int], have: int | None = None
) -> Call:
    """Send to each rank its own rows, and get rows from each.

    Raises
    ------
    ValueError
        If the tensor has another number of rows than are sent, or the two lists are for different numbers of ranks.
    """
    rows, back = _counts("all_to_all", sent), _counts("all_to_all", received)
    if len(rows) != len(back):
        raise ValueError(f"all_to_all needs a count a rank to send and to receive, but got {sent} and {received}")
    if have is not None and have != sum(rows):
        raise ValueError(f"all_to_all that sends {rows} rows needs {sum(rows)} of them, not {have}")
    return Call("all_to_all", len(rows), _known(dtype), tuple(row), rows, received=back)


def disagreement(calls: Mapping[int, str]) -> str:
    """Return the sentence that says which ranks asked for what.

    Examples
    --------
    >>> disagreement({0: "all_gather", 1: "broadcast", 2: "all_gather"})
    'all ranks of a group must make the same call, but ranks 0, 2 made all_gather; rank 1 made broadcast'
    """
    made: dict[str, list[int]] = {}
    for rank, call in calls.items():
        made.setdefault(call, []).append(rank)
    who = "; ".join(f"{named(ranks)} made {call}" for call, ranks in made.items())
    return f"all ranks of a group must make the same call, but {who}"


def exchanged(sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Refuse an all_to_all in which a rank is sent other numbers of rows than it expects.

    Raises
    ------
    Mismatch
        That names the first such pair.
    """
    for source, rows in enumerate(sent):
        for target, count in enumerate(rows):
            if received[target][source] != count:
                raise Mismatch(
                    f"in all_to_all rank {ranks[source]} sends {count} rows to rank {ranks[target]}, which expects "
                    f"{received[target][source]}"
                )


def named(ranks: Sequence[int]) -> str:
    """Name ranks.

    Examples
    --------
    >>> named([2]), named([0, 1])
    ('rank 2', 'ranks 0, 1')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _known(dtype: str) -> str:
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype of a collective must be one of {', '.join(ITEMSIZE)}, not {dtype}")
    return dtype


def _reducible(verb: str, dtype: str, op: str) -> None:
    if op not in REDUCTIONS:
        raise ValueError(f"op of {verb} must be one of {', '.join(REDUCTIONS)}, not {op!r}")
    if dtype not in REDUCTIONS[op]:
        raise ValueError(
            f"{verb} cannot take the {op} of {dtype}, only of {', '.join(REDUCTIONS[op])}: decode, reduce and encode"
        )


def _counts(verb: str, counts: Sequence[int]) -> tuple[int, ...]:
    if not counts or min(counts) < 0:
        raise ValueError(f"{verb} needs one non-negative number of rows a rank, not {tuple(counts)}")
    return tuple(int(count) for count in counts)
