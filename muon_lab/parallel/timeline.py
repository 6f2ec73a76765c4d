r"""When a step is done if a rank can compute and talk at the same time: tasks on two resources, by a list schedule.

Each resource, the processor and the link, does its tasks one after the other, in the order in which they are given. A
task begins when its resource is free and all tasks that it comes after have ended:

.. math:: b_i = \max(e_{i-1}, \max_{j \in after(i)} e_j), \qquad e_i = b_i + s_i.

What of the link's time the processor does not compute through is *exposed*, the rest *hidden*. Nothing here imports
torch.

>>> plan = schedule([compute("forward", 3.0), carry("reduce", 2.0, "forward"), compute("backward", 1.5)])
>>> plan.makespan, plan.exposed, plan.hidden
(5.0, 0.5, 1.5)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: What a rank has one of each.
RESOURCES = ("compute", "link")


class Task(NamedTuple):
    """Something that a resource is busy with.

    Attributes
    ----------
    name : str
        Of this task alone.
    resource : {"compute", "link"}
        What does it.
    seconds : float
        How long.
    after : tuple of str
        Tasks given before it that have to have ended.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()


class Span(NamedTuple):
    """When a task begins and ends."""

    begin: float
    end: float


def compute(name: str, seconds: float, *after: str) -> Task:
    """Return a task of the processor."""
    return Task(name, "compute", seconds, after)


def carry(name: str, seconds: float, *after: str) -> Task:
    """Return a task of the link."""
    return Task(name, "link", seconds, after)


@dataclass(frozen=True)
class Timeline:
    """When each task begins and ends.

    Attributes
    ----------
    tasks : tuple of Task
        In the order in which they were given.
    spans : tuple of Span
        One a task.
    """

    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """When everything is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which the link is busy and the processor is not."""
        computing = [span for task, span in zip(self.tasks, self.spans, strict=True) if task.resource == "compute"]
        covered = 0.0
        for talk in (span for task, span in zip(self.tasks, self.spans, strict=True) if task.resource == "link"):
            covered += sum(max(0.0, min(talk.end, span.end) - max(talk.begin, span.begin)) for span in computing)
        return self.busy("link") - covered

    @property
    def hidden(self) -> float:
        """Seconds of the link through which the processor computes."""
        return self.busy("link") - self.exposed

    def busy(self, resource: str) -> float:
        """Return the seconds of a resource's tasks."""
        return sum(task.seconds for task in self.tasks if task.resource == resource)

    def span(self, name: str) -> Span:
        """Return when a task begins and ends."""
        return dict(zip((task.name for task in self.tasks), self.spans, strict=True))[name]


def schedule(tasks: Iterable[Task]) -> Timeline:
    """Return when each task begins and ends.

    Raises
    ------
    ValueError
        If a task has the name of another one, comes after one that is not given before it, is of an unknown resource,
        or takes a negative time.
    """
    given, ends, free, spans = tuple(tasks), dict[str, float](), dict.fromkeys(RESOURCES, 0.0), list[Span]()
    for task in given:
        _check(task, ends)
        begin = max([free[task.resource], *(ends[name] for name in task.after)])
        ends[task.name] = free[task.resource] = begin + task.seconds
        spans.append(Span(begin, ends[task.name]))
    return Timeline(given, tuple(spans))


@dataclass(frozen=True)
class Step:
    """What one training step of a rank takes, in seconds: by bucket, in the order of forward.

    Attributes
    ----------
    forward, backward : tuple of float
        Of the modules of each bucket.
    reduce, gather : tuple of float
        Of each bucket's gradients and new weights, on the link.
    update : float
        Of the optimizer, for what the rank owns.
    agree : float
        On the link, before the update: small calls that tell norms and whether all is finite.
    confirm : float
        On the link, after the update: whether all ranks have taken it.

    Raises
    ------
    ValueError
        If there is not one number a bucket each.

    Examples
    --------
    >>> step = Step(forward=(1.0, 1.0), backward=(2.0, 2.0), reduce=(2.0, 2.0), gather=(1.0, 1.0), update=1.0)
    >>> step.seconds(), step.seconds(defer=True), step.seconds(defer=True, overlap=True)
    (13.0, 12.0, 10.0)
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    update: float
    agree: float = 0.0
    confirm: float = 0.0

    def __post_init__(self) -> None:
        lengths = {len(times) for times in (self.forward, self.backward, self.reduce, self.gather)}
        if len(lengths) > 1 or lengths == {0}:
            raise ValueError(f"forward, backward, reduce and gather have {sorted(lengths)} times, needed one a bucket")

    def tasks(self, number: int = 0, *, defer: bool = False, overlap: bool = False) -> list[Task]:
        """Return the tasks of a step that follows the one before it, deferring gathers and overlapping reductions."""

        def of(what: str, bucket: int | None = None, step: int = number) -> str:
            return f"{what} of step {step}" if bucket is None else f"{what} of bucket {bucket} of step {step}"

        buckets = range(len(self.forward))
        tasks = [
            compute(of("forward", b), self.forward[b], *([of("gather", b, number - 1)] if number and defer else []))
            for b in buckets
        ]
        for b in reversed(buckets):
            tasks.append(compute(of("backward", b), self.backward[b]))
            if overlap:
                tasks.append(carry(of("reduce", b), self.reduce[b], of("backward", b)))
        if not overlap:
            tasks += [carry(of("reduce", b), self.reduce[b], of("backward", 0)) for b in reversed(buckets)]
        tasks += [
            carry(of("agree"), self.agree, of("backward", 0)),
            compute(of("update"), self.update, of("agree")),
            carry(of("confirm"), self.confirm, of("update")),
            *(carry(of("gather", b), self.gather[b], of("confirm")) for b in buckets),
            compute(of("end"), 0.0, of("confirm"), *([] if defer else [of("gather", b) for b in buckets])),
        ]
        return tasks

    def timeline(self, steps: int = 1, *, defer: bool = False, overlap: bool = False) -> Timeline:
        """Return when everything of several steps begins and ends."""
        numbers = range(steps)
        return schedule(task for number in numbers for task in self.tasks(number, defer=defer, overlap=overlap))

    def seconds(self, *, defer: bool = False, overlap: bool = False) -> float:
        """Return the time from one step to the next, once steps follow each other."""
        return self.timeline(3, defer=defer, overlap=overlap).makespan - (
            self.timeline(2, defer=defer, overlap=overlap).makespan
        )


def _check(task: Task, ends: Sequence[str] | dict[str, float]) -> None:
    if task.resource not in RESOURCES:
        raise ValueError(f"resource of task {task.name!r} is {task.resource!r}, needed one of {', '.join(RESOURCES)}")
    if task.name in ends:
        raise ValueError(f"two tasks are named {task.name!r}, needed one")
    if not task.seconds >= 0:
        raise ValueError(f"task {task.name!r} takes {task.seconds!r} seconds, needed at least 0")
    for name in task.after:
        if name not in ends:
            raise ValueError(f"task {task.name!r} comes after {name!r}, needed one that is given before it")
