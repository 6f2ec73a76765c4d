"""What ranks run in tests: functions that a process of its own can import, and what they should return."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from muon_lab.parallel import calls
from muon_lab.parallel.ledger import Ledger

# The verbs, on small whole numbers: exact in every dtype and every order of summation.


def numbers(rank, shape, dtype="float32"):
    """Return a tensor that is different on every rank."""
    count = int(torch.Size(shape).numel())
    values = (torch.arange(count) * (rank + 1) + rank) % 6
    return values.to(getattr(torch, dtype)).reshape(shape)


def sizes(ranks):
    """Rows a rank: unequal, and none for some."""
    return [(3 * rank + 2) % 4 for rank in range(ranks)]


def exchanged(ranks):
    """Rows that each rank sends to each."""
    return [[(2 * source + target) % 3 for target in range(ranks)] for source in range(ranks)]


def shaped(rank, case, ranks):
    """Return what a rank hands over in a case (verb, dtype, form)."""
    verb, dtype, form = case
    rows = {"all_gather_v": sizes(ranks)[rank], "all_to_all": sum(exchanged(ranks)[rank])}.get(verb.split(":")[0])
    if verb == "reduce_scatter:uneven":
        rows = sum(sizes(ranks))
    if rows is None:
        rows = 2 * ranks
    match form:
        case "plain":
            return numbers(rank, (rows, 3), dtype)
        case "transposed":
            return numbers(rank, (3, rows), dtype).T
        case "strided":
            return numbers(rank, (2 * rows, 5), dtype)[::2, 1:4]
        case "expanded":
            return numbers(rank, (1, 3), dtype).expand(rows, 3)
        case "empty":
            return numbers(rank, (rows, 0), dtype)
        case "no rows":
            return numbers(rank, (0, 3), dtype)
        case "scalar":
            return numbers(rank, (), dtype)


def called(world, x, case):
    verb, *detail = case[0].split(":")
    p = world.size
    match verb:
        case "all_reduce":
            return world.all_reduce(x, *detail)
        case "reduce_scatter":
            return world.reduce_scatter(x, sizes=sizes(p) if detail else None)
        case "all_gather_v":
            return world.all_gather_v(x, [0] * p if case[2] == "no rows" else sizes(p))
        case "all_to_all":
            return world.all_to_all(x, exchanged(p)[world.rank], [row[world.rank] for row in exchanged(p)])
        case "broadcast":
            return world.broadcast(x, root=p - 1)
        case _:
            return getattr(world, verb)(x)


def verbs(cases, world):
    """Return the result of each case, all begun before the first is waited for."""
    pending = [called(world, shaped(world.rank, case, world.size), case) for case in cases]
    return [call.wait() for call in pending]


def expected(case, rank, ranks):
    """Return what a rank should get, from what all hand over: no collective in sight."""
    verb, *detail = case[0].split(":")
    xs = [shaped(other, case, ranks) for other in range(ranks)]
    match verb:
        case "all_reduce":
            stacked = torch.stack([x.double() for x in xs])
            op = detail[0] if detail else "sum"
            reduced = {"sum": stacked.sum, "mean": stacked.mean, "max": stacked.amax, "min": stacked.amin}[op](0)
            return reduced.to(xs[0].dtype)
        case "reduce_scatter":
            total = torch.stack([x.double() for x in xs]).sum(0).to(xs[0].dtype)
            rows = sizes(ranks) if detail else [len(total) // ranks] * ranks
            return total[sum(rows[:rank]) : sum(rows[: rank + 1])]
        case "all_gather":
            return torch.stack([x.contiguous() for x in xs])
        case "all_gather_v":
            return torch.cat([x.contiguous() for x in xs])
        case "broadcast":
            return xs[-1].contiguous()
        case "all_to_all":
            rows = exchanged(ranks)
            begins = [sum(rows[source][:rank]) for source in range(ranks)]
            return torch.cat([xs[source][at : at + rows[source][rank]] for source, at in enumerate(begins)])
    raise AssertionError(case)


# Bits.


def gaussian(rank, elements, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + elements)
    return torch.randn(elements, generator=generator).to(getattr(torch, dtype))


def sums(cases, world):
    """Return sums whose bits depend on the order of summation."""
    results = []
    for verb, elements, dtype in cases:
        x = gaussian(world.rank, elements, dtype)
        match verb:
            case "all_reduce":
                results.append(world.all_reduce(x).wait())
            case "mean":
                results.append(world.all_reduce(x, "mean").wait())
            case "reduce_scatter":
                results.append(world.reduce_scatter(x).wait())
            case "uneven":
                rest = elements - (world.size - 1)
                results.append(world.reduce_scatter(x, sizes=[rest] + [1] * (world.size - 1)).wait())
    return results


# Groups.


def on_grid(grid, world):
    """Sum ranks along each axis, and again in groups of groups."""
    x = torch.tensor([float(world.rank)])
    along = {axis: world.split(grid.groups(axis)) for axis in ("tp", "dp", "pp")}
    single = along["tp"].split([[place] for place in range(grid.tp)])
    return (
        {axis: (group.ranks, group.rank, group.all_reduce(x).wait().item()) for axis, group in along.items()},
        (single.ranks, single.all_reduce(x).wait().item()),
    )


def twice_the_same_groups(world):
    """Two groups of the same ranks are two groups: their calls need no common order."""
    first, second = world.split([range(world.size)]), world.split([range(world.size)])
    x = torch.tensor([float(world.rank)])
    if world.rank % 2:
        a, b = first.all_reduce(x), second.all_reduce(10 * x)
    else:
        b, a = second.all_reduce(10 * x), first.all_reduce(x)
    return a.wait().item(), b.wait().item()


def different_groups(world):
    return world.split([[0, 1]] if world.rank else [[0], [1]])


# Worlds that end badly.


def pid(world):
    return os.getpid()


def threads(world):
    return torch.get_num_threads(), world.device.type


def optimizing(world):
    """Return how many modules the first optimizer of a process loads."""
    before = set(sys.modules)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return len(set(sys.modules) - before)


def raising(world):
    if world.rank == 1:
        raise KeyError("planted on rank 1")
    return world.all_reduce(torch.ones(2)).wait()


class Peculiar(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raising_peculiarly(world):
    raise Peculiar("this", "that")


def leaving(world):
    if world.rank == 1:
        sys.exit(0)
    return world.all_reduce(torch.ones(2)).wait()


def early(world):
    return None if world.rank == 1 else world.all_reduce(torch.ones(2)).wait()


def crossed(world):
    """Each waits for the other in another group."""
    groups = [world.split([range(world.size)]) for _ in range(2)]
    order = groups if world.rank else groups[::-1]
    return [group.all_reduce(torch.ones(1)).wait() for group in order]


def forgetful(world):
    world.all_reduce(torch.ones(2))


def unmatched(world):
    """A call that needs nobody else, having nothing to reduce."""
    return world.all_reduce(torch.ones(0)).wait() if world.rank == 0 else None


def stuck(home, world):
    """Rank 1 sleeps; everyone leaves its process behind in a file, and rank 1 a child of it."""
    Path(home, str(world.rank)).write_text(str(os.getpid()))
    if world.rank == 1:
        child = os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "1000"])
        Path(home, "child").write_text(str(child))
        while True:
            time.sleep(0.01)
    return world.all_reduce(torch.ones(2)).wait()


def sleeping(world):
    if world.rank == 1:
        time.sleep(1000)
    return world.all_reduce(torch.ones(2)).wait()


def dozing(world):
    while True:
        time.sleep(0.01)


def dying(how, world):
    if world.rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}[how])
    return world.all_reduce(torch.ones(2)).wait()


def unpicklable(world):
    return lambda: world


MISMATCHES = {
    "shape": lambda world: world.all_reduce(torch.ones(3 + world.rank)),
    "dtype": lambda world: world.all_reduce(torch.ones(2, dtype=torch.int32 if world.rank else torch.float32)),
    "op": lambda world: world.all_reduce(torch.ones(2), "max" if world.rank else "sum"),
    "verb": lambda world: world.all_reduce(torch.ones(2)) if world.rank else world.broadcast(torch.ones(2)),
    "root": lambda world: world.broadcast(torch.ones(2), root=world.rank),
    "sizes": lambda world: world.all_gather_v(torch.ones(1, 2), [1, 1] if world.rank else [1, 2]),
    "rows": lambda world: world.all_gather_v(torch.ones(1, 2 + world.rank), [1, 1]),
    "parts": lambda world: world.reduce_scatter(torch.ones(4), sizes=[1, 3] if world.rank else [2, 2]),
    "counts": lambda world: world.all_to_all(torch.ones(2), [1, 1], [1 + world.rank, 1]),
    "barrier": lambda world: world.barrier() if world.rank else world.all_gather(torch.ones(2)),
}


def mismatched(kind, world):
    return MISMATCHES[kind](world).wait()


REFUSED = {
    "sum of fp8": lambda world: world.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
    "sum of int16": lambda world: world.all_reduce(torch.ones(2, dtype=torch.int16)),
    "sum of bool": lambda world: world.all_reduce(torch.ones(2, dtype=torch.bool)),
    "mean of int": lambda world: world.all_reduce(torch.ones(2, dtype=torch.int32), "mean"),
    "op": lambda world: world.all_reduce(torch.ones(2), "product"),
    "own size": lambda world: world.all_gather_v(torch.ones(2, 2), [1] * world.size),
    "number of sizes": lambda world: world.all_gather_v(torch.ones(1, 2), [1] * (world.size + 1)),
    "scalar rows": lambda world: world.all_gather_v(torch.ones(()), [1] * world.size),
    "indivisible": lambda world: world.reduce_scatter(torch.ones(2 * world.size + 1)),
    "rows to keep": lambda world: world.reduce_scatter(torch.ones(5), sizes=[1] * world.size),
    "rows to send": lambda world: world.all_to_all(torch.ones(5), [1] * world.size, [1] * world.size),
    "root": lambda world: world.broadcast(torch.ones(2), root=world.size),
    "groups": lambda world: world.split([[0, 1], [1]]),
}


def refusals(world):
    """Return the message of each refusal, none of which may reach another rank."""
    messages = {}
    for kind, call in REFUSED.items():
        try:
            call(world)
        except ValueError as error:
            messages[kind] = str(error)
    world.barrier().wait()
    return messages


# What calls others start.


def caller(home):
    """A process that runs a world which never ends; interrupted, it runs another, and ends with a world to spare."""
    import tempfile
    from functools import partial

    from muon_lab.parallel import worlds

    tempfile.tempdir = home
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        worlds.run(partial(stuck, home), 3, "gloo", timeout=100)
    except KeyboardInterrupt:
        Path(home, "interrupted").write_text(" ".join(map(str, worlds.run(pid, 2, "gloo"))))


def nested(ranks):
    from muon_lab.parallel import worlds

    return worlds.run(pid, ranks, "gloo")


def rank_of_an_environment(variables, home, program, timeout):
    """One process of a world that something else has started, as torchrun does."""
    os.environ.update(variables)
    with open(f"{home}/stderr.{variables['RANK']}", "w") as errors:
        os.dup2(errors.fileno(), 2)
    from muon_lab.parallel import worlds

    results = worlds.run(program, int(variables["WORLD_SIZE"]), "gloo", timeout=timeout)
    with contextlib.suppress(ValueError):
        worlds.run(program, 99, "gloo")
        results = "99 ranks were not refused"
    Path(home, f"result.{variables['RANK']}").write_text(repr(results))


def one_too_many(world):
    """Rank 0 makes a call that rank 1, having returned, does not make."""
    return world.all_reduce(torch.ones(2)).wait() if world.rank == 0 else None


def environment_sum(world):
    return world.rank, world.all_reduce(torch.tensor(world.rank + 1.0)).wait().item()


# Counting.


class Dispatched(TorchDispatchMode):
    """Bytes of the tensors that collectives of c10d hand over, as the dispatcher of torch sees them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else the first call in every process loads the compiler, for seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append((func._opname, args))
        return func(*args, **(kwargs or {}))


def handed_over(name, args):
    """Bytes of the input of a dispatched collective."""
    index = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "alltoall_base_": 1}.get(name, 0)
    tensors = args[index] if isinstance(args[index], list | tuple) else [args[index]]
    return sum(x.numel() * x.element_size() for x in tensors)


def counted(cases, world):
    """Return what the ledger and the dispatcher have seen."""
    ledger = Ledger(world, "gloo")
    with Dispatched() as dispatched:
        for case in cases:
            called(ledger.tagged(case=case[0]), shaped(world.rank, case, world.size), case).wait()
    return ledger.records, [(name, handed_over(name, args)) for name, args in dispatched.seen]


def wire_bytes():
    """Bytes that the sockets of this process have sent, retransmissions not counted, as the kernel counts them."""
    sent = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        whole, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                        sent += whole - again
    return sent


def ss_bytes():
    """The same, as the command `ss` tells it of this process."""
    text = subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, check=True).stdout
    sent = 0
    for line in text.splitlines():
        if f"pid={os.getpid()}," in line:
            words = dict(word.split(":", 1) for word in line.split() if word.count(":") == 1)
            sent += int(words.get("bytes_sent", 0)) - int(words.get("bytes_retrans", 0))
    return sent


def big(case, world):
    verb, elements = case
    p, x = world.size, torch.ones(elements)
    rows = [elements // 2, *[elements // 2 // (p - 1)] * (p - 1)]
    match verb:
        case "all_gather":
            return world.all_gather(x[: elements // p])
        case "all_gather_v":
            return world.all_gather_v(x[: rows[world.rank]], rows)
        case "reduce_scatter":
            return world.reduce_scatter(x)
        case "uneven":
            return world.reduce_scatter(x[: sum(rows)], sizes=rows)
        case "all_to_all":
            return world.all_to_all(x, [elements // p] * p, [elements // p] * p)
        case "broadcast":
            return world.broadcast(x, root=1)
        case _:
            return world.all_reduce(x)


def on_the_wire(cases, world):
    """Return what the ledger says and the sockets sent, case by case."""
    ledger, results = Ledger(world, "gloo"), []
    for case in cases:
        dist.barrier()
        time.sleep(0.02)
        before, counted_before = wire_bytes(), ledger.sent_bytes
        big(case, ledger).wait()
        time.sleep(0.02)
        results.append((ledger.sent_bytes - counted_before, wire_bytes() - before))
    return results, wire_bytes(), ss_bytes() if world.rank == 0 and have_ss() else None


def have_ss():
    from shutil import which

    return os.geteuid() == 0 and which("ss") is not None


class Nothing:
    """Collectives that do nothing at all."""

    ranks, rank = (0, 1), 0

    def start(self, call, x):
        return None


def overhead(world):
    """Return the seconds that a ledger adds to a call, and those that the cheapest call over sockets takes."""
    x, rounds = torch.ones(1), range(100)
    call = calls.all_reduce(x.shape, "float32", world.size)
    recorded, silent, real = [], [], []
    for _ in range(5):
        for target, times in ((Ledger(Nothing()), recorded), (Nothing(), silent)):
            start = time.perf_counter()
            for _ in rounds:
                target.start(call, x)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in rounds:
            world.all_reduce(x).wait()
        real.append(time.perf_counter() - start)
    return (min(recorded) - min(silent)) / len(rounds), min(real) / len(rounds)
