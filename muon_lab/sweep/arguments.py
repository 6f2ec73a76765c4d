"""What the command line says: a study, an experiment file or nothing, then values of axes and options.

tyro builds flags and help from a study's axes. What a user can get wrong is looked at first, so that the answer is one
sentence with the nearest valid choice.
"""

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from muon_lab import studies
from muon_lab.nearest import nearest
from muon_lab.studies.study import Study
from muon_lab.sweep import grid
from muon_lab.sweep.grid import Experiment

PROGRAM = "python -m muon_lab.sweep"

#: Axes whose values are sources of matrices.
SOURCES = ("source", "spectrum")

DESCRIPTION = f"""Measure orthogonalized optimizers against exact oracles, one row a case.

{PROGRAM} runs the overview: three headline measurements in under a minute.

{PROGRAM} --list names the studies and experiments.

{PROGRAM} STUDY --help shows the axes of a study.

{PROGRAM} experiments/NAME runs a named experiment, the sweep.toml of a folder; axes given here replace its own.

{PROGRAM} fingerprint --optimizer torch.optim.Muon tells which Muon an optimizer is."""


@dataclass(frozen=True)
class Options:
    """How to run, whatever is measured."""

    jobs: int = 0
    """Worker processes; 0 is one a core, 1 runs in this process. The rows are the same bit for bit."""
    out: Path | None = None
    """Folder of the log, the table and the figures; runs/NAME by default."""
    matrices: Path | None = None
    """Your own matrices, a .safetensors, .npz or torch file: they replace the recorded gradients."""
    dry_run: bool = False
    """Print how many cases there are, the first three and the estimated work, and stop; with --json all cases."""
    fresh: bool = False
    """Measure everything again instead of keeping the rows that are there."""
    json: bool = False
    """Print one JSON object a case on standard output, and nothing else there."""
    strict: bool = False
    """Stop at the first case that errors."""
    quiet: bool = False
    """Print no progress and no summary."""
    cluster: str | None = None
    """Address of a Dask scheduler (tcp://host:8786) whose workers measure the cases."""


@dataclass(frozen=True)
class Request:
    """What is to be run, and how."""

    experiments: tuple[Experiment, ...]
    options: Options
    folder: Path


class Help(Exception):
    """The answer to --help or --list: a text for standard output, empty if it is there already."""


def read(arguments: Sequence[str]) -> Request:
    """Read a command line.

    Raises
    ------
    Help
        If it asks for help or for the list.
    ValueError
        If something in it does not exist or does not fit; one sentence.
    """
    given = list(arguments)
    if "--list" in given:
        raise Help(listing())
    target = given.pop(0) if given and not given[0].startswith("-") else None
    if target is None:
        return _overview(given)
    experiment = _named(target)
    study = studies.get(experiment.study)
    flags = _inspected(given, study, experiment.study)
    values = _parsed(given, study, experiment, target)
    axes = {name: getattr(values.axes, name) for name in flags if name in study.axis_names}
    experiment = experiment.with_axes(axes)
    if values.options.matrices is not None:
        experiment = _with_file(experiment, study, set(axes))
    return Request((experiment,), values.options, values.options.out or Path("runs") / experiment.name)


def listing() -> str:
    """Return the studies and the experiments, one line each."""
    lines = ["studies"]
    lines += [f"  {name:<20}{studies.get(name).question}" for name in studies.NAMES]
    found = sorted(Path("experiments").glob("*/sweep.toml"))
    if found:
        lines += ["", "experiments"]
        for path in found:
            experiment = grid.read(path)
            lines.append(f"  {path}  {experiment.question or studies.get(experiment.study).question}")
    return "\n".join(lines)


def overview() -> tuple[Experiment, ...]:
    """Return the experiments of the overview."""
    import tomllib

    content = tomllib.loads((Path(__file__).parent / "overview.toml").read_text("utf-8"))
    return tuple(grid.parsed(item, "overview.toml", item.pop("name")) for item in content["sweep"])


def _overview(given: list[str]) -> Request:
    _inspected(given, None, "the overview")
    options = with_tyro(given, Options, Options(), PROGRAM, DESCRIPTION)
    experiments = overview()
    if options.matrices is not None:
        experiments = tuple(
            _with_file(experiment, studies.get(experiment.study), set())
            for experiment in experiments
            if any(value.startswith("recorded") for name in SOURCES for value in experiment.axes.get(name, ()))
        )
    return Request(experiments, options, options.out or Path("runs") / "overview")


def _named(target: str) -> Experiment:
    """Return the experiment of a study's name or of a file."""
    if target in studies.NAMES:
        return Experiment(target, target, {})
    if target.endswith(".toml"):
        return grid.read(Path(target))
    if (Path(target) / "sweep.toml").is_file():
        return grid.read(Path(target) / "sweep.toml")
    try:
        studies.get(target)
    except ValueError as error:
        raise ValueError(f"{error}; or give the path of an experiment file (.toml) or of its folder") from error
    raise AssertionError(target)


def _with_file(experiment: Experiment, study: Study, given: set[str]) -> Experiment:
    """Let the user's file stand where the recorded gradients stand, unless the command line names sources itself."""
    axis = next((name for name in SOURCES if name in study.axis_names), None)
    if axis is None:
        raise ValueError(f"study {study.name!r} takes no matrices, so --matrices does not fit")
    if axis in given:
        if not any(value.partition(":")[0] == "file" for value in experiment.axes[axis]):
            raise ValueError(f"--matrices does not fit to --{axis}: none of its values is file or file:PATTERN")
        return experiment
    values = experiment.axes.get(axis, ())
    replaced = tuple(re.sub("^recorded", "file", value) for value in values if value.startswith("recorded"))
    return experiment.with_axes({axis: tuple(dict.fromkeys(replaced)) or ("file",)})


def _inspected(given: Sequence[str], study: Study | None, where: str) -> dict[str, list[str]]:
    """Return the flags of a command line with their values, after checking that they exist and fit."""
    types = grid.axis_types(study) if study else {}
    options = [option.name for option in fields(Options)]
    flags: dict[str, list[str]] = {}
    for word in given:
        if word.startswith("-") and not re.fullmatch(r"-\.?\d.*", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if name in flags:
                raise ValueError(f"{word} is given twice: put its values behind one, as in --tp 2 4")
            flags[name] = [value] if equals else []
            if name not in ("h", "help", *types, *options):
                raise ValueError(_unknown_flag(name, word, study, where))
        elif not flags:
            raise ValueError(f"{word!r} does not belong here: the study comes first, then --flags with their values")
        else:
            flags[name].append(word)
    for name, values in flags.items():
        _check_values(name, values, types)
    return flags


def _unknown_flag(name: str, word: str, study: Study | None, where: str) -> str:
    options = [option.name for option in fields(Options)]
    if study is None:
        if any(name in studies.get(known).axis_names for known in studies.NAMES):
            return f"{word} is an axis of a study: name the study first, as in {PROGRAM} blockwise --tp 2 4"
        return f"{where} has no option {word}: did you mean --{_flag(nearest(name, options))}?"
    near = nearest(name, [*study.axis_names, *options])
    return (
        f"study {study.name!r} has no axis {word}: did you mean --{_flag(near)}? "
        f"Axes: {', '.join('--' + axis for axis in study.axis_names)}"
    )


def _check_values(name: str, values: list[str], types: dict[str, type]) -> None:
    known = {option.name: option.type for option in fields(Options)}
    if name in types:
        if not values:
            raise ValueError(f"--{_flag(name)} needs at least one value")
        for value in values:
            try:
                types[name](value)
            except ValueError as error:
                kind = {int: "whole numbers", float: "numbers"}[types[name]]
                raise ValueError(f"--{_flag(name)} takes {kind}, not {value!r}") from error
    elif known.get(name) is bool:
        if values:
            raise ValueError(f"--{_flag(name)} takes no value, but got {values[0]!r}")
    elif name in known:
        if len(values) != 1:
            raise ValueError(f"--{_flag(name)} takes one value, but got {len(values)}")
        if known[name] is int and not values[0].isdecimal():
            raise ValueError(f"--{_flag(name)} takes a whole number from 0, not {values[0]!r}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _parsed(given: Sequence[str], study: Study, experiment: Experiment, target: str) -> Any:
    import tyro

    unnamed = tyro.conf.arg(name="")
    start = study.axes(**(study.defaults | dict(experiment.axes)))
    both = make_dataclass(
        "Arguments",
        [
            ("axes", Annotated[study.axes, unnamed], field(default=start)),
            ("options", Annotated[Options, unnamed], field(default=Options())),
        ],
        frozen=True,
    )
    description = f"{experiment.question or study.question}\n\n{_columns(study)}"
    return with_tyro(given, both, both(), f"{PROGRAM} {target}", description)


def _columns(study: Study) -> str:
    return "Columns of a row:\n\n" + "\n\n".join(
        f"{column.name} [{column.unit}] — {column.meaning}" for column in study.columns
    )


def with_tyro(given: Sequence[str], kind: Any, default: Any, program: str, description: str) -> Any:
    """Parse with tyro, which prints its help itself; its boxed complaint becomes one sentence."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                args=list(given),
                default=default,
                prog=program,
                description=description,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise Help from None
        body = complaint.getvalue().partition("───\n")[0] or complaint.getvalue()
        words = " ".join(re.sub(r"[╭╮╰╯│─]", " ", body).split())
        raise ValueError(words) from None
