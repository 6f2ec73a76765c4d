"""What users write in TOML files, read with errors that say which file, which key and what would fit."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muon_lab.nearest import nearest, unknown

Table = Mapping[str, Any]


def toml(path: Path) -> Table:
    """Read a TOML file.

    Raises
    ------
    ValueError
        If there is none, or it is not TOML.
    """
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def json_object(path: Path) -> Table:
    """Read a JSON file that holds an object.

    Raises
    ------
    ValueError
        If there is none, or it is something else.
    """
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        if str(error).startswith("there is no file"):
            raise
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def only(table: Table, where: str, allowed: Iterable[str]) -> None:
    """Refuse keys that nobody reads.

    Examples
    --------
    >>> only({"shpae": [2, 3]}, "own.toml", ("name", "shape"))
    Traceback (most recent call last):
    ...
    ValueError: own.toml: unknown key 'shpae': did you mean 'shape'? Known: name, shape
    """
    names = tuple(allowed)
    for key in table:
        if key not in names:
            raise ValueError(f"{where}: {unknown('key', key, names)}")


def positive(table: Table, key: str, where: str, default: float | None = None) -> float:
    """Return a positive number.

    Examples
    --------
    >>> positive({"bandwidth_gb": 50}, "bandwidth_gb", "mine.toml")
    50.0
    """
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {key!r} must be a positive number, not {value!r}")
    return float(value)


def whole(table: Table, key: str, where: str, default: int | None = None) -> int:
    """Return a whole number of at least 1.

    Examples
    --------
    >>> whole({}, "count", "own.toml", default=1)
    1
    """
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key!r} must be a whole number of at least 1, not {value!r}")
    return value


def text(table: Table, key: str, where: str, default: str | None = None) -> str:
    """Return a text that is not empty, or the default.

    Examples
    --------
    >>> text({"name": "mine"}, "name", "mine.toml")
    'mine'
    """
    value = table.get(key, default)
    if not isinstance(value, str) or (not value and value is not default):
        raise ValueError(f"{where}: {key!r} must be a text, not {value!r}")
    return value


def tables(table: Table, key: str, where: str) -> list[Table]:
    """Return a list of tables, of which there must be one."""
    value = table.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{where}: {key!r} must be a list of tables, written [[{key}]]")
    return value


def _text(path: Path) -> str:
    if not path.is_file():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = f", did you mean {nearest(path.name, beside)!r}?" if beside else ""
        raise ValueError(f"there is no file {str(path)!r}{hint}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error
