"""Run the cases of a study with nothing but the numerical libraries: JSON lines in, JSON lines out.

python -m muon_lab.sweep STUDY --dry-run --json > cases.jsonl      # where the command line is installed
python -m muon_lab.studies STUDY < cases.jsonl > rows.jsonl        # where it is not
"""

import json
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Read cases from standard input, write one row a case to standard output; return the exit status."""
    from muon_lab import studies

    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0] in ("-h", "--help"):
        print(f"usage: python -m muon_lab.studies {{{','.join(studies.NAMES)}}} < cases.jsonl > rows.jsonl")
        return 0 if given and given[0] in ("-h", "--help") else 2
    try:
        study = studies.get(given[0])
        cases = [_case(study, number, line) for number, line in enumerate(sys.stdin, 1) if line.strip()]
    except ValueError as error:
        print(f"muon_lab.studies: {error}", file=sys.stderr)
        return 2
    failed = 0
    for case in cases:
        row = study.row(case)
        failed += row["outcome"] == "error"
        print(json.dumps(row, allow_nan=False), flush=True)
    return 1 if failed else 0


def _case(study: "object", number: int, line: str) -> dict[str, object]:
    """Read one line: a point of the grid with all its axes, or a settled case."""
    from muon_lab.nearest import nearest
    from muon_lab.studies.study import Study

    assert isinstance(study, Study)
    try:
        case = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of the cases is not JSON: {error}") from error
    if not isinstance(case, dict):
        raise ValueError(f"line {number} of the cases must be an object, not {type(case).__name__}")
    allowed = (*study.axis_names, *study.facts, "study", "key")
    for name in case:
        if name not in allowed and not name.startswith("_") and name not in ("source", "rows", "cols", "matrix"):
            raise ValueError(f"line {number}: unknown field {name!r}; did you mean {nearest(name, allowed)!r}?")
    missing = [name for name in study.axis_names if name not in case]
    if missing:
        raise ValueError(f"line {number} lacks the axis {missing[0]!r} of study {study.name!r}")
    return case


if __name__ == "__main__":
    # a case gives the same bits wherever it runs, and bits depend on the number of threads
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    sys.exit(main())
