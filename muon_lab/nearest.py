"""The name a user most likely meant."""

import difflib
from collections.abc import Iterable


def nearest(wanted: object, known: Iterable[str]) -> str:
    """Return the known name closest to the wanted one, or "" if nothing is known.

    The first name that contains the wanted text is what was meant; of names without it, the most similar one.

    Examples
    --------
    >>> nearest("quntic", ["simple", "quintic"])
    'quintic'
    >>> nearest("e4m3", ["e2m3", "fp8_e4m3", "mxfp8_e4m3"])
    'fp8_e4m3'
    """
    lowered: dict[str, str] = {}
    for name in known:
        lowered.setdefault(name.lower(), name)
    text = str(wanted).lower()
    containing = [name for name in lowered if text in name]
    close = containing or difflib.get_close_matches(text, lowered, n=1, cutoff=0.0)
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
