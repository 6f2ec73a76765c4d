"""The scalar oracle of the rational iterations against what defines them."""

import mpmath
import pytest
from mpmath import mp

from muon_lab.oracle import rational


@pytest.mark.parametrize("lower", ["0.5", "1e-3", "1e-9"])
def test_the_weights_equioscillate(lower):
    """Zolotarev's function is least at l and at one point inside, and 1 at one point inside and at 1."""
    with mp.workdps(60):
        low = mp.mpf(lower)
        w = rational.weights(low, 50)
        assert abs(w.image(mp.mpf(1)) - 1) < mp.mpf(10) ** -49
        # f' = 0: b c y^2 + (3 b - a c) y + a = 0 for y = x^2
        p, q = (3 * w.b - w.a * w.c) / (w.b * w.c), w.a / (w.b * w.c)
        root = mp.sqrt(p * p / 4 - q)
        inner = [mp.sqrt(-p / 2 - root), mp.sqrt(-p / 2 + root)]
        assert low < inner[0] < inner[1] < 1
        assert abs(w.image(inner[0]) - 1) < mp.mpf(10) ** -45
        assert abs(w.image(inner[1]) / w.image(low) - 1) < mp.mpf(10) ** -45


def test_near_one_the_weights_are_those_of_halley():
    with mp.workdps(40):
        w = rational.weights(1 - mp.mpf(10) ** -12, 30)
        assert [mp.nstr(x, 10) for x in w] == ["3.0", "1.0", "3.0"]


@pytest.mark.parametrize(
    ("kappa", "counts"), [("1e1", (4, 5, 5)), ("1e3", (4, 9, 6)), ("1e8", (5, 20, 8)), ("1e16", (6, 37, 9))]
)
def test_counts_are_those_that_were_published(kappa, counts):
    with mp.workdps(50):
        lower = 1 / mp.mpf(kappa)
    found = [len(images(lower, "1e-15", 40)) for images in (rational.qdwh, rational.halley, rational.newton)]
    assert found == list(counts)


@pytest.mark.parametrize(("images", "order", "constant"), [("halley", 3, 1 / 4), ("newton", 2, 1 / 8)])
def test_the_last_steps_have_the_order_of_their_iteration(images, order, constant):
    """Halley: 1 - f = e^3 / 4. Newton with both ends scaled: kappa - 1 goes to (kappa - 1)^2 / 8."""
    path = getattr(rational, images)("0.1", "1e-60", 200)
    with mp.workdps(200):
        before, after = (1 - x for x in path[-3:-1])
        assert mp.almosteq(after / before**order, mp.mpf(constant), rel_eps=mp.mpf(10) ** -3)


def test_dynamical_weights_gain_a_factor_of_sixteen_near_one():
    """x^3 / 4 on [0, e] becomes 1/4 of the Chebyshev polynomial on it, raised to be nowhere negative: e^3 / 64."""
    path = rational.qdwh("0.1", "1e-30", 100)
    with mp.workdps(100):
        before, after = (1 - x for x in path[-3:-1])
        assert mp.almosteq(after / before**3, mp.mpf(1) / 64, rel_eps=mp.mpf(10) ** -2)


def test_the_ambient_precision_stays():
    before = mp.dps
    rational.weights("1e-3", 40)
    rational.qdwh("1e-3", "1e-15", 40)
    assert mp.dps == mpmath.mp.dps == before


@pytest.mark.parametrize("lower", [0, 1, -0.5, 2])
def test_what_is_no_bound_is_refused(lower):
    for call in (
        lambda: rational.weights(lower, 20),
        lambda: rational.qdwh(lower, "1e-15", 20),
        lambda: rational.halley(lower, "1e-15", 20),
        lambda: rational.newton(lower, "1e-15", 20),
    ):
        with pytest.raises(ValueError, match=f"lower is {lower}, needed above 0 and below 1"):
            call()


def test_no_digits_are_refused():
    with pytest.raises(ValueError, match="digits is 0, needed at least 1"):
        rational.weights("0.5", 0)
