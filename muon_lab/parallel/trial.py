"""Every tensor-parallel layout once, on ranks that are there: what it sends, how long it takes, how near it comes.

``python -m muon_lab.parallel`` starts ranks of its own; under ``torchrun`` this process is one of those that exist.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from muon_lab import polar
from muon_lab.oracle.polar import polar as exact
from muon_lab.parallel import grid, layouts, volume, worlds
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


Made = Callable[[Collectives, Placement], Callable[[Tensor], Tensor]]


def made(trial: Trial) -> Mapping[str, Made]:
    """Return what makes each layout on a rank."""
    schedule = polar.schedules.get(trial.schedule, trial.steps)
    orthogonalize = polar.newton_schulz(schedule)

    def owner(world: Collectives, placement: Placement) -> Callable[[Tensor], Tensor]:
        update = layouts.owner(orthogonalize, world, [placement], owners=[0])
        return lambda shard: update([shard])[0]

    return {
        "duplicated": partial(layouts.duplicated, orthogonalize),
        "owner": owner,
        "distributed": lambda world, placement: layouts.distributed(schedule, world, placement),
        "gram": lambda world, placement: layouts.gram(schedule, world, placement),
        "blockwise": lambda world, placement: layouts.blockwise(orthogonalize, world, placement),
    }


def asked(layout: str, trial: Trial, placement: Placement, rank: int, algorithm: str) -> int:
    """Return the bytes that the closed form has for a rank."""
    if layout == "owner":
        calls = volume.owner([trial.shape], [placement], rank, owners=[0])
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
        update = make(ledger, placement)(shard)
        seconds = _median_seconds(make(world, placement), shard, world, trial.repeats)
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


def _median_seconds(update: Callable[[Tensor], Tensor], shard: Tensor, world: Collectives, repeats: int) -> float:
    """Return how long an update takes, all ranks beginning together."""
    seconds = []
    for _ in range(repeats):
        world.barrier().wait()
        begun = time.perf_counter()
        update(shard)
        if shard.is_cuda:
            torch.cuda.synchronize(shard.device)
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[len(seconds) // 2]
