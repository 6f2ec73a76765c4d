r"""Is the layout that the planner takes for the quickest the quickest on ranks that talk over a slow link?

Ranks are processes of this machine that talk by gloo, each over a link of a given rate (`parallel.namespaces`), or over
the loopback device. All layouts update the same matrices in turn, round by round, so that a changing pace of the
machine meets all of them; a round's seconds are those of the slowest rank. Cases that differ in the layout alone are
measured once, together.

The prediction is that of `cost.plan` for one class of so many matrices, float32 throughout,

.. math:: t = \frac{flops}{rate} + \sum_{calls} (messages \cdot \alpha + bytes \cdot \beta),

with the rate of products that all ranks make at once and :math:`\alpha` from sums of 4 bytes, each of
:math:`2 (p - 1)` messages, both medians over the same rounds. :math:`\beta` is the limit of the link, or on loopback
that of a sum of 4 MiB. A link of a given rate lets a burst pass at once after a pause (`namespaces.BURST`), which is
all of a short call: what is saved at most is predicted too, so that a prediction is an interval.

Layouts that give the update of the whole matrix have places, 1 for the quickest. `gram` is one of them, since all
products are in float32 here, whose rate is measured; where only that of another format is known, the planner shows it
without a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

from muon_lab.nearest import unknown
from muon_lab.studies.orthogonalization import shape_of
from muon_lab.studies.study import Case, Column, LeftOut, Metrics, Study

if TYPE_CHECKING:
    from muon_lab.cost.network import Cluster
    from muon_lab.cost.plan import Choice
    from muon_lab.parallel.trial import Trial

#: Layouts that give the same update, so that one may be taken for another.
RANKED = ("duplicated", "owner", "distributed", "gram")
LAYOUTS = (*RANKED, "blockwise")

#: Seconds in every round, by layout, and of what else takes turns.
Rounds: TypeAlias = Mapping[str, list[float]]


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    shape: tuple[str, ...] = ("1024x64", "256x256")
    """ROWSxCOLS of a matrix."""
    dim: tuple[int, ...] = (0,)
    """The partitioned axis: 0 cuts rows, 1 cuts columns."""
    ranks: tuple[int, ...] = (2,)
    """Number of processes, which cut it evenly."""
    megabits: tuple[float, ...] = (0.0,)
    """Rate of each rank's link, 10⁶ bit/s each way (needs root and iproute2); 0 for loopback without a limit."""
    count: tuple[int, ...] = (4,)
    """Equal matrices in an update: owner deals them out."""
    steps: tuple[int, ...] = (5,)
    """Quintic Newton-Schulz steps."""
    repeats: tuple[int, ...] = (5,)
    """Measured rounds; one round before them does not count."""
    layout: tuple[str, ...] = LAYOUTS
    """duplicated, owner, distributed, gram, or blockwise, which is another update and has no place."""


COLUMNS = (
    Column("time", "s", "an update of all matrices by the slowest rank, median over rounds"),
    Column("time_low", "s", "lower quartile over rounds"),
    Column("time_high", "s", "upper quartile over rounds"),
    Column("predicted", "s", "the same as the planner has it"),
    Column("predicted_low", "s", "the same if the link lets a burst pass at once at the beginning of each call"),
    Column("exchange", "s", "of predicted, what the calls take"),
    Column("ratio", "1", "time over that of duplicated in the same round, median"),
    Column("predicted_ratio", "1", "predicted over that of duplicated"),
    Column("behind", "1", "time over that of the quickest layout with the same update, in medians"),
    Column("place", "count", "1 for the quickest of the layouts with the same update"),
    Column("predicted_place", "count", "the same as predicted"),
    Column("swapped", "count", "layouts that stand on the other side of it than predicted"),
    Column("swap_ratio", "1", "the largest ratio of times among those pairs"),
    Column("contradicted", "count", "of swapped, those whose intervals of predicted times do not meet"),
    Column("product_gflops", "Gflop/s", "rate of a rank's products while all ranks multiply"),
    Column("message_us", "µs", "latency of a message, from sums of 4 bytes"),
    Column("transfer_megabits", "Mbit/s", "rate at which a rank sent in a sum of 4 MiB"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    rows, cols = shape_of(point["shape"])
    if point["layout"] not in LAYOUTS:
        raise unknown("layout", point["layout"], LAYOUTS)
    if point["dim"] not in (0, 1):
        raise ValueError(f"dim must be 0 (rows) or 1 (columns), not {point['dim']}")
    for name, least in (("ranks", 2), ("count", 1), ("steps", 1), ("repeats", 1)):
        if point[name] < least:
            raise ValueError(f"{name} must be at least {least}, not {point[name]}")
    megabits, length = float(point["megabits"]), (rows, cols)[point["dim"]]
    if not (megabits >= 0 and isfinite(megabits)):
        raise ValueError(f"megabits must be a rate, or 0 for no limit, not {point['megabits']}")
    if length % point["ranks"]:
        raise LeftOut(f"the planner needs equal shards, and {point['ranks']} ranks do not divide {length}")
    if megabits and (reason := _no_link()):
        raise LeftOut(f"links of a given rate cannot be had here: {reason}")
    yield {**point, "shape": f"{rows}x{cols}", "megabits": megabits}


@cache
def _no_link() -> str:
    from muon_lab.parallel import namespaces

    return namespaces.unavailable()


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    rounds = _rounds(tuple((name, value) for name, value in case.items() if name != "layout"))
    cluster = measured(case, rounds)
    choices = planned(case, cluster)
    return {
        **compared(case["layout"], rounds, {name: span(case, cluster, each) for name, each in choices.items()}),
        "exchange": choices[case["layout"]].exchange,
        "product_gflops": cluster.rate / 1e9,
        "message_us": 1e6 * cluster.inside.latency,
        "transfer_megabits": 8e-6 * _transferred(case, rounds),
    }


@lru_cache(maxsize=1)  # neighbouring cases of a grid share it
def _rounds(settings: tuple[tuple[str, Any], ...]) -> Rounds:
    """Run a world and return the seconds of the slowest rank in every round."""
    from functools import partial

    from muon_lab.parallel import trial, worlds

    case = dict(settings)
    program = partial(trial.turns, _trial(case), case["count"], case["megabits"])
    found = worlds.run(program, case["ranks"], "gloo", timeout=1200.0, checked=False)
    return {name: [max(each) for each in zip(*(rank[name] for rank in found), strict=True)] for name in found[0]}


def _trial(case: Case) -> "Trial":
    from muon_lab.parallel.trial import Trial

    return Trial(*shape_of(case["shape"]), case["dim"], steps=case["steps"], repeats=case["repeats"])


def measured(case: Case, rounds: Rounds) -> "Cluster":
    """Return the cluster that the ranks are: latency, bandwidth and rate of products, from medians over rounds."""
    from statistics import median

    from muon_lab.cost.network import Cluster, Link
    from muon_lab.parallel import trial

    short, long = sorted(shape_of(case["shape"]))
    flops = trial.products(_trial(case)) * 2.0 * short * short * long
    latency = median(rounds[trial.MESSAGES]) / (trial.SHORT * _messages(case))
    bandwidth = 1e6 * case["megabits"] / 8 if case["megabits"] else _transferred(case, rounds)
    link = Link(latency, bandwidth)
    rate = flops / median(rounds[trial.PRODUCTS])
    return Cluster("ranks", "measured in the same run", case["ranks"], link, link, rate=rate)


def _messages(case: Case) -> int:
    """Return the messages of a sum that follow each other."""
    return 2 * (case["ranks"] - 1)


def _transferred(case: Case, rounds: Rounds) -> float:
    """Return the bytes a second that a rank sends in the long sum, its latency taken off."""
    from statistics import median

    from muon_lab.parallel import trial

    taken = median(rounds[trial.TRANSFER]) - median(rounds[trial.MESSAGES]) / trial.SHORT
    return _messages(case) / case["ranks"] * 4 * trial.LONG / max(taken, 1e-9)


def planned(case: Case, cluster: "Cluster") -> "dict[str, Choice]":
    """Return every layout for all matrices, as the planner prices a class of them."""
    from muon_lab.cost import plan
    from muon_lab.cost.inventory import Layer, Model
    from muon_lab.parallel.grid import Grid

    layer = Layer("matrix", "other", shape_of(case["shape"]), per_block=case["count"], cut=case["dim"])
    setting = plan.Setting(steps=case["steps"], wire="float32", products="float32")
    found = plan.plan(Model("matrices", (layer,), blocks=1), cluster, Grid(tp=case["ranks"]), setting)
    (only,) = found.layers
    return {choice.layout: choice for choice in (only.chosen, *only.others) if choice.layout in LAYOUTS}


def span(case: Case, cluster: "Cluster", choice: "Choice") -> tuple[float, float]:
    """Return the predicted seconds of a layout, if each of its calls finds the bucket of the link full and if none."""
    from dataclasses import replace

    from muon_lab.cost import volume
    from muon_lab.cost.network import Link
    from muon_lab.parallel.grid import even
    from muon_lab.parallel.namespaces import BURST

    if not case["megabits"]:
        return choice.seconds, choice.seconds
    shape, rate = shape_of(case["shape"]), cluster.inside.bandwidth
    cut = even(shape[case["dim"]], case["ranks"], case["dim"])
    count, times = (case["count"], 1) if choice.layout == "owner" else (1, case["count"])
    calls = volume.layout(choice.layout, shape, cut, 0, count=count, steps=case["steps"])
    prompt = replace(cluster, inside=Link(0.0, rate))
    saved = times * sum(min(prompt.seconds(call), BURST / rate) for call in calls)
    return choice.seconds - saved, choice.seconds


def compared(layout: str, rounds: Rounds, spans: Mapping[str, tuple[float, float]]) -> dict[str, float | int | None]:
    """Return what was measured of a layout beside what was predicted, and where both place it.

    Examples
    --------
    >>> rounds = {"duplicated": [2.0, 4.0], "owner": [1.0, 2.0], "distributed": [9.0, 9.0], "gram": [8.0, 8.0]}
    >>> spans = {"duplicated": (2.0, 2.0), "owner": (1.0, 1.0), "distributed": (5.0, 6.0), "gram": (6.5, 7.0)}
    >>> found = compared("gram", rounds, spans)
    >>> [found[name] for name in ("place", "predicted_place", "swapped", "swap_ratio", "contradicted")]
    [3, 4, 1, 1.125, 1]
    >>> compared("duplicated", rounds, spans)["behind"]
    2.0
    """
    import numpy as np

    times = {name: float(np.median(rounds[name])) for name in spans}
    low, time, high = (float(part) for part in np.quantile(rounds[layout], (0.25, 0.5, 0.75)))
    least, predicted = spans[layout]
    found: dict[str, float | int | None] = {
        "time": time,
        "time_low": low,
        "time_high": high,
        "predicted": predicted,
        "predicted_low": least,
        "ratio": float(np.median(np.divide(rounds[layout], rounds["duplicated"]))),
        "predicted_ratio": predicted / spans["duplicated"][1],
        "behind": time / min(times[name] for name in RANKED),
    }
    if layout not in RANKED:
        return found
    others = [name for name in RANKED if name != layout]
    swapped = [name for name in others if (time - times[name]) * (predicted - spans[name][1]) < 0]
    ratios = [max(time / times[name], times[name] / time) for name in swapped]
    return {
        **found,
        "place": 1 + sum(times[name] < time for name in others),
        "predicted_place": 1 + sum(spans[name][1] < predicted for name in others),
        "swapped": len(swapped),
        "swap_ratio": max(ratios, default=None),
        "contradicted": sum(spans[name][1] < least or predicted < spans[name][0] for name in swapped),
    }


def work(case: Case) -> float:
    """Estimate the flops of a case: a fifth of what all layouts take on all ranks, three updates of whole matrices."""
    from muon_lab.cost import flops

    short, long = sorted(shape_of(case["shape"]))
    one = flops.newton_schulz(short, long, case["steps"])
    return 3 / 5 * (case["repeats"] + 1) * case["count"] * case["ranks"] * one


STUDY = Study(
    name="layout_time",
    question="Is the layout that the planner takes for the quickest the quickest over a slow link?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="time",
    group=("layout", "shape", "megabits", "ranks"),
    settle=settle,
    measure=measure,
    work=work,
    timed=True,
)
