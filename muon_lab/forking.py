"""Processes that are forked by a server, and what Ctrl-C does meanwhile.

A terminal sends Ctrl-C to all processes of a command. The one that began them must live to end the others; one that is
still starting would print a traceback; and one that is interrupted while it starts another leaves an orphan behind.
"""

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any


def server(preload: Sequence[str]) -> Any:
    """Return the context of processes that are forked by a server with these modules loaded.

    In a command of the lab (`python -m muon_lab.sweep`), which owns all its processes, the server starts now, and so
    that Ctrl-C reaches none of the processes that it ever forks. Elsewhere it starts with its first process, and as
    `multiprocessing` has it: the lab has no say in the processes of its caller, who shares the server.

    Parameters
    ----------
    preload : sequence of str
        Modules that the server imports when it starts. There is one server a process: if it runs, it stays what it is.

    Returns
    -------
    multiprocessing context
        Whose `Process` starts in milliseconds.

    Examples
    --------
    >>> server(["numpy"]).get_start_method()
    'forkserver'
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    if _own_command():
        resource_tracker.ensure_running()  # it unblocks the signal when it starts, so it comes first
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _own_command() -> bool:
    """Return whether this process was started as a command of the lab."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] == __package__


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and a request to end until the block is through.

    Examples
    --------
    >>> with contextlib.suppress(KeyboardInterrupt), uninterrupted():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("through")
    through
    """
    if threading.current_thread() is not threading.main_thread():  # no other one is ever interrupted
        yield
        return
    came = list[int]()
    held = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda number, frame: came.append(number)) for each in held}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came[:1]:
            signal.raise_signal(number)
