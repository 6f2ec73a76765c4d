"""Try every layout: ``python -m muon_lab.parallel``, or ``torchrun --nproc-per-node 4 -m muon_lab.parallel``."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line a layout, on rank 0 alone; return 1 if bytes or bits are not what they must be."""
    options = _parser().parse_args(arguments)
    try:
        from muon_lab.parallel import trial
        from muon_lab.parallel.worlds import torchrun

        started = torchrun.number("WORLD_SIZE") if os.environ.get("WORLD_SIZE") else 4
        ranks = started if options.ranks is None else options.ranks
        tried = trial.Trial(options.rows, options.cols, options.dim, options.schedule, options.steps, options.repeats)
        found = trial.run(tried, ranks, options.backend)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if os.environ.get("RANK", "0") != "0":
        return 0
    shape = f"{tried.rows}×{tried.cols} float32, {('rows', 'columns')[tried.dim]} over {ranks} ranks"
    print(f"{shape} ({options.backend}), {tried.steps} steps of {tried.schedule}")
    print("layout        calls   sent KiB  closed form  from one rank  from the factor  milliseconds")
    for name in found[0]:
        each = [rank[name] for rank in found]
        sent, asked = (sum(getattr(one, field) for one in each) / ranks / 1024 for field in ("sent", "asked"))
        slowest = 1e3 * max(one.seconds for one in each)
        apart = "equal bits" if each[0].bit_equal else f"{each[0].apart:.1e}"
        print(
            f"{name:12} {each[0].calls:6} {sent:10.1f} {asked:12.1f} {apart:>14} {each[0].error:16.3f} {slowest:13.1f}"
        )
    exact = all(rank[name].bit_equal for rank in found for name in ("duplicated", "owner"))
    counted = all(one.sent == one.asked for rank in found for one in rank.values())
    if not (exact and counted):
        print("error: a layout sent other bytes or returned other bits than it must", file=sys.stderr)
    return 0 if exact and counted else 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m muon_lab.parallel", description="Try every layout on ranks.")
    parser.add_argument("--ranks", type=int, help="number of ranks; under torchrun there are as many as it started")
    parser.add_argument("--backend", default="gloo", help="threads, gloo or nccl (default: gloo)")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=256)
    parser.add_argument("--dim", type=int, default=0, choices=(0, 1), help="the axis that is cut: 0 rows, 1 columns")
    parser.add_argument("--schedule", default="quintic")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="timed updates; the median counts")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
