"""The name a user most likely meant."""

import difflib
from collections.abc import Iterable


def nearest(wanted: object, known: Iterable[str]) -> str:
    """Return the known name closest to the wanted one, or "" if nothing is known.

    Examples
    --------
    >>> nearest("quntic", ["simple", "quintic"])
    'quintic'
    """
    names = list(known)
    lowered = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(str(wanted).lower(), lowered, n=1, cutoff=0.0)
    return lowered[close[0]] if close else ""


def unknown(what: str, wanted: object, known: Iterable[str]) -> ValueError:
    """Return the error for an unknown name: what was given, the nearest valid choice, and all of them.

    Examples
    --------
    >>> str(unknown("schedule", "quntic", ("simple", "quintic")))
    "unknown schedule 'quntic': did you mean 'quintic'? Known: simple, quintic"
    """
    names = list(known)
    return ValueError(f"unknown {what} {wanted!r}: did you mean {nearest(wanted, names)!r}? Known: {', '.join(names)}")
