"""Rebuild the figures whose script, style, tables or matplotlib changed; with --check, compare the bytes of all.

Usage: ``python paper_figures/make.py [--check] [--only NAME]``
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
from matplotlib.figure import Figure

import muon_lab.figures
from muon_lab.figures import save
from muon_lab.nearest import unknown

FOLDER = Path(__file__).resolve().parent
SUFFIXES = (".pdf", ".png", ".txt")
COMMAND = "python paper_figures/make.py"


@dataclass(frozen=True)
class Script:
    """One ``fig_NAME.py``: the tables it reads, by their names in it, its caption, and its function to a figure."""

    path: Path
    tables: Mapping[str, str]
    caption: str
    draw: Callable[[Mapping[str, pl.DataFrame]], Figure]

    @property
    def name(self) -> str:
        """The figure's name: that of the file without ``fig_``."""
        return self.path.stem.removeprefix("fig_")


@dataclass(frozen=True)
class Paper:
    """A folder of figure scripts inside a project that has the tables."""

    folder: Path

    @property
    def out(self) -> Path:
        """Where the figures lie."""
        return self.folder / "out"

    @property
    def stamps(self) -> Path:
        """What every figure was made of: one hash each."""
        return self.out / "stamps.json"

    def scripts(self) -> dict[str, Path]:
        """Return the scripts by name."""
        return {path.stem.removeprefix("fig_"): path for path in sorted(self.folder.glob("fig_*.py"))}

    def table(self, relative: str) -> Path:
        """Return the path of a table; raises ``ValueError`` if it isn't there."""
        path = self.folder.parent / relative
        if not path.is_file():
            sweep = Path(relative).with_name("sweep.toml")
            raise ValueError(f"{relative} is missing: make it by python -m muon_lab.sweep {sweep}")
        return path


def load(path: Path) -> Script:
    """Return a script, run."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    return Script(path, module.TABLES, module.CAPTION, module.draw)


def stamp(paper: Paper, script: Script) -> str:
    """Return a hash of all that a figure is made of: script, house style, tables, version of matplotlib."""
    (package,) = muon_lab.figures.__path__
    sources = [script.path, *sorted(Path(package).glob("*.py")), *map(paper.table, script.tables.values())]
    digest = hashlib.sha256(matplotlib.__version__.encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def recorded(paper: Paper) -> dict[str, str]:
    """Return the stamps of the figures that lie in the folder."""
    return dict(json.loads(paper.stamps.read_text())) if paper.stamps.is_file() else {}


def read(paper: Paper, relative: str) -> pl.DataFrame:
    """Return a table; raises ``ValueError`` if the file holds none."""
    try:
        return pl.read_parquet(paper.table(relative))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{relative} is no Parquet table: {str(error).splitlines()[0]}") from error


def draw(paper: Paper, script: Script, folder: Path) -> None:
    """Draw a figure into a folder, and put its caption beside it."""
    tables = {name: read(paper, relative) for name, relative in script.tables.items()}
    try:
        figure = script.draw(tables)
    except ValueError as error:
        raise ValueError(f"{script.path.name}: {error}") from error
    save.save(figure, folder / script.name)
    (folder / f"{script.name}.txt").write_text(script.caption.strip() + "\n", "utf-8")


def rebuild(paper: Paper, scripts: Sequence[Script]) -> dict[str, str]:
    """Draw what is stale, write its stamps, and return what happened to every figure."""
    states = {}
    for script in scripts:
        stamps, current = recorded(paper), stamp(paper, script)
        there = all((paper.out / f"{script.name}{suffix}").is_file() for suffix in SUFFIXES)
        if there and stamps.get(script.name) == current:
            states[script.name] = "fresh"
            continue
        draw(paper, script, paper.out)
        kept = {name: old for name, old in stamps.items() if name in paper.scripts()}
        paper.stamps.write_text(json.dumps(kept | {script.name: current}, indent=2, sort_keys=True) + "\n")
        states[script.name] = "rebuilt"
    return states


def differences(paper: Paper, script: Script) -> list[str]:
    """Draw a figure elsewhere and return one sentence for every file that is not the same in the folder."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        draw(paper, script, Path(folder))
        for suffix in SUFFIXES:
            new, old = Path(folder) / f"{script.name}{suffix}", paper.out / f"{script.name}{suffix}"
            if old.is_file() and old.read_bytes() == new.read_bytes():
                continue
            what = "differs from what its table gives" if old.is_file() else "is missing"
            remedy = f"rm -f {_shown(paper, old)} && {COMMAND} --only {script.name}"
            found.append(f"{_shown(paper, old)} {what} (with matplotlib {matplotlib.__version__}): run {remedy}")
    return found


def leftovers(paper: Paper) -> list[str]:
    """Return one sentence for every file in the folder that no script makes."""
    made = {f"{name}{suffix}" for name in paper.scripts() for suffix in SUFFIXES} | {paper.stamps.name}
    extra = [path for path in sorted(paper.out.glob("*")) if path.name not in made]
    return [f"{_shown(paper, path)} belongs to no figure: remove it" for path in extra]


def overview(scripts: Sequence[Script], states: Mapping[str, str]) -> str:
    """Return the table figure ← tables ← experiments."""
    rows = [("figure", "state", "← table", "← experiment")]
    for script in scripts:
        for index, relative in enumerate(script.tables.values()):
            first = (script.name, states[script.name]) if index == 0 else ("", "")
            rows.append((*first, relative, str(Path(relative).with_name("sweep.toml"))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def chosen(paper: Paper, only: str | None) -> list[Script]:
    """Return the scripts that are asked for; raises ``ValueError`` for an unknown name."""
    scripts = paper.scripts()
    if only is None:
        return [load(path) for path in scripts.values()]
    name = only.removesuffix(".py").removeprefix("fig_")
    if name not in scripts:
        raise unknown("figure", only, scripts)
    return [load(scripts[name])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 well, 1 a difference, 2 bad arguments or a missing table."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="rebuild everything elsewhere and compare the bytes")
    parser.add_argument("--only", metavar="NAME", help="one figure, by the name of its fig_NAME.py")
    given = parser.parse_args(arguments)
    paper = Paper(FOLDER)
    try:
        scripts = chosen(paper, given.only)
        if not given.check:
            print(overview(scripts, rebuild(paper, scripts)))
            return 0
        found = {script.name: differences(paper, script) for script in scripts}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(overview(scripts, {name: "differs" if sentences else "same" for name, sentences in found.items()}))
    sentences = [sentence for part in found.values() for sentence in part]
    sentences += leftovers(paper) if given.only is None else []
    print("\n".join(sentences), end="\n" if sentences else "", file=sys.stderr)
    return 1 if sentences else 0


def _shown(paper: Paper, path: Path) -> str:
    return str(path.relative_to(paper.folder.parent))


if __name__ == "__main__":
    raise SystemExit(main())
