"""The process of one rank: it joins its world, runs what it is told to, and ends with whoever started it."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muon_lab.parallel.journal import Board, Group, Journal
from muon_lab.parallel.process_groups import PATIENCE, Grouped
from muon_lab.parallel.worlds import by_value
from muon_lab.parallel.worlds.running import Outcome, failure, outcome, single_threaded

#: The signal at which a rank writes down where it is.
WHERE = signal.SIGUSR1


def serve(pipe: Connection, backend: str, rank: int, ranks: int, folder: str) -> None:
    """Join a world and run one function after another, until the pipe closes.

    Everything but a few bytes goes through files of the world's folder: nobody ever waits for half a message.
    """
    _part_of_nothing_but(folder)
    home = Path(folder)
    with (home / f"stack.{rank}").open("w") as stack:
        faulthandler.register(WHERE, file=stack)
        single_threaded()
        join(backend, _store(home, ranks), rank, ranks, local_rank=rank)
        board, cache = Board(home / "board", ranks), dict[Group, Any]()
        pipe.send_bytes(b"ready")
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, checked = pickle.loads(pipe.recv_bytes())
                journal = Journal(rank, board)
                result = _run(home / f"function.{number}", journal, checked, device(backend), cache)
                (home / f"outcome.{number}.{rank}").write_bytes(result)
                pipe.send_bytes(b"done")
    _end()


def join(backend: str, store: Any, rank: int, ranks: int, local_rank: int) -> None:
    """Become a rank of the default process group: in a store of this machine, or where the environment says."""
    where: dict[str, Any] = {"store": store, "rank": rank, "world_size": ranks, "timeout": PATIENCE}
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
        where["device_id"] = torch.device("cuda", local_rank)
    elif store is not None and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here, whatever the host's name resolves to
    dist.init_process_group(backend, **where)


def _store(home: Path, ranks: int) -> Any:
    return dist.FileStore(str(home / "store"), ranks)  # type: ignore[attr-defined]


def device(backend: str) -> torch.device:
    """Return where tensors of a rank that has joined live."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _run(path: Path, journal: Journal, checked: bool, where: torch.device, cache: dict[Group, Any]) -> bytes:
    try:
        fn = by_value.loads(path.read_bytes())
    except Exception as error:
        missing = ValueError(
            f"a process of its own cannot load the function: {error}; it needs one of a module's top level"
        )
        return _pickled(failure(missing, journal))
    world = Grouped(dist.group.WORLD, journal, checked=checked, device=where, cache=cache)
    return _pickled(outcome(fn, world, journal))


def _pickled(result: Outcome) -> bytes:
    """Pickle an outcome, or that it cannot be."""
    try:
        pickle.loads(pickle.dumps(result.error))
    except Exception:
        result.error = None  # its traceback is text
    try:
        return by_value.dumps(result)
    except Exception as error:
        what = f"what the function returned, a {type(result.value).__name__}, cannot be pickled: {error}"
        text = f"ValueError: {what}"
        return by_value.dumps(Outcome(None, ValueError(what), text, standing=result.standing))


def _part_of_nothing_but(folder: str) -> None:
    """Lead an own process group, leave Ctrl-C to the caller, and end when it does, however it ends."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel, folder), daemon=True).start()


def _follow(sentinel: int, folder: str) -> None:
    wait([sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    _end()


def _end() -> None:
    """End this process and all that it started."""
    os.killpg(0, signal.SIGKILL)
