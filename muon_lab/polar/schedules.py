r"""Polynomial schedules as data: the numbers of a Newton-Schulz iteration, where they come from and what they promise.

An odd polynomial :math:`p(x) = a x + b x^3 + c x^5` acts on the singular values of a matrix alone,
:math:`p(U \Sigma V^T) = U p(\Sigma) V^T`, so a schedule is understood as a map of one number before it meets a matrix.

Symbols
-------
sigma : a singular value after division by the Frobenius norm, so in (0, 1].
(a, b, c) : the coefficients of one step.

Source of the six published tables as used in training: NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026),
``orthogonalized_optimizers/muon_utils.py``; the origin of each is named with it. Where a table follows from a few
parameters, they stand beside it as a `Design`; `polar.minimax` computes such tables, `polar.provenance` compares them.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from muon_lab.nearest import unknown
from muon_lab.polar import tuned

Coefficients = tuple[float, float, float]
Past = Literal["repeat_last", "cycle", "refuse"]

#: Where the division of the argument by 1 + safety acts: in every step but the last, seen by the steps after it; or in
#: the finished table, without or with its last row.
Applied = Literal["within", "after", "after_all"]
APPLIED: tuple[Applied, ...] = ("within", "after", "after_all")

#: How many steps a design has unless it is said.
DESIGN_STEPS = 5

#: An input below this (after normalisation) is left aside when a schedule's band is judged: at a condition number
#: above 100 every published five-step table is still on its way.
JUDGED_FROM = 1e-2

#: A step that halves what an earlier step count had reached is a collapse, not progress.
COLLAPSE = 0.5


#: A singular value above this has escaped: in exact arithmetic no schedule takes a number of (0, 1] there.
ESCAPED = 2.0


class ScheduleWarning(UserWarning):
    """A schedule is used where it gives a worse answer than its user can expect."""


@dataclass(frozen=True)
class Design:
    r"""The parameters that fix a table of minimax steps; `muon_lab.polar.minimax` says how.

    Attributes
    ----------
    lower : float
        The smallest normalised singular value that the table is made for, between 0 and 1.
    steps : int
        How many polynomials.
    degree : {3, 5}
        Of each.
    cushion : float
        A step is fitted on [max(l, cushion u), u] instead of [l, u]; 0 for none.
    safety : float
        The argument is divided by 1 + safety; 0 for none.
    applied : {"within", "after", "after_all"}
        Where that happens: see `Applied`.
    ceiling : float, optional
        Every step is scaled so that its largest value is this; None leaves it centred at 1.
    decimals : int, optional
        The finished table is rounded to so many decimals; None for the nearest float64.
    worst : float, optional
        The proven largest :math:`|1 - p|` on [lower, 1] of the table after so many steps, rounded up; None before it
        is known.

    Examples
    --------
    >>> Design(1e-3, 5, cushion=0.02, safety=0.02).name
    'minimax(lower=0.001,cushion=0.02,safety=0.02)'
    """

    lower: float
    steps: int = DESIGN_STEPS
    degree: int = 5
    cushion: float = 0.0
    safety: float = 0.0
    applied: Applied = "within"
    ceiling: float | None = None
    decimals: int | None = None
    worst: float | None = None

    def __post_init__(self) -> None:
        within = (
            ("lower", "above 0 and below 1", 0 < self.lower < 1),
            ("degree", "3 or 5", self.degree in (3, 5)),
            ("cushion", "at least 0 and below 1", 0 <= self.cushion < 1),
            ("safety", "at least 0 and below 1", 0 <= self.safety < 1),
            ("applied", " or ".join(APPLIED), self.applied in APPLIED),
            ("ceiling", "at least 1 and below 2", self.ceiling is None or 1 <= self.ceiling < 2),
            ("decimals", "a positive integer", self.decimals is None or _positive(self.decimals)),
            ("steps", "a positive integer", _positive(self.steps)),
        )
        for parameter, needed, fine in within:
            if not fine:
                raise ValueError(f"{parameter} of a minimax design must be {needed}, not {getattr(self, parameter)!r}")

    @property
    def name(self) -> str:
        """The text under which `get` makes this design: what differs from the defaults, steps aside."""
        given = (f"{f.name}={getattr(self, f.name)}" for f in _PARAMETERS if getattr(self, f.name) != f.default)
        return f"minimax({','.join(given)})"


_PARAMETERS = [field for field in fields(Design) if field.name not in ("steps", "worst")]


def _positive(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


@dataclass(frozen=True)
class Schedule:
    r"""A composition of odd quintics, :math:`p = p_k \circ \dots \circ p_1`.

    Attributes
    ----------
    name : str
        As in `get`.
    rows : tuple of (a, b, c)
        The table of the source, in order.
    steps : int
        How many polynomials are applied.
    past : {"repeat_last", "cycle", "refuse"}
        The source's rule for more steps than rows ("refuse": the source fixes the length).
    interval : (float, float)
        The normalised singular values that the whole table is meant for: the lower end is the source's design bound
        where it states one, else the smallest value from which the table settles in [0.7, 1.3] (`simple`, which never
        settles: [0.68, 1.21]); the upper end is below 1 only where larger values change their sign.
    source : str
        Where the numbers come from.
    design : Design, optional
        The parameters from which the first `design.steps` rows follow, where they are known.

    Examples
    --------
    >>> quintic = get("quintic")
    >>> quintic.steps, quintic.past, round(quintic.slope, 2)
    (5, 'cycle', 492.75)
    >>> print(f"{quintic.map(0.5):.4f}")
    0.9859
    >>> low, high = quintic.band(1e-2)
    >>> print(f"[{low:.4f}, {high:.4f}]")
    [0.9778, 1.0318]
    """

    name: str
    rows: tuple[Coefficients, ...]
    steps: int
    past: Past
    interval: tuple[float, float]
    source: str
    design: Design | None = None

    def __post_init__(self) -> None:
        if not _positive(self.steps):
            raise ValueError(f"steps of schedule {self.name!r} must be a positive integer, not {self.steps!r}")
        if self.past == "refuse" and self.steps != len(self.rows):
            raise ValueError(
                f"schedule {self.name!r} has exactly {len(self.rows)} steps, by its source; {self.steps} were asked for"
            )

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """The (a, b, c) of every step that is applied, after the rule past the table."""
        count = len(self.rows)
        if self.past == "cycle":
            return tuple(self.rows[i % count] for i in range(self.steps))
        return tuple(self.rows[min(i, count - 1)] for i in range(self.steps))

    @property
    def slope(self) -> float:
        """The derivative of the composition at zero: the product of the a, the gain of a tiny singular value."""
        return float(np.prod([a for a, _, _ in self.coefficients]))

    @property
    def order(self) -> int | None:
        r"""The order q at which the last step converges to 1, :math:`1 - p(1 - e) \sim C e^q`; None unless p(1) = 1.

        Exact, from the decimal text of the coefficients. Order 1 says nothing of the rate: C is the slope at 1.

        Examples
        --------
        >>> {name: get(name).order for name in ("cubic", "taylor", "deepseekv4", "simple")}
        {'cubic': 2, 'taylor': 3, 'deepseekv4': 2, 'simple': None}
        """
        a, b, c = (Fraction(repr(float(x))) for x in self.coefficients[-1])
        if a + b + c != 1:
            return None
        derivatives = (a + 3 * b + 5 * c, 6 * b + 20 * c, 6 * b + 60 * c, 120 * c)
        return next(order for order, value in enumerate(derivatives, start=1) if value)

    def map(self, sigma: Any) -> Any:
        """Apply the composition to a number or array (float, NumPy, torch, mpmath: whatever multiplies)."""
        for value in self.maps(sigma):
            sigma = value
        return sigma

    def maps(self, sigma: Any) -> Iterator[Any]:
        """Yield the image of a number or array after each step."""
        for a, b, c in self.coefficients:
            square = sigma * sigma
            sigma = sigma * (a + square * (b + square * c))
            yield sigma

    def band(self, low: float, high: float = 1.0) -> tuple[float, float]:
        """Return the smallest and the largest image of [low, high], on a grid of 40,001 points (20,001 of them log)."""
        image = self.map(_grid(low, high))
        return float(image.min()), float(image.max())

    @cached_property
    def headroom(self) -> float:
        """The largest normalised singular value (at most 1) up to which the image stays positive."""
        sigma = _grid(1e-3, 1.0)
        wrong = np.flatnonzero(self.map(sigma) <= 0)
        return float(sigma[wrong[0] - 1]) if wrong.size else 1.0

    @cached_property
    def reach(self) -> float:
        r"""The largest start up to which nothing escapes: :math:`|p| \le 2` on [0, reach]; inf if nothing ever does.

        A singular value that is 1 in exact arithmetic starts a few roundings above it. A reach of 1, as of every
        minimax design without safety, is no headroom: beyond it the steps run away. By bisection, to the last digit,
        with the ends and the critical points of every step's interval.

        Examples
        --------
        >>> for name in ("quintic", "polar_express", "cans", "minimax(lower=1e-3,safety=0.02)"):
        ...     print(name, f"{get(name).reach:.5f}")
        quintic 1.32462
        polar_express 1.01092
        cans 1.00001
        minimax(lower=1e-3,safety=0.02) 1.02168
        """
        inside, outside = 0.0, 1.0
        while not self._escapes(outside):
            if outside > 1e6:
                return math.inf
            inside, outside = outside, 2 * outside
        while inside < (middle := (inside + outside) / 2) < outside:
            inside, outside = (inside, middle) if self._escapes(middle) else (middle, outside)
        return inside

    def _escapes(self, upper: float) -> bool:
        """Return whether an image of [0, upper] is above `ESCAPED` in magnitude, or beyond any number."""
        low, high = 0.0, upper
        for row in self.coefficients:
            low, high = _range(row, low, high)
            if not (math.isfinite(low) and math.isfinite(high)):
                return True
        return max(-low, high) > ESCAPED

    @cached_property
    def caution(self) -> str | None:
        """Why this number of steps is a bad choice, or None: a design that is made for it has none to be better."""
        if self.design is not None and self.steps == self.design.steps:
            return None
        lows = [float(np.abs(image).min()) for image in self.maps(_grid(JUDGED_FROM, min(1.0, 0.99 * self.headroom)))]
        best = max(lows)
        if lows[-1] >= COLLAPSE * best:
            return None
        why = f"; its table of {len(self.rows)} rows starts over, with steps made for tiny values"
        return (
            f"schedule {self.name!r} collapses at {self.steps} steps: singular values in [{JUDGED_FROM:g}, 1] fall as "
            f"low as {lows[-1]:.2g}, after {lows.index(best) + 1} steps they stayed above {best:.2g}"
            + (why if self.past == "cycle" else "")
        )


def _range(row: Coefficients, low: float, high: float) -> tuple[float, float]:
    """Return the smallest and the largest value of one step on an interval; inf where one is not finite."""
    a, b, c = row
    if c:
        under = 9 * b * b - 20 * a * c
        squares = [(-3 * b + sign * math.sqrt(under)) / (10 * c) for sign in (-1, 1)] if under >= 0 else []
    else:
        squares = [-a / (3 * b)] if b else []
    turns = [sign * math.sqrt(y) for y in squares if y > 0 for sign in (-1, 1)]
    values = [x * (a + x * x * (b + x * x * c)) for x in (low, high, *(x for x in turns if low < x < high))]
    return (min(values), max(values)) if all(map(math.isfinite, values)) else (-math.inf, math.inf)


def _grid(low: float, high: float) -> np.ndarray:
    """Return 40,001 points of [low, high], half of them evenly spaced, half logarithmically."""
    return np.union1d(np.linspace(low, high, 20_001), np.geomspace(low, high, 20_001))


_KELLER = (3.4445, -4.7750, 2.0315)

#: The cushion of the table that the Polar Express paper lists; its numbers tell (`provenance.explain`).
_CUSHION = 0.02407327424182761

_TABLES: tuple[Schedule, ...] = (
    Schedule(
        "simple",
        (_KELLER,),
        5,
        "repeat_last",
        (1.50e-3, 1.0),
        "K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); KellerJordan/Muon",
    ),
    Schedule(
        "quintic",
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        5,
        "cycle",
        (1.55e-3, 1.0),
        "You Jiacheng (2025), five tuned triples; default of Emerging-Optimizers and Megatron Core",
    ),
    Schedule(
        "polar_express",
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        8,
        "repeat_last",
        (1e-3, 1.0),
        "Amsel et al., The Polar Express (arXiv 2505.16932), lower bound 1e-3, divided by 1.01^degree, four decimals, "
        "as shipped by Emerging-Optimizers",
        Design(1e-3, 8, cushion=_CUSHION, safety=0.01, applied="after", decimals=4, worst=8.913262916878384e-16),
    ),
    Schedule(
        "cans",
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        5,
        "repeat_last",
        (7.32e-4, 1.0),
        "Grishina et al., Chebyshev-type polynomials, CANS (arXiv 2506.10935), as shipped by Emerging-Optimizers",
        Design(1e-3, 5, decimals=4, worst=0.11983551388523327),
    ),
    Schedule(
        "aol",
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        4,
        "cycle",
        (7.47e-3, 0.8836),
        "flash-newton-schulz (Turbo-Muon): made for almost-orthogonal-layer preconditioned input, as "
        "shipped by Emerging-Optimizers with Frobenius normalisation",
    ),
    Schedule(
        "deepseekv4",
        (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        10,
        "repeat_last",
        (1.03e-5, 1.0),
        "DeepSeek-V4 report (2026): eight steps of `simple`, then two of (2, -1.5, 0.5); Emerging-Optimizers #167",
    ),
    Schedule(
        "cubic5",
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        5,
        "refuse",
        (6.24e-3, 1.0),
        "Huang, How Much Orthogonalization Does Muon Need? (arXiv 2606.00371); Emerging-Optimizers #217 (2026): five "
        "cubic steps, two products each",
        Design(7e-3, 5, degree=3, ceiling=1.3, decimals=7, worst=0.2999999611392633),
    ),
    Schedule(
        "cubic",
        ((3 / 2, -1 / 2, 0.0),),
        12,
        "repeat_last",
        (6.40e-3, 1.0),
        "the classical Newton-Schulz step (Higham, Functions of Matrices, 2008, eq. 8.20): converges quadratically",
    ),
    Schedule(
        "taylor",
        ((15 / 8, -10 / 8, 3 / 8),),
        9,
        "repeat_last",
        (2.90e-3, 1.0),
        "Kovarik (SIAM J. Numer. Anal. 7, 1970): the first three terms of (1 - e)^(-1/2); converges cubically",
    ),
)

_RAW: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

#: Tables that other projects use under the same few names, and tables of the same papers.
_CIRCULATING: tuple[Schedule, ...] = (
    Schedule(
        "polar_express_raw",
        _RAW,
        8,
        "repeat_last",
        (1e-3, 1.0),
        "Amsel et al., The Polar Express (arXiv 2505.16932), as listed in the paper, before any safety factor; used by "
        "thinking-machines-lab/manifolds and HeavyBall",
        Design(1e-3, 8, cushion=_CUSHION, worst=2.8106948562294262e-27),
    ),
    Schedule(
        "polar_express_1.01",
        (
            (8.237312490495555, -23.157747414558198, 16.680568411445915),
            (4.082441999064835, -2.893047735332586, 0.5252849256975648),
            (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
            (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
            (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
            (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
            (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
            (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
        ),
        8,
        "repeat_last",
        (1e-3, 1.0),
        "NoahAmsel/PolarExpress, its default since safety entered the generator; digits of pytorch_optimizer, where it "
        "is 'polar_express'",
        Design(1e-3, 8, cushion=0.02, safety=0.01, worst=2.2207091124498295e-16),
    ),
    Schedule(
        "polar_express_1.02_5",
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        5,
        "refuse",
        (1e-3, 1.0),
        "KellerJordan/modded-nanogpt, microsoft/dion, karpathy/nanochat, muonium: made for exactly five steps",
        Design(1e-3, 5, cushion=0.02, safety=0.02, worst=0.14112735647331076),
    ),
    Schedule(
        "polar_express_1.02",
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.0429299351667245, -2.808917465908704, 0.5000178451051299),
            (3.8916678022926563, -2.7724841532176825, 0.5060648178503389),
            (3.285753657755658, -2.3681294933425394, 0.46449024233003117),
            (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
            (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
            (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
            (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
        ),
        8,
        "repeat_last",
        (1e-3, 1.0),
        "pytorch_optimizer, 'polar_express_safer'",
        Design(1e-3, 8, cushion=0.02, safety=0.02, worst=2.367372562797246e-14),
    ),
    Schedule(
        "polar_express_1.05",
        tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in _RAW[:5]),
        5,
        "refuse",
        (1e-3, 1.0),
        "Dao-AILab/gram-newton-schulz and dmuon: the paper's first five steps, every one divided by 1.05^degree",
        Design(1e-3, 5, cushion=_CUSHION, safety=0.05, applied="after_all", worst=0.2709969105557112),
    ),
    Schedule(
        "cans_cubic7",
        (
            (5.181702879894027, -5.177039351076183, 0.0),
            (2.585422564566848, -0.647862782007566, 0.0),
            (2.565592012027513, -0.645264570196127, 0.0),
            (2.516223347431526, -0.638782620243433, 0.0),
            (2.401068707564606, -0.623585125272674, 0.0),
            (2.170844761790119, -0.592849780534662, 0.0),
            (1.839437716819516, -0.547668362229117, 0.0),
        ),
        7,
        "refuse",
        (9e-4, 1.0),
        "Grishina et al. (arXiv 2506.10935), its example of order 3: seven steps into [0.7, 1.3], two products each",
        Design(9e-4, 7, degree=3, worst=0.2975285358063216),
    ),
    Schedule(
        "cans_cubic10",
        (
            (5.182503604966906, -5.178098480082684, 0.0),
            (2.586120737395915, -0.6479542005271643, 0.0),
            (2.567364126726186, -0.6454968804392178, 0.0),
            (2.520560084348265, -0.6393528082067044, 0.0),
            (2.410759275435182, -0.6248683598710716, 0.0),
            (2.1883348130094173, -0.5952022073798908, 0.0),
            (1.8595760874873613, -0.5504490972723968, 0.0),
            (1.589020160467417, -0.5126569802066718, 0.0),
            (1.5051653981684994, -0.5007377068751799, 0.0),
            (1.5, -0.5, 0.0),
        ),
        10,
        "repeat_last",
        (8.5e-4, 1.0),
        "the coupled inverse root of Emerging-Optimizers before its safety factor, after Grishina et al. (arXiv "
        "2506.10935); a row of the classical step ends it",
        Design(8.5e-4, 9, degree=3, worst=0.004429141335563578),
    ),
    Schedule(
        "modula6",
        tuple(
            (a / 1024, b / 1024, c / 1024)
            for a, b, c in (
                (3955, -8306, 5008),
                (3735, -6681, 3463),
                (3799, -6499, 3211),
                (4019, -6385, 2906),
                (2677, -3029, 1162),
                (2172, -1833, 682),
            )
        ),
        6,
        "refuse",
        (7.10e-4, 1.0),
        "You Jiacheng, six tuned steps over 1024; documentation of modula (Bernstein, 2025)",
    ),
)

_BY_NAME = {schedule.name: schedule for schedule in (*_TABLES, *_CIRCULATING)}

#: What a designed schedule looks like.
_DESIGNED = "minimax(lower=1e-3)"


def known() -> tuple[str, ...]:
    """Return the names of the schedules that the lab studies: classical steps, and tables as used in training.

    `get` also accepts the names of `circulating` and designs such as ``minimax(lower=1e-3)``.

    Examples
    --------
    >>> known()[:3]
    ('simple', 'quintic', 'polar_express')
    """
    return tuple(schedule.name for schedule in _TABLES)


def circulating() -> tuple[str, ...]:
    """Return the names of further published tables: what other projects call Polar Express or CANS, and more.

    Examples
    --------
    >>> circulating()[0]
    'polar_express_raw'
    >>> f"{get('polar_express_1.05').slope:.0f}"
    '804'
    """
    return tuple(schedule.name for schedule in _CIRCULATING)


def tuned_names() -> tuple[str, ...]:
    """Return the names of schedules tuned by measurement to products with MXFP8 operands (see `tuned`).

    Examples
    --------
    >>> tuned_names()
    ('mxfp8_flat', 'mxfp8_graded', 'mxfp8_gradient')
    >>> get("mxfp8_graded", 7)
    Traceback (most recent call last):
    ValueError: schedule 'mxfp8_graded' is tuned for 5, 6, 8 steps, and not for 7
    """
    return tuple(tuned.TABLES)


def design(text: str, steps: int | None = None) -> Design:
    """Read the name of a designed schedule.

    Parameters
    ----------
    text : str
        ``minimax(lower=1e-3)``; beside lower the parameters of `Design`, as in
        ``minimax(lower=1e-3, degree=3, cushion=0.02, safety=0.01)``.
    steps : int, optional
        How many polynomials, 5 by default.

    Raises
    ------
    ValueError
        For a text that is none, and for parameters outside their range.

    Examples
    --------
    >>> design("minimax(lower=1e-3, safety=0.02)", 8)
    Design(lower=0.001, steps=8, degree=5, cushion=0.0, safety=0.02, applied='within', ceiling=None, decimals=None, \
worst=None)
    """
    shape = re.fullmatch(r"\s*minimax\s*\((.*)\)\s*", text)
    items = [item.partition("=") for item in shape[1].split(",")] if shape else []
    given = {key.strip(): value.strip() for key, _, value in items}
    if "lower" not in given or len(given) < len(items):
        raise ValueError(
            f"schedule {text!r} is not a design: needed {_DESIGNED} with lower above 0 and below 1, and where wanted "
            f"{', '.join(f'{f.name}=' for f in _PARAMETERS[1:])} once each"
        )
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _READ:
            raise ValueError(f"schedule {text!r}: {unknown('parameter', key, _READ)}")
        try:
            values[key] = _READ[key](value)
        except ValueError as error:
            raise ValueError(f"schedule {text!r}: {key} cannot be {value!r}: {error}") from error
    return Design(**values, steps=DESIGN_STEPS if steps is None else steps)


def _applied(text: str) -> str:
    if text not in APPLIED:
        raise unknown("place", text, APPLIED)
    return text


_READ: dict[str, Callable[[str], Any]] = {
    "lower": float,
    "degree": int,
    "cushion": float,
    "safety": float,
    "applied": _applied,
    "ceiling": float,
    "decimals": int,
}


def _found(name: str, steps: int | None) -> Schedule:
    """Return the schedule of a name or of a design."""
    if str(name).lstrip().startswith("minimax"):
        from muon_lab.polar import minimax  # mpmath, which nothing else here needs

        return minimax.schedule(design(name, steps))
    if name in tuned.TABLES:
        return _tuned(name, steps)
    if name not in _BY_NAME:
        raise unknown("schedule", name, (*_BY_NAME, *tuned.TABLES, _DESIGNED))
    if steps is None or isinstance(steps, int):
        return _with_steps(name, steps)
    return replace(_BY_NAME[name], steps=steps)  # which says what is wrong with it


@lru_cache(typed=True)
def _tuned(name: str, steps: int | None) -> Schedule:
    """Return a schedule tuned to MXFP8; there is one for some numbers of steps alone."""
    tables = tuned.TABLES[name]
    count = min(tables) if steps is None else steps
    if count not in tables:
        lengths = ", ".join(map(str, tables))
        raise ValueError(f"schedule {name!r} is tuned for {lengths} steps, and not for {steps}")
    return Schedule(name, tables[count], count, "refuse", tuned.INTERVALS[name], tuned.SOURCES[name])


@lru_cache(typed=True)  # a schedule keeps what it found out about itself, and a sweep asks for it at every case
def _with_steps(name: str, steps: int | None) -> Schedule:
    """Return one and the same value for the same request."""
    return _BY_NAME[name] if steps is None else replace(_BY_NAME[name], steps=steps)


def get(name: str, steps: int | None = None) -> Schedule:
    """Return a schedule by name, with the given number of steps.

    Parameters
    ----------
    name : str
        One of `known`, `circulating` or `tuned_names`, or a design such as ``minimax(lower=1e-3)`` (see `design`).
    steps : int, optional
        How many polynomials to apply; the source's own number by default, 5 for a design. Past the table the source's
        rule applies; a design is made for its steps, so it has no past.

    Designs without ``safety``, and the tables made so (`cans`, `polar_express_raw`), have no headroom: a singular value
    that rounding lifts above 1 escapes. They are for matrices far from rank 1; see `Schedule.reach`.

    Raises
    ------
    ValueError
        For an unknown name, for a malformed design or one that float64 coefficients cannot hold, for steps below 1, and
        where the source fixes another length.

    Warns
    -----
    ScheduleWarning
        If that number of steps collapses (`quintic` with 6, 7 or 11 steps).

    Examples
    --------
    >>> get("polar_express", 10).coefficients[-1]
    (1.875, -1.25, 0.375)
    >>> get("cubic5", 6)
    Traceback (most recent call last):
    ValueError: schedule 'cubic5' has exactly 5 steps, by its source; 6 were asked for
    >>> made = get("minimax(lower=1e-3)")
    >>> made.name, [round(a, 4) for a, b, c in made.rows]
    ('minimax(lower=0.001)', [8.4703, 4.1828, 3.9619, 3.2866, 2.2737])
    """
    schedule = _found(name, steps)
    if schedule.caution:
        warnings.warn(schedule.caution, ScheduleWarning, stacklevel=2)
    return schedule
