r"""A slow link for real: ranks in network namespaces of their own, and a token bucket on each cable between them.

Each rank leaves for a new namespace. That of the first has a bridge; from each rank a pair of virtual Ethernet devices
leads there, with the rate limited at both ends, so that every rank has one link of that rate each way. The group that
talks over it is a new one; that of the world keeps its sockets where they are. Nothing outlives the processes.

Needs Linux, root, and `ip` and `tc` (Debian's iproute2). The kernel of the machine need not be able to delay packets:
latency is what `links.SimulatedLink` is for.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.process_groups import PATIENCE, Grouped

#: Of the kernel's `unshare` and `setns` (linux/sched.h).
CLONE_NEWNET = 0x40000000

#: Where addresses of ranks come from; nobody outside the namespaces sees them.
NETWORK = "10.77.0"

#: Bytes that may leave at once after a pause: at 200 Mbit/s the bucket fills in 10 ms.
BURST = 256 * 1024

#: How long a packet may queue before it is dropped: longer than TCP lets queues grow.
QUEUE = "200ms"


def unavailable() -> str:
    """Return why there can be no such link here, or "" if there can.

    Examples
    --------
    >>> isinstance(unavailable(), str)
    True
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2, util-linux) not found"
    probe = "ip link add dev a type veth peer name b && tc qdisc add dev a root tbf rate 1mbit burst 4kb latency 1ms"
    done = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True)
    return f"the kernel refuses: {done.stderr.strip()}" if done.returncode else ""


@contextmanager
def limited(world: Collectives, megabits: float | int) -> Iterator[Grouped]:
    """Give a group of the ranks of a world whose messages cross links of a rate; all ranks do this together.

    Parameters
    ----------
    world : Collectives
        All ranks of a world of processes over gloo, on one machine.
    megabits : float
        Rate of each rank's link each way, in 10⁶ bits a second. Below 1000 the link is slower than two cores are.

    Yields
    ------
    Grouped
        The same ranks; its calls are not compared before they are made, which would cost round trips.

    Raises
    ------
    ValueError
        If the rate is not above 0, or the caller is not the main thread of a process with the whole world's group.
    RuntimeError
        If a command fails; its message is in the text.
    """
    if not megabits > 0:
        raise ValueError(f"megabits of a link is {megabits!r}, needed a rate above 0")
    if threading.current_thread() is not threading.main_thread() or not dist.is_initialized():
        raise ValueError("a limited link needs ranks that are processes, needed backend='gloo'")
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    group = None
    try:
        _kernel("unshare", CLONE_NEWNET)
        pids = world.all_gather(torch.tensor(os.getpid())).wait().tolist()
        if world.rank == 0:
            _cables(pids, megabits)
        world.barrier().wait()
        _own_end(world.rank, megabits)
        world.barrier().wait()
        group = _group(world)
        yield Grouped(group, checked=False)
        world.barrier().wait()
    finally:
        if group is not None:
            dist.destroy_process_group(group)
        _kernel("setns", home, CLONE_NEWNET)
        os.close(home)


def _cables(pids: list[int], megabits: float | int) -> None:
    """Make the bridge here, and a cable from each rank to it."""
    _run("ip link add dev switch type bridge")
    _run("ip link set dev switch up")
    for rank, pid in enumerate(pids):
        away = f" netns {pid}" if rank else ""
        _run(f"ip link add dev port{rank} type veth peer name cable{away}")
        _run(f"ip link set dev port{rank} master switch up")
        _limit(f"port{rank}", megabits)


def _own_end(rank: int, megabits: float | int) -> None:
    """Give the own end of the cable an address and a rate."""
    _run("ip link set lo up")
    _run(f"ip address add {NETWORK}.{rank + 1}/24 dev cable")
    _run("ip link set dev cable up")
    _limit("cable", megabits)


def _limit(device: str, megabits: float | int) -> None:
    _run(f"tc qdisc add dev {device} root tbf rate {round(megabits * 1000)}kbit burst {BURST}b latency {QUEUE}")


def _group(world: Collectives) -> dist.ProcessGroup:
    """Form a process group whose sockets are on the own end of the cable.

    Its name has to be new: one that an earlier group had would find the addresses of that one.
    """
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = "cable"
    try:
        return dist.new_group(list(world.ranks), timeout=PATIENCE, backend="gloo")
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command!r} failed: {done.stderr.strip()}")


def _kernel(name: str, *arguments: int) -> None:
    """Call the kernel on behalf of this thread."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise RuntimeError(f"{name} failed: {os.strerror(ctypes.get_errno())}")


def bridge_exists() -> bool:
    """Say whether the namespace of this thread has the bridge: it has not, once `limited` is left."""
    return any(name == "switch" for _, name in socket.if_nameindex())
