"""The card: what was found about an optimizer, aspect by aspect, and the nearest setting of `optim.Muon`.

A finding has a value only if a measurement decides it. What the steps do not show, or what fits none of the known
forms, has none; the sentence then says which of the two it is.
"""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muon_lab.studies.fingerprint.setting import Setting

#: Columns of a printed card.
WIDTH = 120

#: Columns of the names on it, and of a shown argument.
LABEL, SHOWN = 17, 60

#: Columns before a line of code.
INDENT = 4

#: A setting that ends up farther away than this does not reproduce an optimizer: roundings of bfloat16 leave 0.02.
NEAR = 0.05


@dataclass(frozen=True)
class Finding:
    """One aspect of an optimizer.

    Attributes
    ----------
    said : str
        The finding in words, with numbers.
    value : any
        The finding as data, None if it is unknown.

    Examples
    --------
    >>> Finding("sum", "sum").known, Finding("unknown: no state of the shape of the weight").known
    (True, False)
    """

    said: str
    value: Any = None

    @property
    def known(self) -> bool:
        """Whether a measurement decided it."""
        return self.value is not None


@dataclass(frozen=True)
class Card:
    """What the steps of an optimizer say about it.

    Attributes
    ----------
    optimizer, kwargs, adapter : str, mapping, str
        What was examined, and how it took its parameters.
    findings : mapping
        By name of the aspect, in the order in which they are shown.
    setting : Setting, optional
        The nearest setting of `optim.Muon`; None if the optimizer is not of its kind.
    difference : mapping
        For each shape, how far weights are apart after a random trajectory under both, relative to the way gone.
    remarks : tuple of str
        What the setting does not cover.
    """

    optimizer: str
    kwargs: Mapping[str, Any]
    adapter: str
    findings: Mapping[str, Finding]
    setting: "Setting | None"
    difference: Mapping[str, float]
    remarks: tuple[str, ...] = ()

    @property
    def largest(self) -> float | None:
        """The largest difference over the shapes; None if there is no setting."""
        return max(self.difference.values()) if self.difference else None

    def data(self) -> dict[str, Any]:
        """Return the card as strict JSON has it."""
        nearest = None
        if self.setting is not None:
            nearest = {
                "imports": list(self.setting.imports),
                "code": self.setting.code(),
                "difference": {shape: _strict(value) for shape, value in self.difference.items()},
            }
        return {
            "optimizer": self.optimizer,
            "kwargs": {name: _strict(value) for name, value in self.kwargs.items()},
            "adapter": self.adapter,
            "findings": {
                name: {"known": found.known, "value": _strict(found.value), "said": found.said}
                for name, found in self.findings.items()
            },
            "nearest": nearest,
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        return self.text(WIDTH)

    def text(self, width: int) -> str:
        """Return the card in so many columns, which only lines of code exceed."""
        kwargs = ", ".join(f"{name}={textwrap.shorten(repr(value), SHOWN)}" for name, value in self.kwargs.items())
        flagged = ", its parameters in a group with use_muon=True" if self.adapter == "groups" else ""
        lines = [f"{self.optimizer}({kwargs}){flagged}", ""]
        for name, found in self.findings.items():
            lines += _entry(name.replace("_", " "), found.said, width)
        lines.append("")
        if self.setting is None:
            return "\n".join([*lines, *_entry("nearest", "no setting of optim.Muon is of this kind", width)])
        near = self.largest is not None and self.largest <= NEAR
        lines += ["nearest setting" if near else "nearest setting, which does not reproduce it", ""]
        lines += [" " * INDENT + line if line else "" for line in self.setting.text(width - INDENT).splitlines()]
        apart = ", ".join(f"{value:.1e} for {shape}" for shape, value in self.difference.items())
        said = f"{apart}: weights after a random trajectory, relative to the way gone"
        lines += ["", *_entry("difference", said, width)]
        return "\n".join([*lines, *(line for remark in self.remarks for line in _entry("but", remark, width))])


def _entry(name: str, said: str, width: int) -> list[str]:
    """Return a name and what is said about it, wrapped."""
    label, gap = f"{name:<{LABEL}}", " " * LABEL
    return textwrap.wrap(said, width, initial_indent=label, subsequent_indent=gap, break_on_hyphens=False) or [label]


def _strict(value: Any) -> Any:
    """Return a value that strict JSON can hold: no NaN, text for what has no JSON form."""
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
