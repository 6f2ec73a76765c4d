"""``python -m muon_lab.sweep``: from a question to a table and a figure in one command."""

import contextlib
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from muon_lab import studies
from muon_lab.sweep import arguments, fingerprint
from muon_lab.sweep.arguments import Help, Options, Request
from muon_lab.sweep.grid import Experiment, Plan, plan

OK, FAILED, BAD_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status: 0 all well, 1 a case errored, 2 bad arguments, 130 interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _answered(given)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _say("muon_lab.sweep: interrupted before the first case")
        return INTERRUPTED
    except ValueError as error:
        _say(f"muon_lab.sweep: {error}")
        return BAD_ARGUMENTS
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _answered(given: list[str]) -> int:
    """Do what a command line asks for; return the exit status."""
    try:
        if given[:1] == ["fingerprint"]:
            fingerprint.run(given[1:])
            return OK
        request = arguments.read(given)
        plans = _planned(request)
        return _dry_run(request, plans) if request.options.dry_run else _run(request, plans)
    except Help as answer:
        if str(answer):
            print(answer)
        return OK


def _planned(request: Request) -> tuple[Plan, ...]:
    """Check every case of every experiment before the first one runs."""
    file = None
    if request.options.matrices is not None:
        from muon_lab.studies import sources

        file = sources.File(str(request.options.matrices))
    plans = tuple(plan(experiment, file) for experiment in request.experiments)
    for note in dict.fromkeys(note for each in plans for note in each.notes):
        _say(f"note: {note}")
    return plans


def _dry_run(request: Request, plans: tuple[Plan, ...]) -> int:
    for experiment, planned in zip(request.experiments, plans, strict=True):
        cases = list(planned.cases.values())
        if request.options.json:
            for case in cases:
                print(json.dumps(case, allow_nan=False))
            continue
        study = studies.get(experiment.study)
        print(f"{experiment.name}: {len(cases)} cases of study {study.name!r}, {_estimate(request, experiment, cases)}")
        for case in cases[:3]:
            shown = {name: case[name] for name in (*study.axis_names, *study.facts) if case.get(name) is not None}
            print("  " + "  ".join(f"{name}={value}" for name, value in shown.items()))
    return OK


def _estimate(request: Request, experiment: Experiment, cases: list[dict[str, Any]]) -> str:
    """Say how much arithmetic the cases are, and how long that takes by the pace of the rows that are there."""
    study = studies.get(experiment.study)
    work = f"about {sum(map(study.work, cases)) / 1e9:.3g} Gflop"
    path = _folder(request, experiment) / "cases.jsonl"
    if not path.is_file():
        return f"{work}; the time shows once a first row is there"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.endswith("}")]
    known = {row["key"]: row["seconds"] for row in rows if "seconds" in row}
    missing = [case for case in cases if study.key(case) not in known]
    pace = statistics.median(known.values()) if known else 0.0
    return f"{work}; {len(cases) - len(missing)} are there already, the others take about {pace * len(missing):.3g} s"


def _folder(request: Request, experiment: Experiment) -> Path:
    return request.folder / experiment.name if len(request.experiments) > 1 else request.folder


def _run(request: Request, plans: tuple[Plan, ...]) -> int:
    from muon_lab.sweep import executors
    from muon_lab.sweep.run import Stopped

    options = request.options
    most = max(len(planned.cases) for planned in plans)
    timed = all(studies.get(experiment.study).timed for experiment in request.experiments)
    jobs = 1 if timed else min(options.jobs or executors.cores(), most)
    place = executors.cluster(options.cluster) if options.cluster else executors.local(jobs)
    old = signal.signal(signal.SIGTERM, _terminated)
    try:
        with place as executor:
            return _each(request, plans, executor, jobs)
    except Stopped as stopped:
        _say(f"muon_lab.sweep: stopped at the first error: {stopped}")
        return FAILED
    except KeyboardInterrupt:
        _say(f"\nmuon_lab.sweep: interrupted; the rows so far are in {request.folder}, the same command resumes there")
        return INTERRUPTED
    except executors.BrokenExecutor:
        _say("muon_lab.sweep: a worker died (out of memory?); the same command goes on, --jobs 1 shows at which case")
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, old)


def _each(request: Request, plans: tuple[Plan, ...], executor: Any, jobs: int) -> int:
    from muon_lab.sweep.run import run

    errors, pictures, notes = 0, [], dict[str, None]()
    for experiment, planned in zip(request.experiments, plans, strict=True):
        result = run(
            experiment,
            planned,
            _folder(request, experiment),
            executor,
            jobs=jobs,
            fresh=request.options.fresh,
            strict=request.options.strict,
            progress=None if request.options.quiet else _bar,
        )
        errors += result.errors
        notes |= dict.fromkeys(note for note in result.table["note"].to_list() if note)
        picture = _drawn(result)
        pictures += picture
        _report(request.options, experiment, result, picture)
    for note in (note for note in notes if not any(note in planned.notes for planned in plans)):
        _say(f"note: {note}")
    if not request.options.json and not request.options.quiet:
        look = [str(path) for path in pictures if path.suffix == ".png"]
        print(f"Look at {', '.join(look)}" if look else f"Look at {request.folder}")
    return FAILED if errors else OK


def _report(options: Options, experiment: Experiment, result: Any, pictures: list[Path]) -> None:
    from muon_lab.sweep import tables

    if options.json:
        for row in result.table.iter_rows(named=True):
            print(json.dumps(row, allow_nan=False))
    elif not options.quiet:
        print(f"{experiment.question or result.study.question}\n")
        print(tables.text(tables.summary(result.study, result.table)))
        files = [result.path, *pictures]
        now = f"{result.measured} of them measured now"
        if result.measured:
            now += f" with {result.seconds:.1f} s of work in {result.wall:.1f} s"
        print(f"\n{result.table.height} cases, {now}\n{'  '.join(map(str, files))}\n")


def _drawn(result: Any) -> list[Path]:
    """Draw the figure of a study's table beside it."""
    from muon_lab.figures import panels, save

    if result.study.name not in panels.names() or not (result.table["outcome"] == "ok").any():
        return []
    try:
        figure = panels.draw(result.study.name, result.table)
    except ValueError as reason:  # the table is there, and a picture of it does not exist
        _say(f"note: no figure: {reason}")
        return []
    return list(save.save(figure, result.path.parent / result.study.name))


@contextlib.contextmanager
def _bar(done: int, total: int, name: str) -> Iterator[Callable[[], object]]:
    """Show progress on a terminal; nothing without one."""
    from tqdm import tqdm

    with tqdm(initial=done, total=total, desc=name, unit="case", disable=None, leave=False) as bar:
        yield bar.update


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
