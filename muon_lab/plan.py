"""``python -m muon_lab.plan``: which layout for which layer of my model on my cluster, who owns what, what it costs."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

from muon_lab.cost import inventory, network, own
from muon_lab.cost.plan import Choice, Plan, Setting, named, plan
from muon_lab.nearest import nearest
from muon_lab.parallel.grid import Grid
from muon_lab.sweep.arguments import Help, with_tyro

OK, BAD_ARGUMENTS, INTERRUPTED = 0, 2, 130

#: Ranks of the largest grid that is planned.
MOST = 2**17

PROGRAM = "python -m muon_lab.plan"

DESCRIPTION = f"""Plan the step of a matrix optimizer: a layout for each layer, owners, bytes, flops, memory, seconds.

{PROGRAM} --model qwen3-30b-a3b --gpus 8 --dp 8 --ep 8 --cluster gb300-nvl72

{PROGRAM} --list names the models and clusters. A model may also be a .toml list of [[layer]] tables, a .safetensors
file (its header is read) or a Hugging Face config.json; a cluster a .toml file with [inside] and [outside] links."""


@dataclass(frozen=True)
class Options:
    """What to plan, and how to show it."""

    model: str = "qwen3-30b-a3b"
    """A name, a .toml list of layers, a .safetensors file or a folder of them, or a config.json."""
    cluster: str = "h200-nvlink"
    """A name, or a .toml file."""
    gpus: int = 0
    """Number of ranks; pp · dp · tp by default."""
    dp: int = 0
    """Data-parallel ranks; what is left of the GPUs by default."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert-parallel ranks, which must divide dp·tp (dp, if experts are cut too) and the number of experts."""
    expert_tp: int = 1
    """Tensor-parallel ranks of experts: 1 or tp."""
    qkv: str = "stored"
    """Queries, keys and values as the model's code keeps them (stored), apart (split), or as one matrix (fused)."""
    gate_up: str = "stored"
    """Gate and up-projection likewise."""
    steps: int = 5
    """Newton-Schulz steps."""
    degree: int = 5
    """Degree of a step: 5 or 3."""
    kernel: str = "gemm"
    """Products with a symmetric result: gemm, or syrk for half of them."""
    weight: str = "bfloat16"
    """Dtype in which new weights are gathered."""
    gradient: str = "float32"
    """Dtype of gradients."""
    wire: str = "bfloat16"
    """Dtype that tensor-parallel layouts send."""
    gather: str = "exact"
    """Gather of new weights: parts as long as they are (exact), or as long as the longest (padded)."""
    no_overlap: bool = False
    """Hide the gather of weights behind nothing, instead of behind the next forward pass."""
    owners: str = "hybrid"
    """Whether replicas may share matrices too long for one (hybrid), or own whole ones only (whole)."""
    cap: float = 0.0
    """The most entries that a replica owns, in units of the mean; no limit by default."""
    tflops: float = 0.0
    """Rate of a rank's large products; that of the cluster by default."""
    product_us: float = -1.0
    """Microseconds that each product takes beside its flops; those of the cluster by default."""
    active: float = 0.0
    """Billions of parameters that a token passes; as published or configured by default, else all."""
    tokens: int = 0
    """Tokens a step; 65,536 a rank by default."""
    step_ms: float = 0.0
    """Milliseconds of a training step without its optimizer; estimated from tokens by default."""
    json: bool = False
    """Print one JSON object on standard output, and nothing else there."""
    figure: Path | None = None
    """Draw the plan into FILE.pdf and FILE.png."""
    list: bool = False
    """Name the models and clusters."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status: 0 all well, 2 bad arguments, 130 interrupted."""
    try:
        _answer(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("muon_lab.plan: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        print(f"muon_lab.plan: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _answer(given: list[str]) -> None:
    """Print what a command line asks for."""
    try:
        options = read(given)
    except Help:
        return
    if options.list:
        print(listing())
        return
    found = planned(options)
    pictures = drawn(found.row(), options.figure) if options.figure else []
    print(json.dumps(found.row(), allow_nan=False) if options.json else text(found))
    if pictures and not options.json:
        print(f"\nLook at {', '.join(map(str, pictures))}")


def read(given: list[str]) -> Options:
    """Read a command line.

    Raises
    ------
    Help
        If it asks for help, which is then printed.
    ValueError
        If it has a flag that does not exist, or a value of another kind.
    """
    known = {option.name.replace("_", "-"): option.type for option in fields(Options)}
    if given and not given[0].startswith("-"):
        raise ValueError(f"{given[0]!r} is no option: did you mean --{nearest(given[0], known)}?")
    for place, word in enumerate(given):
        if not word.startswith("--"):
            if word[:1] == "-" and word[1:2].isalpha() and word != "-h":
                raise ValueError(f"there is no option {word}: did you mean --{nearest(word[1:], known)}?")
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in (*known, "help"):
            raise ValueError(f"there is no option {word}: did you mean --{nearest(name, known)}?")
        rest = [value] if equals else list(takewhile(lambda one: not one.startswith("--"), given[place + 1 :]))
        _fitting(name, rest, known.get(name, bool))
    return with_tyro(given, Options, Options(), PROGRAM, DESCRIPTION)


def _fitting(name: str, values: Sequence[str], kind: object) -> None:
    """Refuse values that an option does not take."""
    if kind is bool:
        if values:
            raise ValueError(f"--{name} takes no value, but got {values[0]!r}")
        return
    if len(values) != 1:
        raise ValueError(f"--{name} takes one value, but got {len(values)}" if values else f"--{name} needs a value")
    for number, told in ((int, "a whole number"), (float, "a number")):
        if kind is number:
            try:
                fits = isfinite(number(values[0]))
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(f"--{name} takes {told}, not {values[0]!r}")


def planned(options: Options) -> Plan:
    """Return the plan of a command line.

    Raises
    ------
    ValueError
        If a name is unknown, a file cannot be read, or numbers do not fit.
    """
    for name in ("tflops", "tokens", "step_ms", "cap"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {getattr(options, name)}")
    model = own.read(options.model, qkv=options.qkv, gate_up=options.gate_up)
    if not 0 <= options.active <= model.parameters / 1e9:
        raise ValueError(
            f"--active is {options.active} B parameters, but {model.name} has {model.parameters / 1e9:.4g} B"
        )
    if options.active:
        model = replace(model, active=options.active * 1e9)
    setting = Setting(
        options.steps,
        options.degree,
        options.kernel,
        options.weight,
        options.gradient,
        options.wire,
        options.gather,
        not options.no_overlap,
        options.tflops * 1e12 or None,
        options.tokens or None,
        options.step_ms / 1e3 or None,
        options.owners,
        options.cap or None,
        None if options.product_us == -1.0 else options.product_us / 1e6,
    )
    return plan(model, named(options.cluster), _fitted(model, options), setting, expert_tp=options.expert_tp)


def _fitted(model: inventory.Model, options: Options) -> Grid:
    """Return the grid of a command line, after a look at whether the model can be cut so on the GPUs that there are."""
    ranks = grid(replace(options, ep=1))
    if options.expert_tp in (1, options.tp):
        inventory.check_tp(model, options.tp, options.expert_tp, options.gpus // options.pp)
        inventory.check_ep(model, options.ep, ranks.dp * ranks.tp, options.expert_tp)
    return grid(options)


def grid(options: Options) -> Grid:
    """Return the grid of a command line.

    Raises
    ------
    ValueError
        If the ranks are not pp · dp · tp, or one of them is no number of ranks.

    Examples
    --------
    >>> grid(Options(gpus=256, pp=4, ep=64)).dp
    64
    """
    rest = options.tp * options.pp
    if min(options.tp, options.pp, options.ep) < 1 or min(options.gpus, options.dp) < 0:
        raise ValueError(
            f"gpus, dp, tp, pp and ep must be numbers of ranks, not {options.gpus}, {options.dp}, {options.tp}, "
            f"{options.pp} and {options.ep}"
        )
    if options.gpus and options.gpus % rest:
        raise ValueError(
            f"pp·tp = {options.pp}·{options.tp} = {rest} does not divide {options.gpus} GPUs, but "
            f"{options.gpus // rest * rest or rest} GPUs would do"
        )
    dp = options.dp or (options.gpus // rest if options.gpus else 1)
    if options.gpus and dp * rest != options.gpus:
        raise ValueError(
            f"pp·dp·tp = {options.pp}·{dp}·{options.tp} = {dp * rest} is not {options.gpus} GPUs, but "
            f"dp={options.gpus // rest} would be"
        )
    if dp * rest > MOST:
        raise ValueError(f"{dp * rest} GPUs are too many to plan for, {MOST} are the most")
    return Grid(dp=dp, tp=options.tp, pp=options.pp, ep=options.ep)


def listing() -> str:
    """Return the models and clusters, one line each."""
    lines = ["models"]
    for name in inventory.names():
        model = inventory.get(name)
        lines.append(f"  {name:<22}{model.count:>7} matrices  {model.parameters / 1e9:>8.2f} B parameters")
    lines += ["", "clusters"]
    for name in network.presets():
        cluster = network.preset(name)
        lines.append(f"  {name:<22}{cluster.domain:>7} ranks at {cluster.inside.bandwidth / 1e9:.4g} GB/s")
    return "\n".join(lines)


def text(found: Plan) -> str:
    """Return a plan as a table, totals and assumptions."""
    grid, totals = found.grid, found.totals
    head = (
        f"{found.model.name}: {totals['matrices']} matrices, {totals['parameters'] / 1e9:.4g} B parameters, on "
        f"{grid.size} ranks of {found.cluster.name} (pp {grid.pp}, dp {grid.dp}, tp {grid.tp}, ep {grid.ep})"
    )
    rows = [("layer", "shape", "count", "a rank", "layout", "MB", "Gflop", "ms", "GB", "others, ms")]
    marks = _marks(found)
    for layer in found.layers:
        chosen = layer.chosen
        rows.append(
            (
                layer.held.layer.name,
                "×".join(map(str, layer.held.layer.shape)),
                str(layer.held.layer.count),
                str(layer.held.count),
                _named(chosen),
                f"{chosen.sent / 1e6:.4g}",
                f"{chosen.flops / 1e9:.4g}",
                f"{1e3 * chosen.seconds:.3g}",
                f"{chosen.memory / 1e9:.3g}",
                "  ".join(_other(other, marks) for other in layer.others),
            )
        )
    why = [f"{mark} not chosen: {reason}" for reason, mark in marks.items()]
    table = [*_aligned(rows), *why]
    return "\n".join([head, "", *table, "", *_summed(found), "", "Assumed:", *_lines(found.assumptions)])


#: Marks of reasons, in the order in which they are met.
MARKS = "*†‡§¶"


def _marks(found: Plan) -> dict[str, str]:
    """Return a mark for each reason why a layout is shown and not chosen."""
    reasons = dict.fromkeys(other.reason for layer in found.layers for other in layer.others if other.reason)
    return dict(zip(reasons, MARKS, strict=False))


def _other(choice: Choice, marks: Mapping[str, str]) -> str:
    """Return a layout that was not chosen: its time, a dash where no rate is known, and the mark of the reason."""
    time = f"{1e3 * choice.seconds:.3g}" if isfinite(choice.seconds) else "–"
    return f"{_named(choice)} {time}{marks.get(choice.reason, '')}"


def _named(choice: Choice) -> str:
    """Return the name of a layout, with the size of its teams."""
    return choice.layout if choice.team == 1 else f"{choice.layout}/{choice.team}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align all columns but the first and the last to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, 4, len(widths) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "─" * max(map(len, lines)), *lines[1:]]


def _summed(found: Plan) -> list[str]:
    totals = found.totals
    ms = {name: 1e3 * value for name, value in totals.items() if name.endswith("_seconds") and isinstance(value, float)}
    lines = [
        f"optimizer {ms['optimizer_seconds']:.4g} ms on the busiest rank of stage {totals['stage']}: products "
        f"{ms['compute_seconds']:.4g}, elementwise {ms['elementwise_seconds']:.3g}, layouts "
        f"{ms['exchange_seconds']:.3g}, gather of weights {ms['gather_seconds']:.3g}",
        f"exposed communication {ms['exposed_seconds']:.3g} ms; with all work {ms['visible_seconds']:.4g} ms, "
        f"{100 * totals['share_of_step']:.2g} % of a step of {ms['step_seconds'] + ms['visible_seconds']:.5g} ms",
        f"memory {totals['memory'] / 1e9:.4g} GB a rank, and {totals['workspace'] / 1e9:.2g} GB to work in",
    ]
    for deal in found.deals:
        row = deal.row()
        lines.append(
            f"{deal.group} matrices of stage {deal.stage}: {len(deal.owners.matrices)} on {row['replicas']} owners, "
            f"the busiest {row['seconds_max_over_mean']:.3f} × the mean time and the fullest "
            f"{row['entries_max_over_mean']:.3f} × the mean size, {row['idle']} without any"
            + (f"; {deal.why}" if row["replicas"] > 1 else "")
        )
    return lines


def _lines(texts: Sequence[str]) -> list[str]:
    return [f"- {one}" for one in texts]


def drawn(row: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draw a plan beside the given name, whatever its ending.

    Raises
    ------
    ValueError
        If it cannot be written there.
    """
    from muon_lab.figures import plan as panel
    from muon_lab.figures import save

    try:
        return list(save.save(panel.draw(row), stem.with_suffix("") if stem.suffix in (".pdf", ".png") else stem))
    except OSError as error:
        raise ValueError(f"the figure {str(stem)!r} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
