"""Named spectra: their promised facts, the grammar, and that nothing but gaussian draws."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.problems import spectra

U64 = bounds.unit_roundoff("fp64")
SHAPES = [(1, 1), (1, 7), (6, 6), (9, 4), (5, 17), (33, 7)]
NAMES = sorted(spectra.PROFILES)
DETERMINISTIC = [name for name in NAMES if name != "gaussian"]


def values(text, m, n, seed=0):
    return spectra.parse(text).values(m, n, np.random.default_rng(seed))


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["geometric(1)", "linear(1)", "power(0)", "step(1)", "clustered(1)", "one_small(1)"])
def test_a_condition_number_of_one_is_flat(text):
    assert np.array_equal(values(text, 5, 8), values("flat", 5, 8))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_matrix_has_no_singular_values(name, shape):
    assert values(name, *shape).shape == (0,)


@pytest.mark.parametrize("name", sorted(set(DETERMINISTIC) - {"zero"}))
def test_a_single_value_is_one(name):
    assert values(name, 1, 7).tolist() == [1.0]


def test_zero_is_zero():
    assert values("zero", 3, 4).tolist() == [0.0] * 3


# --- the promised facts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_descending_finite_and_not_negative(name, shape):
    s = values(name, *shape)
    assert s.shape == (min(shape),)
    assert s.dtype == np.float64
    assert np.isfinite(s).all()
    assert (s >= 0).all()
    assert (np.diff(s) <= 0).all()


@pytest.mark.parametrize("kappa", [10.0, 1e3, 1e12])
@pytest.mark.parametrize("name", ["geometric", "linear", "step", "clustered", "one_small"])
def test_the_condition_number_is_exact(name, kappa):
    s = values(f"{name}(kappa={kappa!r})", 12, 20)
    assert s[0] == 1
    assert s[-1] == pytest.approx(1 / kappa, rel=8 * U64, abs=2 * U64)  # linear ends by a sum of numbers up to 1


def test_geometric_ratios_and_linear_differences_are_constant():
    assert np.ptp(np.diff(np.log(values("geometric(1e6)", 9, 9)))) < 64 * U64
    assert np.ptp(np.diff(values("linear(1e6)", 9, 9))) < 4 * U64


def test_power_step_clustered_and_the_ranks_are_as_written():
    assert values("power(2)", 3, 3).tolist() == [1, 1 / 4, 1 / 9]
    assert values("step(4, 0.25)", 4, 9).tolist() == [1, 0.25, 0.25, 0.25]
    assert values("clustered(100, 2)", 4, 4).tolist() == [1, 1, 0.01, 0.01]
    assert values("clustered(100, 40)", 2, 4).tolist() == [1, 0.01]
    assert values("one_small(100)", 3, 4).tolist() == [1, 1, 0.01]
    assert values("rank_one(0)", 3, 4).tolist() == [1, 0, 0]
    assert values("deficient(0.5, 10)", 4, 4).tolist() == [1, 0.1, 0, 0]
    assert np.count_nonzero(values("deficient(0)", 8, 8)) == 1


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_gaussian_values_are_those_of_a_gaussian_matrix(shape):
    # Two samples of 3000, Kolmogorov-Smirnov: each comparison fails by chance once in 1e5 seeds, the four shapes with
    # three statistics once in 8e3. The seed is fixed.
    generator = np.random.default_rng(1)
    ours = np.array([spectra.gaussian(*shape, generator) for _ in range(3000)])
    dense = np.linalg.svd(generator.standard_normal((3000, *shape)), compute_uv=False)
    for statistic in (lambda s: s[:, 0], lambda s: s[:, -1], lambda s: s.sum(axis=1)):
        assert scipy.stats.ks_2samp(statistic(ours), statistic(dense)).pvalue > 1e-5
    # A negative control: one degree of freedom more is seen.
    spoiled = np.linalg.svd(generator.standard_normal((3000, shape[0] + 1, shape[1] + 1)), compute_uv=False)
    assert scipy.stats.ks_2samp(ours[:, 0], spoiled[:, 0]).pvalue < 1e-5


def test_gaussian_energy_is_the_number_of_entries():
    # The sum of squares is chi-squared with m n degrees of freedom: five standard deviations, once in 2e6 seeds.
    m, n = 128, 512
    assert abs((values("gaussian", m, n) ** 2).sum() - m * n) < 5 * np.sqrt(2 * m * n)


def test_gaussian_singular_values_are_those_of_its_bidiagonal_matrix():
    r, longer = 6, 9
    s = spectra.gaussian(r, longer, np.random.default_rng(5))
    generator = np.random.default_rng(5)  # the same draws, in the naive form
    B = np.diag(np.sqrt(generator.chisquare(np.arange(longer, longer - r, -1))))
    B += np.diag(np.sqrt(generator.chisquare(np.arange(r - 1, 0, -1))), -1)
    np.testing.assert_allclose(s, np.linalg.svd(B, compute_uv=False), rtol=0, atol=s[0] * bounds.svd(2 * r, 2 * r, U64))


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_and_its_transpose_have_the_same_values(name):
    assert np.array_equal(values(name, 5, 8), values(name, 8, 5))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_what_draws_nothing_leaves_the_generator(name):
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    spectra.parse(name).values(6, 9, generator)
    assert generator.bit_generator.state == before


def test_the_same_seed_gives_the_same_values():
    assert np.array_equal(values("gaussian", 5, 8, 7), values("gaussian", 5, 8, 7))
    assert not np.array_equal(values("gaussian", 5, 8, 7), values("gaussian", 5, 8, 8))


@given(st.floats(1, 1e300), st.floats(0, 1))
def test_text_reads_back(kappa, share):
    for spectrum in (spectra.Spectrum("step", (kappa, share)), spectra.Spectrum("deficient", (share, kappa))):
        assert spectra.parse(str(spectrum)) == spectrum


def test_the_grammar_takes_defaults_positions_names_and_blanks():
    assert spectra.parse("geometric") == spectra.parse("geometric()") == spectra.parse(" geometric( kappa = 1e3 ) ")
    assert spectra.parse("step(share=.25)") == spectra.Spectrum("step", (1000.0, 0.25))
    assert str(spectra.parse("geometric(1e9)")) == "geometric(1e9)"
    assert str(spectra.parse("rank_one(1e-9)")) == "rank_one(1e-9)"


def test_every_known_name_parses_and_has_one_line():
    for name, meaning in spectra.known().items():
        assert spectra.parse(name).name == name
        assert meaning
        assert "\n" not in meaning


def test_parsing_imports_neither_torch_nor_scipy():
    code = (
        "import sys; from muon_lab.problems import spectra; spectra.parse('gaussian'); spectra.known();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_edges_of_gaussian_values_approach_those_of_marchenko_and_pastur():
    gaps = []
    for n in (64, 256, 1024):
        s = values("gaussian", n // 4, n)
        gaps.append(max(abs(s[0] - 1.5 * n**0.5), abs(s[-1] - 0.5 * n**0.5)) / n**0.5)
    # Edges fluctuate by n^(-2/3) of the radius (Johnstone 2001); 4 covers the constant and the tail.
    assert all(gap < 4 * n ** (-2 / 3) for gap, n in zip(gaps, (64, 256, 1024), strict=True)), gaps


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("geometrc", "unknown spectrum 'geometrc': did you mean 'geometric'. Known: gaussian, flat"),
        ("geometric(0.5)", "kappa is 0.5, needed 1 to 1e300"),
        ("geometric(nan)", "kappa is nan, needed 1 to 1e300"),
        ("geometric(inf)", "kappa is inf, needed 1 to 1e300"),
        ("geometric(big)", "kappa is 'big', needed a number"),
        ("geometric(1, 2)", r"unexpected parameter 2, needed each of \(kappa\) at most once"),
        ("geometric(1, kappa=2)", "unexpected kappa"),
        ("geometric(k=2)", "unexpected k, needed"),
        ("flat(1)", "unexpected parameter 1"),
        ("clustered(count=2.5)", "count is 2.5, needed a whole number from 1 to 1e9"),
        ("geometric(", "needed a name with numbers such as geometric"),
        ("", "needed a name with numbers"),
    ],
)
def test_bad_text_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        spectra.parse(text)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="geometric: 0 parameters given, needed kappa"):
        spectra.Spectrum("geometric")
    with pytest.raises(ValueError, match=r"shape is \(-1, 3\), needed no negative side"):
        values("flat", -1, 3)
