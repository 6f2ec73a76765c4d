"""Where cases run: in this process, in a pool of fork-server workers, or on a Dask cluster.

A case is a pure function of a dictionary, so all three are `concurrent.futures.Executor`s behind one `submit`. Every
case runs with one thread (or as many as its `threads` axis says), because the bits of an SVD depend on the number.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from muon_lab import forking
from muon_lab.studies.running import run_case, threads

__all__ = ["BrokenExecutor", "Serial", "cluster", "cores", "local", "provenance_here", "run_case", "stream", "threads"]

#: What workers need, imported once by the fork server and inherited by all of them.
PRELOAD = (
    "torch",
    "scipy.linalg",
    "threadpoolctl",
    "muon_lab.measure.polar",
    "muon_lab.parallel.layouts",
    "muon_lab.polar.direct",
    "muon_lab.problems.planted",
    "muon_lab.problems.streams",
    "muon_lab.studies.blockwise",
    "muon_lab.studies.orthogonalization",
)


def provenance_here() -> dict[str, Any]:
    """Return under what cases are measured in this process."""
    from muon_lab.sweep import provenance

    with threads(1):
        return provenance.measured()


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Serial(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call and return its finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Workers(ProcessPoolExecutor):
    """A pool whose workers are started whole: an interrupt would leave one behind that nobody knows of."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call and return its future; Ctrl-C comes through when the worker that may have started is there."""
        with forking.uninterrupted():
            return super().submit(fn, *args, **kwargs)


@contextlib.contextmanager
def local(jobs: int) -> Iterator[Executor]:
    """Run in this process if one job is asked for, else in so many workers, which end with this process."""
    if jobs == 1:
        yield Serial()
        return
    pool = Workers(jobs, mp_context=_context(), initializer=_start_worker)
    try:
        yield pool
    except BaseException:  # a case may run for hours: end it now, the log has all that finished
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    if "forkserver" in multiprocessing.get_all_start_methods():
        return forking.server(PRELOAD)
    return multiprocessing.get_context("spawn")  # Windows


@contextlib.contextmanager
def cluster(address: str) -> Iterator[Executor]:
    """Run on a Dask cluster whose workers have muon_lab installed.

    Raises
    ------
    ValueError
        If `distributed` is not installed or the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ValueError("--cluster needs Dask: pip install -e '.[cluster]' adds it") from error
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {address!r}: {error}") from error
    with client, client.get_executor(pure=False) as executor:
        yield executor


def stream(executor: Executor, function: Callable[..., Any], items: Iterable[Any], window: int) -> Iterator[Any]:
    """Yield results as they come, with at most so many calls under way.

    Examples
    --------
    >>> list(stream(Serial(), abs, [-1, 2, -3], window=1))
    [1, 2, 3]
    """
    queue, pending = iter(items), set[Future[Any]]()
    while True:
        for item in queue:
            pending.add(
                executor.submit(function, *item) if isinstance(item, tuple) else executor.submit(function, item)
            )
            if len(pending) >= window:
                break
        if not pending:
            return
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when the parent does, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    wait_for_any([sentinel])
    os._exit(1)
