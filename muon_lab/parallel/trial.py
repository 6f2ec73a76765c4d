"""Every tensor-parallel layout once, on ranks that are there: what it sends, how long it takes, how near it comes.

``python -m muon_lab.parallel`` starts ranks of its own; under ``torchrun`` this process is one of those that exist.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from muon_lab import polar
from muon_lab.oracle.polar import polar as exact
from muon_lab.parallel import grid, layouts, namespaces, volume, worlds
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement
from muon_lab.parallel.ledger import Ledger


@dataclass(frozen=True)
class Trial:
    """What is tried: one Gaussian float32 matrix, cut evenly, and a schedule.

    Raises
    ------
    ValueError
        For a size or number below 1, or an unknown schedule.
    """

    rows: int = 1024
    cols: int = 256
    dim: int = 0
    schedule: str = "quintic"
    steps: int = 5
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        polar.schedules.get(self.schedule, self.steps)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.cols

    def placement(self, ranks: int) -> Placement:
        """Return the cut over so many ranks."""
        return grid.even(self.shape[self.dim], ranks, self.dim)


@dataclass(frozen=True)
class Found:
    """What a layout did on one rank: calls and bytes in one update, median seconds, distances over the whole matrix.

    `asked` are the bytes that the closed form has for this rank; `apart` is the distance to the result of one rank and
    `error` that to the exact polar factor, relative to its norm; `bit_equal` compares with one rank.
    """

    calls: int
    sent: int
    asked: int
    seconds: float
    apart: float
    error: float
    bit_equal: bool


#: From a rank's shards of equal matrices to those of the updates.
Update = Callable[[Sequence[Tensor]], list[Tensor]]
Made = Callable[[Collectives, Placement], Update]


def made(trial: Trial) -> Mapping[str, Made]:
    """Return what makes each layout on a rank.

    Matrices are dealt round to their owners, the first rank first, and come and go together; elsewhere one is
    orthogonalized after another.
    """
    schedule = polar.schedules.get(trial.schedule, trial.steps)
    orthogonalize = polar.newton_schulz(schedule)

    def owner(world: Collectives, placement: Placement) -> Update:
        return lambda shards: layouts.owner(orthogonalize, world, [placement] * len(shards))(shards)

    def each(layout: Callable[[Collectives, Placement], polar.Orthogonalizer]) -> Made:
        def make(world: Collectives, placement: Placement) -> Update:
            update = layout(world, placement)
            return lambda shards: [update(shard) for shard in shards]

        return make

    return {
        "duplicated": each(partial(layouts.duplicated, orthogonalize)),
        "owner": owner,
        "distributed": each(partial(layouts.distributed, schedule)),
        "gram": each(partial(layouts.gram, schedule)),
        "blockwise": each(partial(layouts.blockwise, orthogonalize)),
    }


def asked(layout: str, trial: Trial, placement: Placement, rank: int, algorithm: str) -> int:
    """Return the bytes that the closed form has for a rank."""
    if layout == "owner":
        calls = volume.owner([trial.shape], [placement], rank)
    else:
        extra = {"steps": trial.steps} if layout == "distributed" else {}
        calls = getattr(volume, layout)(trial.shape, placement, rank, **extra)
    return volume.Volume(calls, rank, algorithm).sent


def program(trial: Trial, algorithm: str, world: Collectives) -> dict[str, Found]:
    """Try every layout on a rank; every rank has the whole matrix to compare with."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(trial.shape, generator=generator).to(world.device)
    placement = trial.placement(world.size)
    single = polar.newton_schulz(polar.schedules.get(trial.schedule, trial.steps))(G)
    truth = torch.from_numpy(exact(G.double().cpu().numpy()).U).to(G.device)
    shard, mine, true = (placement.shard(X, world.rank) for X in (G, single, truth))
    found = {}
    for name, make in made(trial).items():
        ledger = Ledger(world, algorithm)
        (update,) = make(ledger, placement)([shard])
        again = partial(make(world, placement), [shard])
        seconds = sorted(_seconds(again, world) for _ in range(trial.repeats))[trial.repeats // 2]
        squares = torch.stack([(update - mine).double().square().sum(), (update.double() - true).square().sum()])
        apart, error = (world.all_reduce(squares).wait().sqrt() / truth.norm()).tolist()
        equal = world.all_reduce(torch.tensor(float(torch.equal(update, mine)), device=G.device)).wait()
        found[name] = Found(
            ledger.calls,
            ledger.sent_bytes,
            asked(name, trial, placement, world.rank, algorithm),
            seconds,
            apart,
            error,
            int(equal) == world.size,
        )
    return found


def run(trial: Trial, ranks: int, backend: str) -> list[dict[str, Found]]:
    """Return what every rank found.

    Examples
    --------
    >>> found = run(Trial(64, 16, repeats=1), ranks=2, backend="threads")
    >>> [(name, each.sent == each.asked, each.bit_equal) for name, each in found[1].items()][:2]
    [('duplicated', True, True), ('owner', True, True)]
    >>> [found[1]["blockwise"].sent, found[1]["gram"].sent]
    [0, 1024]
    """
    algorithm = "gloo" if backend == "gloo" else "ring"
    return worlds.run(partial(program, trial, algorithm), ranks, backend, timeout=600.0)


#: What takes turns with the layouts: short sums and a long one, and products like those of an update.
MESSAGES, TRANSFER, PRODUCTS = "messages", "transfer", "products"

#: How many short sums of 4 bytes there are, one after the other; entries of the long one.
SHORT, LONG = 16, 2**20


def turns(trial: Trial, matrices: int, megabits: float | int, world: Collectives) -> dict[str, list[float]]:
    r"""Return the seconds of every layout on a rank, round by round, for an update of equal matrices.

    The layouts take turns, and with them what a prediction needs from the same ranks at the same time: `MESSAGES`, 16
    all_reduces of 4 bytes; `TRANSFER`, one of 4 MiB; `PRODUCTS`, by all ranks at once, :math:`C D` with the short side
    k and the long one s of the matrix, :math:`2 k^2 s` flops each, `products` of them. All ranks begin together, by a
    barrier that doesn't use the link. One round before the measured ones isn't told.

    Parameters
    ----------
    trial : Trial
        The matrix, the schedule and the number of rounds.
    matrices : int
        How many there are.
    megabits : float
        Rate of each rank's link both ways in 10⁶ bits a second (`namespaces.limited`); 0 for the links of the world.
    world : Collectives
        All ranks; unless it is unchecked, calls take longer.

    Examples
    --------
    >>> found = worlds.run(partial(turns, Trial(16, 8, repeats=3), 2, 0), ranks=2)
    >>> len(found), {len(seconds) for seconds in found[0].values()}
    (2, {3})
    >>> list(found[0])
    ['duplicated', 'owner', 'distributed', 'gram', 'blockwise', 'messages', 'transfer', 'products']
    """
    placement, generator = trial.placement(world.size), torch.Generator().manual_seed(0)
    wholes = torch.randn((matrices, *trial.shape), generator=generator).to(world.device)
    shards = [placement.shard(whole, world.rank).contiguous() for whole in wholes]
    short, long = sorted(trial.shape)
    C, D = (torch.randn((short, side), generator=generator).to(world.device) for side in (short, long))
    out = torch.empty_like(D)
    with namespaces.limited(world, megabits) if megabits else nullcontext(world) as linked:
        tasks: dict[str, Callable[[], object]] = {
            name: partial(make(linked, placement), shards) for name, make in made(trial).items()
        }
        tasks[MESSAGES] = lambda: [linked.all_reduce(torch.ones((), device=world.device)).wait() for _ in range(SHORT)]
        tasks[TRANSFER] = lambda: linked.all_reduce(torch.ones(LONG, device=world.device)).wait()
        tasks[PRODUCTS] = lambda: [torch.mm(C, D, out=out) for _ in range(products(trial))]
        rounds = [{name: _seconds(task, world) for name, task in tasks.items()} for _ in range(trial.repeats + 1)]
    return {name: [each[name] for each in rounds[1:]] for name in tasks}


def products(trial: Trial) -> int:
    """Return how many products of two sides of a matrix are timed: about as much work as its update on one rank.

    Examples
    --------
    >>> products(Trial(256, 256, steps=5)), products(Trial(4096, 256, steps=5))
    (15, 10)
    """
    short, long = sorted(trial.shape)
    return max(1, round(trial.steps * (2 + short / long)))


def _seconds(task: Callable[[], object], world: Collectives) -> float:
    """Return how long a task takes, all ranks beginning together."""
    world.barrier().wait()
    begun = time.perf_counter()
    task()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - begun
