"""Links of any speed: simulated by a clock, and real ones between network namespaces; and schedules of what they do."""

import itertools
import math
import threading
import time
from functools import partial

import jaxtyping
import pytest
import torch
from parallel import overlap_programs as programs

from muon_lab import parallel
from muon_lab.parallel import algorithms, calls, namespaces, timeline, worlds
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.links import SimulatedLink, duration
from muon_lab.parallel.rendezvous import alone
from muon_lab.parallel.timeline import Step, carry, compute, schedule
from muon_lab.studies.layerwise import STUDY


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def simulated(world, alpha, beta, **options):
    clock = Clock()
    return SimulatedLink(world, alpha, beta, clock=clock, sleep=clock.sleep, **options), clock


@pytest.mark.world
def test_a_result_is_there_after_latency_and_bytes():
    def program(world):
        link, clock = simulated(world, 0.25, 2.0**-10)
        pending = link.all_reduce(torch.ones(512))
        begun = clock.now
        result = pending.wait()
        pending.wait()  # a second time costs nothing
        return begun, clock.now, result.tolist() == [3.0] * 512

    sent = max(algorithms.sent(calls.all_reduce((512,), "float32", 3), rank) for rank in range(3))
    assert worlds.run(program, 3) == [(0.0, 0.25 + sent / 1024, True)] * 3


@pytest.mark.world
def test_calls_queue_on_the_link_of_a_rank_and_of_all_its_groups():
    def program(world):
        link, clock = simulated(world, 1.0, 0.0)
        part = link.split([[0, 1], [2, 3]]).tagged(layer=3)
        first, second, third = (group.all_reduce(torch.ones(1)) for group in (link, part, link))
        third.wait()
        ends = clock.now
        first.wait(), second.wait()
        return ends, clock.now, link.link.busy, link.link.waited

    assert worlds.run(program, 4) == [(3.0, 3.0, 3.0, 3.0)] * 4


@pytest.mark.world
def test_what_is_computed_meanwhile_is_not_waited_for():
    def program(computed, world):
        link, clock = simulated(world, 4.0, 0.0)
        pending = link.all_gather(torch.ones(1))
        if computed:
            clock.sleep(computed)
        pending.wait()
        idle = link.all_gather(torch.ones(1))  # the link has been idle since: it begins now
        idle.wait()
        return clock.now, link.link.waited

    assert worlds.run(partial(program, 0.0), 2)[0] == (8.0, 8.0)
    assert worlds.run(partial(program, 1.5), 2)[0] == (8.0, 6.5)
    assert worlds.run(partial(program, 9.0), 2)[0] == (13.0, 4.0)


@pytest.mark.world
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_values_are_those_of_the_collectives_within(backend):
    for rank, found in enumerate(worlds.run(programs.through_a_link, 3, backend)):
        assert found == [[6.0], [[1.0], [2.0], [3.0]], [2.0, 3.0, 3.0], [2.0], [6.0] if rank == 0 else [], [2.0]]


@pytest.mark.world
def test_a_real_clock_waits_for_real():
    def program(world):
        link = SimulatedLink(world, 0.05, 0.0)
        begun = time.monotonic()
        link.barrier().wait()
        return time.monotonic() - begun

    assert min(worlds.run(program, 2)) >= 0.05


def test_the_slowest_rank_decides():
    gather = calls.all_gather_v((), "float32", (100, 0, 300), 0)
    assert duration(gather, 0, 0.0, 1.0) == max(algorithms.sent(gather, rank) for rank in range(3)) == 1600
    assert duration(gather, 0, 0.0, 1.0, "gloo") == max(algorithms.sent(gather, rank, "gloo") for rank in range(3))
    assert duration(calls.barrier(4), 0, 0.5, 1.0) == 0.5
    exchange = calls.all_to_all((), "float32", (0, 5), (0, 7), 5)
    assert duration(exchange, 0, 0.0, 1.0) == 20


def test_nobody_to_talk_to_takes_no_time():
    link, clock = simulated(alone(), 1.0, 1.0)
    link.all_reduce(torch.ones(5)).wait()
    assert clock.now == 0


@pytest.mark.world
def test_ledgers_work_inside_and_outside():
    def program(world):
        inner = Ledger(world)
        outer = Ledger(simulated(inner, 1.0, 0.0)[0])
        outer.tagged(layer=1).all_reduce(torch.ones(4)).wait()
        return outer.calls, inner.calls, inner.sent_bytes

    assert worlds.run(program, 2) == [(1, 1, 16)] * 2


@pytest.mark.parametrize(
    "options", [{"alpha": -1.0, "beta": 0.0}, {"alpha": 0.0, "beta": math.inf}, {"alpha": "1", "beta": 0.0}]
)
def test_impossible_links_are_refused(options, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="needed a finite time of at least 0"):
        parallel.SimulatedLink(alone(), **options)
    with pytest.raises(ValueError, match="algorithm must be one of"):
        SimulatedLink(alone(), 0.0, 0.0, algorithm="rings")


def test_a_link_of_no_finite_rate_is_no_case_of_a_study():
    point = {name: values[0] for name, values in STUDY.defaults.items()} | {"link": "own", "bandwidth_gb": math.inf}
    with pytest.raises(ValueError, match="bandwidth_gb must be finite, not inf"):
        list(STUDY.settle(point, None))


# --- schedules of two resources ---------------------------------------------------------------------------------------


def brute_force(tasks):
    """Return the ends of tasks by moving in small steps of time: the obvious way."""
    ends, queues = {}, {kind: [task for task in tasks if task.resource == kind] for kind in timeline.RESOURCES}
    running, now = {}, 0
    while len(ends) < len(tasks):
        for kind, queue in queues.items():
            while kind not in running and queue and all(name in ends for name in queue[0].after):
                task = queue.pop(0)
                running[kind] = (task, now + task.seconds)
                if task.seconds:
                    break
                ends[task.name] = now
                del running[kind]
        due = [kind for kind, (_, end) in running.items() if end <= now]
        for kind in due:
            ends[running.pop(kind)[0].name] = now
        now += 0 if due else 1
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_what_moving_clock_hands_give(seed):
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for i in range(12):
        kind = timeline.RESOURCES[torch.randint(2, (), generator=generator)]
        after = tuple(f"t{j}" for j in range(i) if torch.rand((), generator=generator) < 0.2)
        tasks.append(timeline.Task(f"t{i}", kind, float(torch.randint(1, 5, (), generator=generator)), after))
    plan = schedule(tasks)
    assert {task.name: span.end for task, span in zip(tasks, plan.spans, strict=True)} == brute_force(tasks)


def test_hidden_and_exposed_are_read_back():
    plan = schedule([compute("a", 2.0), carry("b", 3.0, "a"), compute("c", 2.0), compute("d", 1.0, "b")])
    assert (plan.makespan, plan.hidden, plan.exposed) == (6.0, 2.0, 1.0)
    assert plan.hidden + plan.exposed == plan.busy("link")
    assert plan.span("d") == (5.0, 6.0)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([compute("a", 1.0, "b")], "'a' comes after 'b', needed one that is given before it"),
        ([compute("a", 1.0), carry("a", 1.0)], "two tasks are named 'a'"),
        ([compute("a", -1.0)], "'a' takes -1.0 seconds"),
        ([timeline.Task("a", "disk", 1.0)], "resource of task 'a' is 'disk'"),
    ],
)
def test_impossible_schedules_are_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        schedule(tasks)
    with pytest.raises(ValueError, match="needed one a bucket"):
        Step((1.0,), (1.0, 2.0), (1.0,), (1.0,), 0.0)


def test_hiding_never_takes_longer_and_never_less_than_the_busier_resource():
    for times in [*itertools.product((0.0, 1.0, 5.0), repeat=5)][::17]:
        f, b, r, g, u = times
        step = Step((f, f / 2, f), (b, b, b / 4), (r, 3 * r, r), (g, g, 2 * g), u)
        serial = step.seconds()
        assert serial == pytest.approx(2.5 * f + 2.25 * b + 5 * r + 4 * g + u)
        best = step.seconds(defer=True, overlap=True)
        for flags in ({"defer": True}, {"overlap": True}):
            assert best <= step.seconds(**flags) + 1e-9
            assert step.seconds(**flags) <= serial + 1e-9
        assert best >= max(2.5 * f + 2.25 * b + u, 5 * r + 4 * g) - 1e-9


# --- a real link ------------------------------------------------------------------------------------------------------

WHY_NOT = namespaces.unavailable()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "available")


@needs_namespaces
@pytest.mark.world
@pytest.mark.slow
def test_hidden_communication_over_a_real_link():
    """Computing takes fixed times, as on a device of its own; each of two ranks has a link of 200 Mbit/s.

    Steps with everything hidden take at most 0.75 of those that wait, and end in the same weights, which are those of
    threads without any link. The step without hiding takes what it computes and the bytes of its calls at the rate,
    and both are foretold within 15 %.
    """
    beta = 8 / (programs.MEGABITS * 1e6)
    plan = programs.foretold(
        programs.WIDTH, programs.DEPTH, 2, programs.SECONDS, alpha=0.0, beta=beta, algorithm="gloo"
    )
    expected = [plan.seconds(), plan.seconds(defer=True, overlap=True)]
    burst = 2 * beta * namespaces.BURST  # what may leave at once, after backward and after the update
    weights = worlds.run(programs.without_a_link, 2)
    best = [math.inf, math.inf]
    for _ in range(8):  # other processes only ever add to what a step takes
        found = worlds.run(programs.over_a_limited_link, 2, "gloo", timeout=120)
        for rank, (serial, hidden, computing, talking, ends) in enumerate(found):
            assert computing >= talking
            assert serial >= computing + talking - burst
            assert all(programs.same(W, weights[rank]) for W in ends)
            best = [min(best[0], serial), min(best[1], hidden)]
        if best == pytest.approx(expected, rel=0.15):
            break
    assert best == pytest.approx(expected, rel=0.15)
    assert best[1] <= 0.75 * best[0]


@needs_namespaces
@pytest.mark.world
def test_namespaces_leave_nothing_behind():
    assert worlds.run(programs.there_and_back, 2, "gloo") == [[True, False, [2.0], [2.0]], [False, False, [2.0], [2.0]]]
    assert not namespaces.bridge_exists()


@pytest.mark.parametrize("megabits", [0, -1.0, float("nan")])
def test_impossible_rates_are_refused(megabits):
    with pytest.raises(ValueError, match="needed a rate above 0"), namespaces.limited(alone(), megabits):
        pass


def test_threads_cannot_leave_for_a_namespace():
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(ValueError, match="needed backend='gloo'"), namespaces.limited(alone(), 100):
        pass
