"""The house style: sizes, fonts, one colour a method, one marker a number format, ticks that say what they mean."""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from matplotlib import colors, ticker
from matplotlib.axes import Axes

#: Widths of one and of two columns of a paper, in inches.
SINGLE, DOUBLE = 3.25, 6.75

#: Secondary text, reference lines and whatever belongs to no method.
GREY = "#666666"

#: What differs from matplotlib's defaults. The fonts ship with matplotlib: no figure depends on a machine's own.
HOUSE: dict[Any, Any] = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
}

#: Okabe and Ito's palette (https://jfly.uni-koeln.de/color/) without its yellow, which white paper swallows; then, as
#: there are more methods than colours, three of Tol's muted scheme (https://sronpersonalpages.nl/~pault/), and hues
#: between them for exact methods and for designs.
METHODS = {
    "svd": "#000000",
    "qdwh": "#b2182b",
    "newton": "#8b5a2b",
    "halley": "#e6007e",
    "gram_eigh": "#1b6f78",
    "simple": "#d55e00",
    "quintic": "#0072b2",
    "polar_express": "#009e73",
    "cans": "#cc79a7",
    "aol": "#e69f00",
    "deepseekv4": "#56b4e9",
    "cubic5": "#882255",
    "cubic": "#8c8c8c",
    "taylor": "#999933",
    "minimax": "#7a3fb0",
}

#: Tol's dark colours, for the names that nobody has given one.
_OTHERS = ("#332288", "#117733", "#aa4499", "#661100", "#225555", "#663333")

#: Number formats: greys for plain floats, then a hue a width, from Tol's medium-contrast scheme, dark before light.
FORMATS = {
    "fp64": "#000000",
    "fp32": "#333333",
    "tf32": "#4d4d4d",
    "fp16": "#5f5f5f",
    "bf16": "#a6a6a6",
    "fp8_e4m3": "#117766",
    "fp8_e5m2": "#44aa99",
    "mxfp8_e4m3": "#004488",
    "mxfp8_e5m2": "#6699cc",
    "mxfp6_e2m3": "#997700",
    "mxfp6_e3m2": "#eecc66",
    "mxfp4_e2m1": "#994455",
    "nvfp4": "#ee99aa",
}

#: Dashes where a method begins as another one does, so that the other one shows through.
_DASHES = {"deepseekv4": (0, (2.2, 1.6))}

#: How a form of a schedule is told from the plain loop: dashes, and how far its markers are filled. Every form applies
#: the same polynomial, so it keeps the schedule's colour.
_FORMS = {"plain": ("-", 1.0), "gram": ((0, (4, 1.5)), 0.0), "auto": ((0, (1, 1.2)), 0.45)}

#: How far the colour of a schedule is kept where the matrix is divided by another norm than Frobenius'.
_STARTS = {"frobenius": 1.0, "spectral": 0.85, "schatten4": 0.7, "aol": 0.5}

#: The lower bound, as a power of ten, at which a design has its full colour: one that reaches less deep is lighter.
_DEEPEST = -4

#: One marker a number format.
MARKERS = {"float64": "o", "float32": "s", "bfloat16": "^", "float16": "v", "tf32": "P", "mxfp8_e4m3": "D"}
_OTHER_MARKER = "X"

#: How an artist looks: keyword arguments of matplotlib's.
Look = dict[str, Any]

#: A line style of matplotlib's: a name, or an offset and lengths.
Dashes = Any

Which = Literal["x", "y"]


@contextmanager
def house() -> Iterator[None]:
    """Hold the house style, whatever the user's own matplotlib settings are; also a decorator."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(HOUSE)
        yield


def schedule(method: str) -> str:
    """Return the family of what a method applies: its name without form and start, `minimax` for every design.

    Examples
    --------
    >>> schedule("gram@2,3:aol-1:quintic"), schedule("auto:minimax(lower=1e-3)"), schedule("svd")
    ('quintic', 'minimax', 'svd')
    """
    name = method.rpartition(":")[2]
    return "minimax" if name.startswith("minimax(") else name


def colour(method: str) -> str:
    """Return the colour of a method, the same in every figure; that of an unknown name depends on the name alone.

    A method has the colour of its schedule: lighter where it starts in another way, and lighter for a design that
    reaches less deep.

    Examples
    --------
    >>> colour("quintic") == colour("gram@2:quintic") == "#0072b2"
    True
    >>> colour("my_schedule") == colour("my_schedule") != colour("quintic")
    True
    >>> colour("schatten4-1:quintic"), colour("minimax(lower=1e-2)")
    ('#4d9cc9', '#af8cd0')
    """
    *prefixes, name = method.split(":")
    strength = math.prod(_STARTS.get(prefix.partition("-")[0], 1.0) for prefix in prefixes)
    family = schedule(name)
    shade = METHODS.get(family) or _other(family)
    return tint(shade, strength * _depth(name)) if strength * _depth(name) < 1 else shade


def _depth(name: str) -> float:
    """Return how far a design keeps its colour: 0.4 for a lower bound of 0.1, 1 for 1e-4."""
    lower = re.search(r"\blower\s*=\s*([-+.\de]+)", name) if name.startswith("minimax(") else None
    return 1.0 if lower is None else min(1.0, max(0.3, (1 - math.log10(float(lower[1]))) / (1 - _DEEPEST)))


def format_colour(name: str) -> str:
    """Return the colour of a number format, the same in every figure; that of an unknown name depends on it alone.

    Examples
    --------
    >>> format_colour("mxfp8_e4m3")
    '#004488'
    >>> format_colour("posit8") == format_colour("posit8") != format_colour("mxfp8_e4m3")
    True
    """
    return FORMATS.get(name) or _other(name)


def _other(name: str) -> str:
    return _OTHERS[hashlib.sha256(name.encode()).digest()[0] % len(_OTHERS)]


def dashes(method: str) -> Dashes:
    """Return the line style of a method.

    Examples
    --------
    >>> dashes("quintic"), dashes("gram@3:quintic")
    ('-', (0, (4, 1.5)))
    """
    form = _form(method)
    return _DASHES.get(method, "-") if form == "plain" else _FORMS[form][0]


def face(method: str) -> str:
    """Return the colour inside a marker of a method: its own in the plain loop, white or light in another form.

    Examples
    --------
    >>> face("quintic") == colour("quintic"), face("gram:quintic")
    (True, '#ffffff')
    """
    filled = _FORMS[_form(method)][1]
    return colour(method) if filled == 1 else tint(colour(method), filled)


def _form(method: str) -> str:
    form = method.partition(":")[0].partition("@")[0]
    return form if ":" in method and form in _FORMS else "plain"


def marker(dtype: str) -> str:
    """Return the marker of a number format.

    Examples
    --------
    >>> marker("bfloat16"), marker("posit8")
    ('^', 'X')
    """
    return MARKERS.get(dtype, _OTHER_MARKER)


def tint(shade: str, strength: float) -> str:
    """Mix a colour with white: strength 1 leaves it, 0 gives white.

    Examples
    --------
    >>> tint("#000000", 0.5)
    '#808080'
    """
    red, green, blue = (1 - strength * (1 - part) for part in colors.to_rgb(shade))
    return colors.to_hex((red, green, blue))


def in_order(names: Iterable[str], known: Iterable[str] = METHODS) -> list[str]:
    """Sort names as `METHODS` (or `MARKERS`) has them; unknown ones follow by alphabet, variants follow their schedule.

    Examples
    --------
    >>> in_order(["mine", "quintic", "svd", "svd", "cans", "auto:quintic"])
    ['svd', 'quintic', 'auto:quintic', 'cans', 'mine']
    >>> in_order(["bfloat16", "float64"], MARKERS)
    ['float64', 'bfloat16']
    """
    rank = {name: index for index, name in enumerate(known)}
    return sorted(set(names), key=lambda name: (rank.get(schedule(name), len(rank)), schedule(name), ":" in name, name))


def ticks(
    axes: Axes, which: Which, values: Iterable[float | int], label: Callable[[float], str] = "{:g}".format
) -> None:
    """Put ticks at the given values and nowhere else."""
    axis, places = axes.xaxis if which == "x" else axes.yaxis, sorted(set(values))
    axis.set_major_locator(ticker.FixedLocator(places))
    axis.set_major_formatter(ticker.FixedFormatter([label(place) for place in places]))
    axis.set_minor_locator(ticker.NullLocator())


def log2(
    axes: Axes, which: Which, values: Iterable[float | int], label: Callable[[float], str] = "{:g}".format
) -> None:
    """Make an axis binary, with ticks at the given values: 1 2 4 8, never 2×10⁰."""
    _scale(axes, which, 2)
    ticks(axes, which, values, label)


def log10(axes: Axes, which: Which, low: float, high: float, most: int = 6) -> None:
    """Make an axis decimal from ``low`` to ``high``, with at most ``most`` ticks, all at powers of ten.

    Less than a decade apart, no two powers of ten need lie inside: then the ticks are at 1, 2 and 5 times one, or at
    every second or third of those, the power of ten itself among them.
    """
    if which == "x":
        axes.set_xlim(low, high)
    else:
        axes.set_ylim(low, high)
    _scale(axes, which, 10)  # after the limits: matplotlib refuses to choose them where all the data are 0
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last > first:
        stride = math.ceil((last - first + 1) / most)
        ticks(axes, which, [10.0**power for power in range(last, first - 1, -stride)], power_of_ten)
    else:
        near = [digit * 10.0**power for power in range(first - 2, last + 2) for digit in (1, 2, 5)]
        inside = [place for place, value in enumerate(near) if low <= value <= high]
        stride = max(1, math.ceil(len(inside) / most))
        start = next((place for place in inside if place % 3 == 0), 0)  # of a power of ten
        ticks(axes, which, [near[place] for place in inside if (place - start) % stride == 0])


def power_of_ten(value: float) -> str:
    """Write a power of ten.

    Examples
    --------
    >>> power_of_ten(0.001), power_of_ten(1.0)
    ('$10^{-3}$', '1')
    """
    power = round(math.log10(value))
    return "1" if power == 0 else f"$10^{{{power}}}$"


def _scale(axes: Axes, which: Which, base: int) -> None:
    if which == "x":
        axes.set_xscale("log", base=base)
    else:
        axes.set_yscale("log", base=base)
