"""The nearest setting of `optim.Muon`: built, and written as the call that builds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muon_lab import optim, polar
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.optim import second_moments
from muon_lab.optim.directions import Direction
from muon_lab.polar.schedules import Schedule
from muon_lab.studies.fingerprint.image import Match

#: Columns of the written call.
WIDTH = 110

_ADAPT = {"adamuon": "AdaMuon", "normuon": "NorMuon", "namo": "NAMO"}


@dataclass(frozen=True)
class Setting:
    """Arguments of `optim.Muon`.

    Attributes
    ----------
    plain : mapping
        Those that are numbers, names and truth values.
    match : Match
        The map.
    form : str
        The format of the iteration: ``"fp32"`` for the dtype of the work, ``"float32"`` whatever that is.
    adapt : (str, float), optional
        The second moment and its coefficient.

    Examples
    --------
    >>> from muon_lab.studies.fingerprint.candidates import EXACT
    >>> Setting({"lr": 0.1}, Match(EXACT), "fp32", None).code()
    'optim.Muon(params, lr=0.1, direction=polar.svd())'
    """

    plain: Mapping[str, Any]
    match: Match
    form: str
    adapt: tuple[str, float] | None

    @property
    def imports(self) -> tuple[str, ...]:
        """The lines that the call needs before it."""
        code = self.code()
        wanted = (
            ("import torch", "torch." in code),
            ("from muon_lab import optim, polar" if "polar." in code else "from muon_lab import optim", True),
            (
                f"from muon_lab.arithmetic import {'Exact' if 'Exact(' in code else 'Rounded'}",
                "arithmetic" in self._uses(),
            ),
            ("from muon_lab.polar.schedules import Schedule", "Schedule(" in code),
        )
        return tuple(line for line, needed in wanted if needed)

    def build(self, params: Any) -> "optim.Muon":
        """Return the optimizer."""
        return optim.Muon(params, direction=self._direction(), adapt=self._adapt(), **self.plain)

    def code(self) -> str:
        """Return the call that builds it, in one line."""
        return f"optim.Muon({', '.join(self._arguments())})"

    def __str__(self) -> str:
        return self.text(WIDTH)

    def text(self, width: int) -> str:
        """Return the lines that build it, the imports first; a call of more columns has an argument a line."""
        call, table = self.code(), _schedule_code(self.match.schedule) if "Schedule(" in self.code() else ""
        lines = list(self.imports)
        if table:
            lines += ["", f"table = {_over_lines(table)}"]
            call = call.replace(table, "table")
        if len(call) > width:
            arguments = [argument.replace(table, "table") if table else argument for argument in self._arguments()]
            call = "optim.Muon(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
        return "\n".join([*lines, "", call])

    def _uses(self) -> str:
        """Say whether the call needs an arithmetic."""
        code = self.code()
        return "arithmetic" if "Exact(" in code or "Rounded(" in code else ""

    def _arguments(self) -> list[str]:
        plain = [f"{name}={value!r}" for name, value in self.plain.items()]
        return ["params", *plain, f"direction={self._direction_code()}", *self._adapt_code()]

    def _direction(self) -> Direction:
        argument, schedule, plain = self.match.candidate.argument, self.match.schedule, self._plain_start
        if schedule is None:
            return polar.svd()
        if self.form == "fp32" and plain:
            return argument if argument is not None and self.match.safety == 1.0 else schedule
        return polar.newton_schulz(schedule, self._arithmetic(), self.match.start)

    def _direction_code(self) -> str:
        argument, schedule, plain = self.match.candidate.argument, self.match.schedule, self._plain_start
        if schedule is None:
            return "polar.svd()"
        named = argument is not None and self.match.safety == 1.0
        if self.form == "fp32" and plain:
            return repr(argument) if named else _schedule_code(schedule)
        said = f"polar.schedules.get{argument!r}" if named else _schedule_code(schedule)
        arithmetic = {"fp32": "", "float32": ", Exact(torch.float32)"}.get(self.form, f", Rounded({self.form!r})")
        start = "" if plain else f", start={self.match.start!r}"
        return f"polar.newton_schulz({said}{arithmetic}{start})"

    @property
    def _plain_start(self) -> bool:
        return self.match.start == "frobenius"

    def _arithmetic(self) -> Exact | Rounded:
        if self.form in ("fp32", "float32"):
            return Exact(torch.float32 if self.form == "float32" else None)
        return Rounded(self.form)

    def _adapt(self) -> second_moments.SecondMoment | None:
        if self.adapt is None:
            return None
        name, beta2 = self.adapt
        kind: Any = getattr(optim, _ADAPT[name])
        return kind(beta2=beta2)

    def _adapt_code(self) -> list[str]:
        if self.adapt is None:
            return []
        name, beta2 = self.adapt
        default = second_moments.get(name)
        return [f"adapt={name!r}" if default == self._adapt() else f"adapt=optim.{_ADAPT[name]}(beta2={beta2!r})"]


def _schedule_code(schedule: Schedule | None) -> str:
    """Return a schedule as the call that makes it."""
    assert schedule is not None
    repeated = set(schedule.coefficients) == {schedule.coefficients[0]}
    rows = schedule.coefficients[:1] if repeated else schedule.coefficients
    return f"Schedule('found', {rows!r}, {schedule.steps}, 'repeat_last', {schedule.interval!r}, {schedule.source!r})"


def _over_lines(table: str) -> str:
    """Return the call of a table with a row a line."""
    return table.replace("((", "(\n    (").replace("), (", "),\n    (") if table.count("(") > 4 else table
