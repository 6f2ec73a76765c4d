"""Under `torchrun`, where the ranks are there already: this process is one of them."""

import atexit
import faulthandler
import gc
import os
from typing import Any

import torch
import torch.distributed as dist

from muon_lab.parallel.journal import Journal
from muon_lab.parallel.process_groups import Grouped
from muon_lab.parallel.worlds import worker
from muon_lab.parallel.worlds.running import Function, as_before, outcome, single_threaded, values


def detected() -> bool:
    """Whether the environment names a rank, the number of ranks and where they meet."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(fn: Function, ranks: int, backend: str, timeout: float, checked: bool) -> list[Any]:
    """Run a function as the rank that this process is, and return the results of all ranks, on every rank.

    A rank that raises or takes too long ends with an error, upon which `torchrun` ends the others.

    Raises
    ------
    ValueError
        If other than the number of ranks that there are is asked for.
    RankRaised
        On the rank that raised.
    """
    rank, present = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != present:
        raise ValueError(f"{ranks} ranks were asked for, but the environment (torchrun) has WORLD_SIZE={present}")
    threads = torch.get_num_threads()
    single_threaded()
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        if not dist.is_initialized():
            worker.join(backend, None, rank, ranks, int(os.environ.get("LOCAL_RANK", rank)))
            atexit.register(_leave)
        journal = Journal(rank)
        world = Grouped(dist.group.WORLD, journal, checked=checked, device=worker.device(backend))
        (mine,) = values({rank: outcome(fn, world, journal)})
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, mine)
        return everyones
    finally:
        faulthandler.cancel_dump_traceback_later()
        as_before(threads)


def _leave() -> None:
    """Free the process groups and so end their threads: one that frees a tensor while Python ends aborts it."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
