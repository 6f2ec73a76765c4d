"""Run the cases of a study with nothing but the numerical libraries: JSON lines in, JSON lines out.

    python -m muon_lab.sweep STUDY --dry-run --json > cases.jsonl      # where the command line is installed
    python -m muon_lab.studies STUDY < cases.jsonl > rows.jsonl        # where it is not

A line is a case of the grid, or a point of it: an object with all axes of the study. Every line is checked before the
first one runs.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muon_lab.nearest import nearest
from muon_lab.studies.study import Case, LeftOut, Study


def main(arguments: Sequence[str] | None = None) -> int:
    """Read cases from standard input, write one row a case to standard output; return the exit status."""
    from muon_lab import studies
    from muon_lab.studies.running import run_case

    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0] in ("-h", "--help"):
        print(f"usage: python -m muon_lab.studies {{{','.join(studies.NAMES)}}} < cases.jsonl > rows.jsonl")
        return 0 if given and given[0] in ("-h", "--help") else 2
    try:
        study = studies.get(given[0])
        cases = [case for number, line in enumerate(sys.stdin, 1) if line.strip() for case in read(study, number, line)]
    except (ValueError, LeftOut) as error:
        print(f"muon_lab.studies: {error}", file=sys.stderr)
        return 2
    failed = 0
    try:
        for case in cases:
            row = run_case(study.name, case)
            failed += row["outcome"] == "error"
            print(json.dumps(row, allow_nan=False), flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


def read(study: Study, number: int, line: str) -> Iterator[Case]:
    """Yield the settled cases of one line; raises ``ValueError`` that names the line."""
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of the cases is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"line {number} of the cases must be an object, not {type(given).__name__}")
    for name in given:
        if name not in (allowed := (*study.axis_names, *study.facts, "source", "rows", "cols")) and name[0] != "_":
            raise ValueError(f"line {number}: unknown field {name!r}; did you mean {nearest(name, allowed)!r}?")
    missing = [name for name in study.axis_names if name not in given]
    if missing:
        raise ValueError(f"line {number} lacks the axis {missing[0]!r} of study {study.name!r}")
    try:
        yield from study.settle(*_point(study, given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"line {number}: {error}") from error


def _point(study: Study, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the point of the grid that a line stands for, and the file of its matrix."""
    point = {name: default[0] if given[name] is None else given[name] for name, default in study.defaults.items()}
    for name in ("source", "spectrum"):
        if name in point and given.get("matrix"):
            point[name] = f"{point[name].partition(':')[0]}:{given['matrix']}"
    if "_path" not in given:
        return point, None
    from muon_lab.studies.sources import File

    return point, File(given["_path"])


if __name__ == "__main__":
    sys.exit(main())
