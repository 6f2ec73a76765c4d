"""Ranks as processes, forked by a server that has torch loaded, and kept for the next run.

Loading torch takes seconds, forking a process that has it milliseconds. The server is that of `multiprocessing`: one
for each calling process, started when it is first needed. A world is kept after a run that ended well, and used again
by the next one of the same size; after any other run its processes are killed: who knows what is left in its sockets.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from muon_lab import forking
from muon_lab.parallel.calls import named
from muon_lab.parallel.journal import Board, Standing, standstill, uneven
from muon_lab.parallel.worlds import by_value, worker
from muon_lab.parallel.worlds.failures import RankDied, RankStuck, WorldFailed, overdue
from muon_lab.parallel.worlds.running import GRACE, Function, Outcome, values

#: What ranks need, loaded once by the fork server and inherited by all of them. The compiler is there because the first
#: optimizer of a process loads it.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "muon_lab.parallel.worlds.worker",
    "muon_lab.parallel.layouts",
    "muon_lab.parallel.replicas.layerwise",
    "muon_lab.optim",
)

#: Seconds that a world may take to start: loading torch on a busy machine is most of it.
START = 180.0

#: Seconds between two looks at whether a world stands still.
LOOK = 0.1

#: Idle worlds are kept as long as they have no more ranks than this together.
IDLE_RANKS = 16


class World:
    """Processes that have joined one process group.

    Parameters
    ----------
    backend : {"gloo", "nccl"}
        Of `torch.distributed`.
    ranks : int
        Number of processes.

    Raises
    ------
    WorldFailed
        If a process ends, or is not ready in time.
    """

    def __init__(self, backend: str, ranks: int) -> None:
        self.backend, self.ranks = backend, ranks
        self._runs = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        with forking.uninterrupted():  # what is to be closed at exit is there whole
            self._folder = tempfile.TemporaryDirectory(prefix="muon_lab-", ignore_cleanup_errors=True)
            self._home = Path(self._folder.name)
            self._board = Board(self._home / "board", ranks)
            self._end = Finalize(None, self.close, exitpriority=1)  # before multiprocessing ends what is left
        context = forking.server(PRELOAD)
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = (theirs, backend, rank, ranks, self._folder.name)
                process = context.Process(target=worker.serve, args=arguments, daemon=True, name=f"rank {rank}")
                self._pipes.append(ours)
                self._processes.append(process)
                with forking.uninterrupted():
                    process.start()
                theirs.close()
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether all processes are there: the pipe of one that has ended is closed before its end is reported."""
        return bool(self._pipes) and not wait_for_any(list(self._pipes), timeout=0)

    def call(self, function: bytes, timeout: float, checked: bool) -> list[Any]:
        """Run a pickled function on every rank and return the results by rank.

        Raises
        ------
        WorldFailed
            If a rank raises, dies or does not come to an end. The world is closed then.
        """
        try:
            return values(self._outcomes(function, timeout, checked))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes, with all that they have started, and wait until they are gone."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            _kill(process.pid)
        for process in started:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()
        self._end.cancel()

    def _await_start(self) -> None:
        deadline, waiting = monotonic() + START, dict(enumerate(self._pipes))
        while waiting:
            ready = wait_for_any([*waiting.values()], timeout=max(0.0, deadline - monotonic()))
            if not ready:
                raise RankStuck(tuple(waiting), f"{named(tuple(waiting))} did not start within {START:g} s")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    waiting.pop(rank).recv_bytes()
                except (EOFError, OSError):
                    hint = "a script that runs a world needs `if __name__ == '__main__':` around the call"
                    raise RankDied([rank], f"rank {rank} {self._end_of(rank)} while it started; {hint}") from None

    def _outcomes(self, function: bytes, timeout: float, checked: bool) -> dict[int, Outcome]:
        self._runs += 1
        (self._home / f"function.{self._runs}").write_bytes(function)
        for rank in range(self.ranks):
            self._board.clear(rank)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has died is found below
                pipe.send_bytes(pickle.dumps((self._runs, checked)))
        outcomes, died = self._collect(timeout)
        if died:
            ends = "; ".join(f"rank {rank} {self._end_of(rank)} before its function returned" for rank in sorted(died))
            raise RankDied(sorted(died), ends)
        if not any(result.failed for result in outcomes.values()):
            if counts := uneven([outcomes[rank].standing or Standing({}) for rank in range(self.ranks)]):
                raise WorldFailed(range(self.ranks), counts)
            (self._home / f"function.{self._runs}").unlink()
        return outcomes

    def _collect(self, timeout: float) -> tuple[dict[int, Outcome], set[int]]:
        """Wait for all ranks, or for those that end soon after one has failed."""
        outcomes: dict[int, Outcome] = {}
        died: set[int] = set()
        deadline, end_of_grace, before = monotonic() + timeout, float("inf"), list[Standing]()
        while late := [rank for rank in range(self.ranks) if rank not in outcomes and rank not in died]:
            pipes = {self._pipes[rank]: rank for rank in late}
            ready = wait_for_any(list(pipes), timeout=LOOK)
            for rank in [pipes[pipe] for pipe in ready if isinstance(pipe, Connection)]:
                try:
                    self._pipes[rank].recv_bytes()
                    outcomes[rank] = self._outcome(rank)
                    end_of_grace = min(end_of_grace, monotonic() + outcomes[rank].grace)
                except (EOFError, OSError):
                    died.add(rank)
                    end_of_grace = min(end_of_grace, monotonic() + GRACE)
            if monotonic() > end_of_grace:
                break
            if monotonic() > deadline and not ready:
                raise overdue({rank: self._board.standing(rank, False) for rank in late}, timeout, self._stacks(late))
            if not ready and end_of_grace == float("inf"):
                before = self._stands_still(outcomes, before)
        return outcomes, died

    def _outcome(self, rank: int) -> Outcome:
        """Read what a rank has left."""
        path = self._home / f"outcome.{self._runs}.{rank}"
        try:
            result: Outcome = by_value.loads(path.read_bytes())
        except Exception as error:
            return Outcome(error=error, traceback=f"what rank {rank} left cannot be loaded here: {error!r}")
        path.unlink()
        return result

    def _stands_still(self, outcomes: dict[int, Outcome], before: list[Standing]) -> list[Standing]:
        """Refuse to wait for ranks that wait for each other, and have for two looks."""
        standings = [
            (outcomes[rank].standing if rank in outcomes else None) or self._board.standing(rank, rank in outcomes)
            for rank in range(self.ranks)
        ]
        stuck = standstill(standings)
        if stuck and standings == before:
            raise RankStuck(tuple(stuck), "; ".join(stuck.values()))
        return standings

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ranks where they are."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, worker.WHERE)
        sleep(LOOK)
        return {rank: (self._home / f"stack.{rank}").read_text().strip() for rank in ranks}

    def _end_of(self, rank: int) -> str:
        """Say how a process ended."""
        self._processes[rank].join(GRACE)
        code = self._processes[rank].exitcode
        if code is None:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _kill(pid: int) -> None:
    """Kill a process and its group, or the process alone if it has not yet made one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


_idle: list[World] = []
_lock = threading.Lock()


def run(fn: Function, ranks: int, backend: str, timeout: float, checked: bool) -> list[Any]:
    """Run a function on so many processes and return the results by rank.

    Raises
    ------
    ValueError
        If the function cannot be handed to another process, or no process can be started here.
    WorldFailed
        If a rank raises, dies or does not come to an end.
    """
    try:
        function = by_value.dumps(fn)
    except Exception as error:
        raise ValueError(
            f"fn must be a function of a module's top level (or a functools.partial of one), which another process can "
            f"load, but pickling {fn!r} says: {error}"
        ) from error
    _possible(backend, ranks)
    world = _taken(backend, ranks) or World(backend, ranks)
    results = world.call(function, timeout, checked)
    _keep(world)
    return results


def close() -> None:
    """End the worlds that are kept for the next run."""
    with _lock:
        worlds, _idle[:] = list(_idle), []
    for world in worlds:
        world.close()


def _possible(backend: str, ranks: int) -> None:
    import torch
    import torch.distributed as dist

    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise ValueError(f"backend {backend} needs a system that forks (Linux, macOS); backend threads runs everywhere")
    if multiprocessing.current_process().daemon:
        raise ValueError(
            f"backend {backend} cannot start ranks from a daemonic process, such as a worker of multiprocessing.Pool; "
            f"one of concurrent.futures.ProcessPoolExecutor can"
        )
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise ValueError(f"backend {backend} is not part of this build of torch ({torch.__version__})")
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"backend nccl needs one GPU a rank: {ranks} ranks were asked for, but torch sees "
            f"{torch.cuda.device_count()} GPUs"
        )


def _taken(backend: str, ranks: int) -> World | None:
    """Take an idle world whose processes are all there."""
    with _lock:
        fitting = [world for world in _idle if (world.backend, world.ranks) == (backend, ranks)]
        for world in fitting:
            _idle.remove(world)
    found = None
    for world in fitting:
        if found is None and world.alive:
            found = world
        else:
            world.close()
    return found


def _keep(world: World) -> None:
    """Keep a world, and close the oldest ones if there are too many ranks."""
    with _lock:
        _idle.append(world)
        excess = []
        while len(_idle) > 1 and sum(kept.ranks for kept in _idle) > IDLE_RANKS:
            excess.append(_idle.pop(0))
    for old in excess:
        old.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the worlds are the parent's
