"""From axes to cases: the product, what a product cannot say, and what is checked before anything runs."""

import itertools
import tomllib
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from muon_lab import studies
from muon_lab.nearest import nearest, unknown
from muon_lab.studies.study import Case, LeftOut, Study

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Experiment:
    """A question put to a study: the values of its axes.

    Attributes
    ----------
    name : str
        Names the folder of the results.
    study : str
        A study of `studies.NAMES`.
    axes : mapping
        Values of the axes that differ from the study's defaults.
    exclude : tuple of mapping
        Points to leave out: all those whose axes have one of the given values, for every axis named.
    zips : tuple of mapping
        Axes that run together instead of being crossed; their values have equal lengths.
    question : str
        One sentence; the study's own by default.
    """

    name: str
    study: str
    axes: Mapping[str, Values]
    exclude: tuple[Mapping[str, Values], ...] = ()
    zips: tuple[Mapping[str, Values], ...] = ()
    question: str = ""

    def with_axes(self, axes: Mapping[str, Values]) -> "Experiment":
        """Return this experiment with other values on some axes; a zip whose axes are all among them gives way.

        Raises
        ------
        ValueError
            If only some axes of a zip are given.
        """
        for block in self.zips:
            missing = sorted(set(block) - set(axes))
            if missing and len(missing) < len(block):
                given = sorted(set(block) & set(axes))
                raise ValueError(
                    f"axes {', '.join(block)} of experiment {self.name!r} run together: with {', '.join(given)} give "
                    f"{', '.join(missing)} too"
                )
        zips = tuple(block for block in self.zips if not set(block) <= set(axes))
        return replace(self, axes={**self.axes, **axes}, zips=zips)


class Plan(NamedTuple):
    """The cases of an experiment by key, in grid order, and what a user should know before they run."""

    cases: dict[str, Case]
    notes: tuple[str, ...]


def points(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield the points of the grid, the last axis fastest, without those that are excluded.

    Examples
    --------
    >>> ab = Experiment("e", "blockwise", {"tp": (2, 4), "dim": (0, 1)}, exclude=({"tp": (4,), "dim": (0,)},))
    >>> [(point["dim"], point["tp"]) for point in points(ab)]
    [(0, 2), (1, 2), (1, 4)]
    """
    study = studies.get(experiment.study)
    values = study.defaults | dict(experiment.axes)
    groups: list[list[dict[str, Any]]] = []
    seen: set[str] = set()
    for name in study.axis_names:
        if name in seen:
            continue
        block = next((block for block in experiment.zips if name in block), {name: values[name]})
        seen |= set(block)
        groups.append([dict(zip(block, row, strict=True)) for row in zip(*block.values(), strict=True)])
    for parts in itertools.product(*groups):
        point = {name: value for part in parts for name, value in part.items()}
        if not any(_excluded(point, block) for block in experiment.exclude):
            yield {name: point[name] for name in study.axis_names}


def _excluded(point: Mapping[str, Any], block: Mapping[str, Values]) -> bool:
    return all(point[name] in values for name, values in block.items())


def plan(experiment: Experiment, file: Any = None) -> Plan:
    """Check every point and return the cases: equal ones once, those that cannot be measured here as notes.

    Raises
    ------
    ValueError
        For any value that is wrong, and if no case is left.
    """
    study = studies.get(experiment.study)
    cases: dict[str, Case] = {}
    notes: list[str] = []
    everything = list(points(replace(experiment, exclude=())))
    for block in experiment.exclude:
        if not any(_excluded(point, block) for point in everything):
            notes.append(f"an [[exclude]] of {experiment.name!r} leaves nothing out: {dict(block)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for point in points(experiment):
            try:
                cases |= {study.key(case): case for case in study.settle(point, file)}
            except LeftOut as reason:
                notes.append(f"left out: {reason}")
    notes += [str(warning.message) for warning in caught]
    if not cases:
        raise ValueError("; ".join(dict.fromkeys(notes)) or f"the grid of study {study.name!r} has no point")
    return Plan(cases, tuple(dict.fromkeys(notes)))


def axis_types(study: Study) -> dict[str, type]:
    """Return the type of one value of every axis."""
    return {name: typing.get_args(hint)[0] for name, hint in typing.get_type_hints(study.axes).items()}


def checked(study: Study, where: str, axes: Mapping[str, Any]) -> dict[str, Values]:
    """Return axis values as tuples of the right type; raises ``ValueError`` that says where they came from."""
    types = axis_types(study)
    result = {}
    for name, given in axes.items():
        if name not in types:
            raise ValueError(
                f"{where}: study {study.name!r} has no axis {name!r}: did you mean {nearest(name, types)!r}? "
                f"Axes: {', '.join(types)}"
            )
        values = _listed(given)
        if not values:
            raise ValueError(f"{where}: axis {name!r} has no value")
        for value in values:
            fits = isinstance(value, types[name]) or (types[name] is float and isinstance(value, int))
            if isinstance(value, bool) or not fits:
                kind = {int: "whole numbers", float: "numbers", str: "texts"}[types[name]]
                raise ValueError(f"{where}: axis {name!r} takes {kind}, not {value!r}")
        result[name] = values
    return result


def _listed(given: Any) -> Values:
    """Return one value or many as a tuple of plain Python values: a list, a range and a NumPy array are many."""
    if hasattr(given, "tolist"):  # NumPy arrays and numbers
        given = given.tolist()
    many = isinstance(given, list | tuple | range)
    return tuple(value.tolist() if hasattr(value, "tolist") else value for value in (given if many else (given,)))


def read(path: Path) -> Experiment:
    """Read an experiment file.

    Raises
    ------
    ValueError
        If it is missing, is not TOML, or has a key, axis or value that does not exist; says which, and the nearest.
    """
    if not path.is_file():
        found = [str(p) for p in sorted(Path("experiments").glob("*/sweep.toml"))]
        hint = f"; did you mean {nearest(path, found)}?" if found else ""
        raise ValueError(f"there is no experiment file {str(path)!r}{hint}")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return parsed(content, str(path), path.resolve().parent.name if path.name == "sweep.toml" else path.stem)


def parsed(content: Mapping[str, Any], where: str, name: str) -> Experiment:
    """Turn the content of an experiment file into an experiment; raises ``ValueError``."""
    allowed = ("question", "study", "axes", "exclude", "zip")
    for key in content:
        if key not in allowed:
            raise ValueError(f"{where}: {unknown('key', key, allowed)}")
    if "study" not in content:
        raise ValueError(f"{where}: the key 'study' is missing; it names one of {', '.join(studies.NAMES)}")
    try:
        study = studies.get(content["study"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    blocks = {key: content.get(key, []) for key in ("exclude", "zip")}
    for key, block in blocks.items():
        if not isinstance(block, list) or not all(isinstance(item, dict) for item in block):
            raise ValueError(f"{where}: {key!r} must be a list of tables, written [[{key}]]")
    if not isinstance(content.get("axes", {}), dict):
        raise ValueError(f"{where}: 'axes' must be a table, written [axes]")
    zips = tuple(checked(study, where, block) for block in blocks["zip"])
    twice = [axis for axis in study.axis_names if sum(axis in block for block in (*zips, content.get("axes", {}))) > 1]
    if twice:
        raise ValueError(
            f"{where}: axis {twice[0]!r} stands more than once in [axes] and [[zip]]; its values belong in one"
        )
    for block in zips:
        lengths = {axis: len(values) for axis, values in block.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{where}: the axes of a [[zip]] need equally many values, but have {lengths}")
    return Experiment(
        name=name,
        study=study.name,
        axes=checked(study, where, content.get("axes", {})),
        exclude=tuple(checked(study, where, block) for block in blocks["exclude"]),
        zips=zips,
        question=str(content.get("question", "")),
    )
