r"""Where a published table comes from: computed again from its parameters, and read backwards where it has none.

Forwards, `report` computes every table with a known `Design` again and compares it digit by digit. Backwards,
`explain` asks of any table whether it can be a minimax composition at all. A quintic that rises to M at q, falls to m
at r > q and rises again is the best approximation of the constant (M + m)/2 on the interval [l, u] with p(l) = m and
p(u) = M (`implied`), so a row says on which interval it is optimal, and what it leaves there. In a minimax composition
the next row is made for exactly that: the largest value of one row, times the safety factor, is the upper end of the
next. Where this fails there is nothing to look for; where it holds, the first row gives the parameters away (its upper
end is the safety factor, its lower end the cushion, its centre the lower bound), and they are tried.
"""

import argparse
import contextlib
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product
from typing import Any, NoReturn

from mpmath import mp

from muon_lab.polar import minimax, schedules
from muon_lab.polar.schedules import Coefficients, Design, Schedule

#: Relative to 1, how far apart two ends may be that are one and the same but for four printed decimals and for the
#: share of an interval that a safety factor gives away (see `_broken`).
CHAINED = 5e-3

#: A table whose numbers have more decimals than this is printed in full precision.
MOST_DECIMALS = 8

#: Digits that a float64 solver leaves in a step whose interval is not yet narrow: what agrees to as many does follow.
SOLVED = 13

#: Relative deviation up to which computed numbers count as the printed ones, some digits aside.
FOUND = 1e-3


#: The classical steps: the best polynomials in the limit l -> u = 1.
_LIMITS = ((3 / 2, -1 / 2, 0.0), (15 / 8, -10 / 8, 3 / 8))


@dataclass(frozen=True)
class Implied:
    """What one row is optimal for.

    Attributes
    ----------
    lower, upper : float
        The interval.
    centre : float
        The constant that it approximates there.
    ripple : float
        Its largest error there, relative to the centre.
    low, high : float
        Its smallest and its largest value there.
    """

    lower: float
    upper: float
    centre: float
    ripple: float
    low: float
    high: float


@dataclass(frozen=True)
class Explanation:
    """What is found out about a table.

    Attributes
    ----------
    name : str
        Of the schedule.
    rows : tuple of Implied or None
        What each step is optimal for; None for a step that is so nowhere.
    chain : tuple of float
        For each step but the first, the end of its interval over what the step before makes of the same end: 1 in a
        minimax composition without a safety factor, and that factor with one. Of a quintic the upper end; of a cubic,
        which is taken to be made for the upper end that it meets, the lower one. NaN where there is no interval.
    design : Design, optional
        The parameters found.
    follows, numbers : int
        How many of the table's numbers these parameters give to the last printed digit, and of how many.
    digits : int
        How many leading digits every number has in common with the computed one.
    verdict : str
        One sentence.
    """

    name: str
    rows: tuple[Implied | None, ...]
    chain: tuple[float, ...]
    design: Design | None
    follows: int
    numbers: int
    digits: int
    verdict: str


def report(names: tuple[str, ...] | None = None) -> list[dict[str, str | int | float | bool]]:
    """Compute the tables whose parameters are known again, and compare every number that their sources print.

    Parameters
    ----------
    names : tuple of str, optional
        Schedules; all of `schedules.known` and `schedules.circulating` that carry a design by default.

    Returns
    -------
    list of dict
        One a number: ``schedule``, ``row`` (from 1) and ``coefficient`` (a, b, c) say which; ``printed`` and
        ``computed`` (20 digits) are texts; ``unit`` is the last printed place, for tables in full precision that of
        the float64; ``off`` is printed minus computed in that unit; ``follows`` whether rounding the computed number
        gives the printed one; ``digits`` how many leading digits the two have in common, 17 at most.

    Examples
    --------
    >>> rows = report(("polar_express",))
    >>> sum(row["follows"] for row in rows), len(rows)
    (23, 24)
    >>> [(row["row"], row["coefficient"], row["printed"], row["computed"][:8]) for row in rows if not row["follows"]]
    [(1, 'a', '8.2051', '8.205160')]
    """
    if names is None:
        names = tuple(n for n in (*schedules.known(), *schedules.circulating()) if schedules.get(n).design)
    return [row for name in names for row in _compared(schedules.get(name))]


def _compared(schedule: Schedule) -> Iterator[dict[str, str | int | float | bool]]:
    """Yield the comparison of every number of a table with its design."""
    design = schedule.design
    if design is None:
        raise ValueError(f"schedule {schedule.name!r} has no design to compute it from; `explain` looks for one")
    exact = minimax.rows(replace(design, decimals=None))
    for index, (row, computed) in enumerate(zip(schedule.rows, exact, strict=False), start=1):
        for coefficient, printed, number in zip("abc", row, computed, strict=True):
            if number == 0:
                continue  # a cubic prints two
            unit, off = _deviation(printed, number, design.decimals)
            yield {
                "schedule": schedule.name,
                "row": index,
                "coefficient": coefficient,
                "printed": repr(printed) if design.decimals is None else f"{printed:.{design.decimals}f}",
                "computed": mp.nstr(number, 20),
                "unit": unit,
                "off": off,
                "follows": abs(off) <= 0.5,
                "digits": _common(off * unit / printed),
            }


def _deviation(printed: float, number: Any, decimals: int | None) -> tuple[float, float]:
    """Return the unit of the last printed place and how many of them separate a printed number from the exact one."""
    with mp.workdps(minimax.DIGITS):
        if decimals is None:
            unit = mp.mpf(math.ulp(printed))
            return float(unit), float((mp.mpf(printed) - number) / unit)
        unit = mp.mpf(10) ** -decimals
        return float(unit), float((mp.mpf(repr(printed)) - number) / unit)


def _common(relative: float) -> int:
    """Return the number of leading digits that a relative deviation leaves, 17 at most."""
    return 17 if relative == 0 else min(17, math.floor(-math.log10(abs(relative))))


def explain(schedule: Schedule) -> Explanation:
    """Look for the parameters of a table, from its numbers alone.

    Parameters
    ----------
    schedule : Schedule
        Of which the coefficients of all its steps are used; a design that it carries is not looked at.

    Examples
    --------
    >>> found = explain(schedules.get("cans"))
    >>> found.design.name, found.follows, found.numbers
    ('minimax(lower=0.001,decimals=4)', 15, 15)
    >>> explain(schedules.get("quintic")).verdict
    'no parameters found: not a minimax composition (step 1 is centred at 0.6500, needed 1, or more with a cushion)'
    """
    table = schedule.coefficients
    fitted = _intervals(table)
    chain = _chain(table, fitted)
    numbers = sum(1 for row in table for x in row if x)
    reason = _broken(table, fitted, chain)
    if reason is None:
        trials = [(*_agreement(table, design), design) for design in _candidates(table, fitted)]
        near = [trial for trial in trials if trial[1] <= FOUND]
        if near:
            follows, apart, design = max(near, key=lambda trial: (trial[0], -trial[1]))
            digits = _common(apart)
            verdict = f"{design.name} gives {follows} of {numbers} numbers to the last printed digit, all to {digits}"
            return Explanation(schedule.name, fitted, chain, design, follows, numbers, digits, verdict)
        reason = f"none of the {len(trials)} parameters that step 1 suggests gives its numbers"
    verdict = f"no parameters found: not a minimax composition ({reason})"
    return Explanation(schedule.name, fitted, chain, None, 0, numbers, 0, verdict)


def implied(row: Coefficients, upper: float | None = None) -> Implied | None:
    r"""Return what one polynomial is optimal for, None if nothing.

    A quintic with a maximum M at q and a minimum m at r > q takes both once more, p(l) = m and p(u) = M: four points of
    equioscillation about (M + m)/2. A cubic has three, l, q and u with p(l) = p(u) = m: one interval for every u > q.

    Parameters
    ----------
    row : (a, b, c)
        The polynomial.
    upper : float, optional
        The upper end for a cubic, needed there; a quintic has its own.

    Examples
    --------
    >>> best = minimax.fit(0.1, 1)
    >>> found = implied(tuple(float(x) for x in best.coefficients))
    >>> round(found.lower, 12), round(found.upper, 12), round(found.centre, 12)
    (0.1, 1.0, 1.0)
    """
    with mp.workdps(minimax.DIGITS):
        turns = _turns(row)
        if len(turns) != (2 if row[2] else 1) or (not row[2] and (upper is None or upper <= turns[0])):
            return None
        high = minimax.value(row, turns[0])
        if row[2]:
            low = minimax.value(row, turns[1])
            last = [x for x in _again(row, turns[0]) if x > turns[1]]
            first = [x for x in _again(row, turns[1]) if 0 < x < turns[0]]
        else:
            low = minimax.value(row, mp.mpf(upper))
            last, first = [mp.mpf(upper)], [x for x in _partners(row, mp.mpf(upper)) if 0 < x < turns[0]]
        if not (first and last):
            return None
        ends = (first[0], last[0], (high + low) / 2, (high - low) / (high + low), low, high)
        return Implied(*(float(x) for x in ends))


def _turns(row: Coefficients) -> list[Any]:
    """Return the distinct positive critical points, ascending."""
    a, b, c = (mp.mpf(x) for x in row)
    if c == 0:
        return [mp.sqrt(-a / (3 * b))] if a * b < 0 else []
    under = 9 * b**2 - 20 * a * c
    if under <= 0:
        return []
    squares = sorted((-3 * b + sign * mp.sqrt(under)) / (10 * c) for sign in (-1, 1))
    return [mp.sqrt(y) for y in squares if y > 0]


def _again(row: Coefficients, turn: Any) -> list[Any]:
    """Return where a quintic takes the value of a critical point again: p(x) - p(t) over (x - t)^2 is a cubic."""
    _, b, c = (mp.mpf(x) for x in row)
    square = [c, 2 * turn * c, b + 3 * turn**2 * c, 2 * turn * b + 4 * turn**3 * c]
    return _real(mp.polyroots(square, maxsteps=200, extraprec=200))


def _partners(row: Coefficients, x: Any) -> list[Any]:
    """Return where a cubic takes the value at x again: p(y) - p(x) over y - x is a quadratic."""
    a, b, _ = (mp.mpf(y) for y in row)
    return _real(mp.polyroots([b, b * x, a + b * x**2], maxsteps=200, extraprec=200))


def _real(roots: list[Any]) -> list[Any]:
    return [mp.re(x) for x in roots if abs(mp.im(x)) < mp.mpf(10) ** -(mp.dps // 2)]


def _intervals(table: tuple[Coefficients, ...]) -> tuple[Implied | None, ...]:
    """Return what each step is optimal for; a cubic meets the largest value of the step before, the first one 1."""
    found: list[Implied | None] = []
    upper: float | None = 1.0
    for row in table:
        found.append(implied(row, upper))
        upper = found[-1].high if found[-1] else None
    return tuple(found)


def _chain(table: tuple[Coefficients, ...], fitted: tuple[Implied | None, ...]) -> tuple[float, ...]:
    """Return, for each step but the first, the end of its interval over what the step before makes of that end."""

    def ratio(before: Implied | None, row: Coefficients, after: Implied | None) -> float:
        if before is None or after is None:
            return math.nan
        return after.upper / before.high if row[2] else after.lower / before.low

    return tuple(ratio(before, row, after) for before, row, after in zip(fitted, table[1:], fitted[1:], strict=False))


def _broken(
    table: tuple[Coefficients, ...], fitted: tuple[Implied | None, ...], chain: tuple[float, ...]
) -> str | None:
    """Return why the steps cannot be a minimax composition, or None.

    With a safety factor s every ratio of upper ends is s, but for the last step, which may go without; where safety is
    applied within the composition, an interval also reaches further than the step before leaves it, by s at most.
    """
    first = fitted[0]
    if table[0] in _LIMITS:
        return "step 1 is what a minimax step becomes as its interval closes about 1"
    if first is None:
        return "step 1 is optimal on no interval"
    cubic = not table[0][2]
    if not cubic and first.centre < 1 - CHAINED and not _level(fitted):
        return f"step 1 is centred at {first.centre:.4f}, needed 1, or more with a cushion"
    safe = 1.0 if cubic else first.upper
    for step, ratio in enumerate(chain, start=2):
        least = min(1.0, safe) if step == len(table) else safe
        if not (least - CHAINED <= ratio <= safe**2 + CHAINED or math.isnan(ratio)):
            return f"step {step} is made for {ratio:.4f} times what step {step - 1} leaves, needed {safe:.4f}"
    return None


def _level(fitted: tuple[Implied | None, ...]) -> bool:
    """Return whether every step has one and the same largest value: a ceiling."""
    highs = [row.high for row in fitted if row]
    return len(highs) == len(fitted) and max(highs) <= (1 + FOUND) * min(highs)


def _candidates(table: tuple[Coefficients, ...], fitted: tuple[Implied | None, ...]) -> Iterator[Design]:
    """Yield the designs that the first step suggests, with its parameters rounded to a few digits."""
    first = fitted[0]
    if first is None:
        return
    cubic, decimals = not table[0][2], _decimals(table)
    safe = 1.0 if cubic else first.upper
    centred = abs(first.centre - 1) < FOUND
    lower, cushions, ceilings = first.lower / safe, [0.0], [None]
    if not centred and _level(fitted):
        ceilings = _plain(first.high)
    elif not centred:
        # before it was centred on [l, u] the step had centre 1 and p(u) = 1 + ripple, then 2/(p(l) + p(u)) = centre
        rest, slope = 2 / first.centre - (1 + first.ripple), table[0][0] * safe / first.centre
        lower, cushions = rest / slope, [*_plain(first.lower / first.upper), first.lower / first.upper]
    safeties = _plain(safe - 1) if abs(safe - 1) > FOUND else [0.0]
    for low, cushion, ceiling, safety in product(_plain(lower), cushions, ceilings, safeties):
        for applied in schedules.APPLIED if safety else schedules.APPLIED[:1]:
            with contextlib.suppress(ValueError):  # a rounded value outside its range
                yield Design(low, len(table), 3 if cubic else 5, cushion, safety, applied, ceiling, decimals)


def _plain(x: float) -> list[Any]:
    """Return a number rounded to one, two, three and four significant digits, each value once."""
    return list(dict.fromkeys(float(f"{x:.{digits}g}") for digits in (1, 2, 3, 4)))


def _decimals(table: tuple[Coefficients, ...]) -> int | None:
    """Return the number of decimals to which a table is printed, None for full precision."""
    longest = max(-int(Decimal(repr(x)).as_tuple().exponent) for row in table for x in row)
    return longest if longest <= MOST_DECIMALS else None


def _agreement(table: tuple[Coefficients, ...], design: Design) -> tuple[int, float]:
    """Return how many numbers follow from a design to the last printed digit, and the largest relative deviation."""
    exact = minimax.rows(replace(design, decimals=None))
    pairs = [
        (x, y) for row, computed in zip(table, exact, strict=True) for x, y in zip(row, computed, strict=True) if x
    ]
    units = [(x, *_deviation(x, y, design.decimals)) for x, y in pairs]
    return sum(abs(off) <= 0.5 for _, _, off in units), max(abs(off * unit / x) for x, unit, off in units)


# --- to read ----------------------------------------------------------------------------------------------------------


def text(names: Sequence[str] = ()) -> str:
    """Return what is known of tables, as text: parameters, how far they give the numbers, where these come from.

    Parameters
    ----------
    names : sequence of str
        Schedules; all of `schedules.known` and `schedules.circulating` by default.

    Raises
    ------
    ValueError
        For an unknown schedule.

    Examples
    --------
    >>> print(text(["cans"]))
    table  steps  worst error  numbers that follow  common digits
    cans       5         0.12             15 of 15              4
    <BLANKLINE>
    cans: minimax(lower=0.001,decimals=4)
      Grishina et al., Chebyshev-type polynomials, CANS (arXiv 2506.10935), as shipped by Emerging-Optimizers
    """
    chosen = [schedules.get(name) for name in names or (*schedules.known(), *schedules.circulating())]
    compared: dict[str, list[dict[str, Any]]] = {
        schedule.name: [*map(dict, _compared(schedule))] for schedule in chosen if schedule.design
    }
    head = ("table", "steps", "worst error", "numbers that follow", "common digits")
    parts = [_aligned([head, *(_line(schedule, compared.get(schedule.name, [])) for schedule in chosen)])]
    parts += [_told(schedule) for schedule in chosen]
    wrong = [row for found in compared.values() for row in found if not row["follows"] and row["digits"] < SOLVED]
    if wrong:
        columns = ("schedule", "row", "coefficient", "printed", "computed", "digits")
        cells = [[str(row[column]) for column in columns] for row in wrong]
        parts.append(_aligned([("does not follow", *columns[1:]), *cells]))
    return "\n\n".join(parts)


def _line(schedule: Schedule, compared: list[dict[str, Any]]) -> tuple[str, ...]:
    if schedule.design is None:
        return (schedule.name, str(schedule.steps), "", "", "")
    follow = f"{sum(row['follows'] for row in compared)} of {len(compared)}"
    digits = min(row["digits"] for row in compared)
    return (schedule.name, str(schedule.steps), f"{schedule.design.worst:.2g}", follow, str(digits))


def _told(schedule: Schedule) -> str:
    """Return the parameters of a table, or why it has none, and its source."""
    told = schedule.design.name if schedule.design else explain(schedule).verdict
    source = textwrap.fill(schedule.source, 116, break_on_hyphens=False)
    return f"{schedule.name}: {told}\n{textwrap.indent(source, '  ')}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, the first column left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(2, f"muon_lab.polar.provenance: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m muon_lab.polar.provenance",
        description="Say where tables of coefficients come from, and how many of their numbers follow from parameters.",
        epilog=f"Names: {', '.join((*schedules.known(), *schedules.circulating()))}; or a design such as "
        "'minimax(lower=1e-3)'.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a schedule (default: every published one)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is known of the tables that are named, or of all; return the exit status.

    It is 2 for an unknown name, 130 after Ctrl-C, and 0 where the reader leaves early.
    """
    names = _parser().parse_args(arguments).names
    try:
        print(text(names), flush=True)
    except ValueError as error:
        print(f"muon_lab.polar.provenance: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("muon_lab.polar.provenance: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
