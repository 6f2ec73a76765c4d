r"""Named singular-value profiles: the part of a matrix that an orthogonalizer sees.

A profile gives r = min(m, n) values in descending order. On a command line it is written ``name`` or
``name(number, ...)`` or ``name(parameter=number)``: ``flat``, ``geometric(1e3)``, ``clustered(kappa=1e6, count=4)``.

References
----------
Modes 1 to 4 of LAPACK's test matrix generator ``DLATMS`` are `rank_one`, `one_small`, `geometric` and `linear`.
Silverstein, *The smallest eigenvalue of a large dimensional Wishart matrix*, Ann. Probab. 13 (1985), and Dumitriu &
Edelman, *Matrix models for beta ensembles*, J. Math. Phys. 43 (2002), for the bidiagonal model behind `gaussian`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from muon_lab.nearest import unknown

_GRAMMAR = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*")


@dataclass(frozen=True)
class Parameter:
    """One number of a profile: its name, its value when left out, its closed interval, and whether it is a count."""

    name: str
    default: float
    low: float
    high: float
    whole: bool = False

    def admits(self, value: float) -> bool:
        """Say whether a value is in range."""
        return self.low <= value <= self.high and (not self.whole or value == int(value))


@dataclass(frozen=True)
class Profile:
    """A family of spectra.

    Attributes
    ----------
    name : str
        The name on the command line.
    meaning : str
        One line.
    parameters : tuple of Parameter
        In the order in which they are written.
    draw : callable
        ``draw(m, n, generator, *parameters)`` returns min(m, n) values; only `gaussian` touches the generator.
    """

    name: str
    meaning: str
    parameters: tuple[Parameter, ...]
    draw: Callable[..., Float[np.ndarray, " r"]]


@dataclass(frozen=True)
class Spectrum:
    """A profile with its numbers; ``str`` of it is the text that `parse` reads back.

    Attributes
    ----------
    name : str
        A name of `known`.
    parameters : tuple of float
        All of them, in the order of the profile.

    Raises
    ------
    ValueError
        If the name is not known, or a parameter is missing, spare or out of its range.

    Examples
    --------
    >>> spectrum = Spectrum("geometric", (100.0,))
    >>> print(spectrum, spectrum.values(3, 8, np.random.default_rng(0)))
    geometric(100) [1.   0.1  0.01]
    """

    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        profile = _profile(self.name)
        if len(self.parameters) != len(profile.parameters):
            needed = ", ".join(p.name for p in profile.parameters) or "none"
            raise ValueError(f"spectrum {self.name}: {len(self.parameters)} parameters given, needed {needed}")
        for parameter, value in zip(profile.parameters, self.parameters, strict=True):
            if not parameter.admits(value):
                raise ValueError(
                    f"spectrum {self.name}: {parameter.name} is {_text(value)}, "
                    f"needed {'a whole number from ' if parameter.whole else ''}"
                    f"{_text(parameter.low)} to {_text(parameter.high)}"
                )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_text, self.parameters))})" if self.parameters else self.name

    def values(self, m: int, n: int, generator: np.random.Generator) -> Float[np.ndarray, " r"]:
        """Return the singular values of an m × n matrix, descending, in float64.

        Parameters
        ----------
        m, n : int
            The shape.
        generator : numpy.random.Generator
            Left untouched by every profile but ``gaussian``.

        Raises
        ------
        ValueError
            If m or n is negative.
        """
        if min(m, n) < 0:
            raise ValueError(f"spectrum {self.name}: shape is ({m}, {n}), needed no negative side")
        return _profile(self.name).draw(m, n, generator, *self.parameters)


def parse(text: str) -> Spectrum:
    """Read a spectrum as written on a command line; parameters left out take their default.

    Raises
    ------
    ValueError
        If the text does not follow the grammar, or as for `Spectrum`.

    Examples
    --------
    >>> parse("geometric"), str(parse("clustered(count=2)"))
    (Spectrum(name='geometric', parameters=(1000.0,)), 'clustered(1000, 2)')
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(f"spectrum is {text!r}, needed a name with numbers such as geometric(1e3)")
    profile = _profile(match[1])
    names = [p.name for p in profile.parameters]
    given: dict[str, float] = {}
    for i, item in enumerate(match[2].split(",") if match[2] and match[2].strip() else ()):
        key, _, number = item.rpartition("=")
        key = key.strip() or (names[i] if i < len(names) else f"parameter {i + 1}")
        if key not in names or key in given:
            raise ValueError(f"spectrum {text!r}: unexpected {key}, needed each of ({', '.join(names)}) at most once")
        try:
            given[key] = float(number)
        except ValueError as error:
            raise ValueError(f"spectrum {text!r}: {key} is {number.strip()!r}, needed a number") from error
    return Spectrum(profile.name, tuple(given.get(p.name, p.default) for p in profile.parameters))


def known() -> dict[str, str]:
    """Return every name with its meaning in one line, the defaults of its parameters at the end.

    Examples
    --------
    >>> known()["geometric"]
    '1 to 1/kappa, equally spaced in the logarithm (kappa=1000)'
    """
    return {name: profile.meaning + _defaults(profile) for name, profile in PROFILES.items()}


def gaussian(m: int, n: int, generator: np.random.Generator) -> Float[np.ndarray, " r"]:
    r"""Draw the singular values of an m × n matrix of independent standard normal numbers, without forming it.

    Householder reflections from both sides leave a lower bidiagonal matrix with independent entries,
    :math:`\chi_M, \chi_{M-1}, \dots` on the diagonal and :math:`\chi_{r-1}, \dots, \chi_1` below it, M = max(m, n) and
    r = min(m, n). Its singular values are the positive eigenvalues of the Golub-Kahan tridiagonal matrix, which has
    the same entries beside a zero diagonal: :math:`O(r^2)` work, absolute error of order eps times the largest.

    Examples
    --------
    >>> s = gaussian(64, 256, np.random.default_rng(0))
    >>> bool(abs(s[0] - (16 + 8)) < 1), bool(abs(s[-1] - (16 - 8)) < 1)  # the Marchenko-Pastur edges
    (True, True)
    """
    r, longer = min(m, n), max(m, n)
    if r == 0:
        return np.zeros(0)
    from scipy.linalg import eigvalsh_tridiagonal  # so that parsing does not wait for SciPy

    beside = np.empty(2 * r - 1)
    beside[0::2] = np.sqrt(generator.chisquare(np.arange(longer, longer - r, -1)))
    beside[1::2] = np.sqrt(generator.chisquare(np.arange(r - 1, 0, -1)))
    return np.maximum(eigvalsh_tridiagonal(np.zeros(2 * r), beside)[: r - 1 : -1], 0.0)


def _flat(m: int, n: int, generator: np.random.Generator) -> np.ndarray:
    return np.ones(min(m, n))


def _zero(m: int, n: int, generator: np.random.Generator) -> np.ndarray:
    return np.zeros(min(m, n))


def _geometric(m: int, n: int, generator: np.random.Generator, kappa: float) -> np.ndarray:
    return _log_spaced(min(m, n), kappa)


def _linear(m: int, n: int, generator: np.random.Generator, kappa: float) -> np.ndarray:
    return np.linspace(1.0, 1.0 / kappa, min(m, n))


def _power(m: int, n: int, generator: np.random.Generator, exponent: float) -> np.ndarray:
    return np.arange(1.0, min(m, n) + 1) ** -exponent


def _step(m: int, n: int, generator: np.random.Generator, kappa: float, share: float) -> np.ndarray:
    r = min(m, n)
    return np.where(np.arange(r) < _leading(r, share), 1.0, 1.0 / kappa)


def _clustered(m: int, n: int, generator: np.random.Generator, kappa: float, count: float) -> np.ndarray:
    r = min(m, n)
    clusters = min(int(count), r)
    return _log_spaced(clusters, kappa)[np.arange(r) * clusters // max(r, 1)]


def _one_small(m: int, n: int, generator: np.random.Generator, kappa: float) -> np.ndarray:
    r = min(m, n)
    return np.where(np.arange(r) < max(r - 1, 1), 1.0, 1.0 / kappa)


def _rank_one(m: int, n: int, generator: np.random.Generator, noise: float) -> np.ndarray:
    return np.where(np.arange(min(m, n)) < 1, 1.0, noise)


def _deficient(m: int, n: int, generator: np.random.Generator, share: float, kappa: float) -> np.ndarray:
    r = min(m, n)
    rank = _leading(r, share)
    return np.concatenate([_log_spaced(rank, kappa), np.zeros(r - rank)])


def _log_spaced(count: int, kappa: float) -> Float[np.ndarray, " count"]:
    """Return 1 ... 1 / kappa, equally spaced in the logarithm, with exact ends."""
    values = kappa ** -(np.arange(count) / max(count - 1, 1))
    values[1:][-1:] = 1.0 / kappa
    return values


def _leading(r: int, share: float) -> int:
    """Return the number of leading values that a share stands for: at least one where there is any."""
    return min(r, max(1, round(share * r)))


_KAPPA = Parameter("kappa", 1e3, 1.0, 1e300)

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("gaussian", "of a matrix of independent standard normal numbers", (), gaussian),
        Profile("flat", "all ones: the matrix is already orthogonal", (), _flat),
        Profile("geometric", "1 to 1/kappa, equally spaced in the logarithm", (_KAPPA,), _geometric),
        Profile("linear", "1 to 1/kappa, equally spaced", (_KAPPA,), _linear),
        Profile("power", "i^-exponent for i = 1, 2, ...", (Parameter("exponent", 1.0, 0.0, 100.0),), _power),
        Profile(
            "step",
            "a leading share of ones (one at least), then 1/kappa",
            (_KAPPA, Parameter("share", 0.5, 0.0, 1.0)),
            _step,
        ),
        Profile(
            "clustered",
            "count groups of equal values, 1 to 1/kappa equally spaced in the logarithm",
            (_KAPPA, Parameter("count", 4.0, 1.0, 1e9, whole=True)),
            _clustered,
        ),
        Profile("one_small", "ones, and one last value 1/kappa", (_KAPPA,), _one_small),
        Profile("rank_one", "one 1, and noise everywhere else", (Parameter("noise", 1e-3, 0.0, 1.0),), _rank_one),
        Profile(
            "deficient",
            "a leading share (one at least) from 1 to 1/kappa, equally spaced in the logarithm, then exact zeros",
            (Parameter("share", 0.5, 0.0, 1.0), Parameter("kappa", 10.0, 1.0, 1e300)),
            _deficient,
        ),
        Profile("zero", "all zeros: a frozen layer", (), _zero),
    )
}


def _profile(name: str) -> Profile:
    """Return a profile by name, or list the names there are."""
    if name not in PROFILES:
        raise unknown("spectrum", name, PROFILES)
    return PROFILES[name]


def _defaults(profile: Profile) -> str:
    return f" ({', '.join(f'{p.name}={_text(p.default)}' for p in profile.parameters)})" if profile.parameters else ""


def _text(value: float) -> str:
    """Return the shortest text that reads back as the same number, without a padded exponent."""
    short = f"{value:g}" if float(f"{value:g}") == value or math.isnan(value) else repr(value)
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", short)
