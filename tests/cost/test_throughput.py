"""The published throughput: conventions, time, and what no convention explains."""

import pytest

from muon_lab import studies
from muon_lab.cost import inventory, throughput
from muon_lab.cost.throughput import ARTICLE
from muon_lab.studies.running import run_case

KIMI, QWEN = ARTICLE["kimi-k2"], ARTICLE["qwen3-30b-a3b"]

#: By order and gate-up: a reconstruction made apart, with flops a token of 2.045e11 and 2.301e10.
RECONSTRUCTED = {
    ("short", "fused"): (26.5, 14.7),
    ("short", "split"): (14.5, 8.1),
    ("rows", "fused"): (63.3, 26.0),
    ("rows", "split"): (51.2, 19.4),
    ("long", "fused"): (96.8, 34.0),
}


@pytest.mark.parametrize("convention", RECONSTRUCTED)
def test_conventions_are_those_of_an_independent_count(convention):
    for entry, expected in zip((KIMI, QWEN), RECONSTRUCTED[convention], strict=True):
        assert throughput.counted(entry, *convention) == pytest.approx(expected, rel=0.02)


def test_no_convention_explains_both_numbers():
    """Each number has its convention within 4 %; none is within a fifth of both."""
    close = {
        how: [throughput.counted(entry, *how) / entry.optimizer for entry in (KIMI, QWEN)]
        for how in [(order, gate_up) for order in throughput.ORDERS for gate_up in throughput.GATE_UP]
    }
    assert abs(close["rows", "split"][0] - 1) < 0.04
    assert abs(close["long", "fused"][1] - 1) < 0.04
    assert not [how for how, ratios in close.items() if all(4 / 5 < ratio < 5 / 4 for ratio in ratios)]


def test_flops_of_a_token_by_hand():
    """Qwen3-30B-A3B: 48 blocks of hidden size 2048, 32 and 4 heads of 128, 8 experts of 768, a router and a head."""
    attention = 2048 * 4096 * 2 + 2048 * 512 * 2
    experts = 8 * 3 * 2048 * 768
    active = 48 * (attention + experts + 128 * 2048) + 151936 * 2048
    scores = 48 * 32 * 4096 * 128 * 2 / 2  # causal: half of q kᵀ and of the product with values, in multiplications
    assert throughput.flops_per_token(QWEN) == pytest.approx(6 * active + 3 * 2 * scores, rel=1e-12)


def test_flops_of_an_update_by_hand():
    one = inventory.Model("one", (inventory.Layer("a", "mlp", (2, 3)),), blocks=1)
    step = {"short": 4 * 2 * 2 * 3 + 2 * 2**3, "long": 4 * 3 * 3 * 2 + 2 * 3**3, "rows": 4 * 2 * 2 * 3 + 2 * 2**3}
    for order, flops in step.items():
        assert throughput.newton_schulz(one, order) == 5 * flops
    assert throughput.newton_schulz(one, "short", "syrk") == 5 * (3 * 2 * 2 * 3 + 2**3)


def test_predictions_meet_the_article_at_rates_that_are_far_apart():
    """2.1 % and 3.8 %: at one rate of the products the two models cannot both be right."""
    for entry, published in ((KIMI, 0.021), (QWEN, 0.038)):
        assert entry.slowdown == pytest.approx(published, abs=5e-4)
        found = throughput.predicted(entry, throughput.implied_rate(entry))
        assert found.slowdown == pytest.approx(entry.slowdown, rel=0.1)  # stages and ranks are not all alike
        assert found.exposed < found.products / 20  # giants that a group of ranks shares
    assert throughput.implied_rate(KIMI) > 3 * throughput.implied_rate(QWEN)


def test_two_numbers_explain_both_models():
    """A rate of large products and microseconds of each: by hand, from flops and products of a GPU in the mean."""
    rate, overhead = throughput.explained()
    for entry, matrices, published in ((KIMI, 46_507, 0.021), (QWEN, 12_480, 0.038)):
        work = throughput.newton_schulz(inventory.get(entry.name, gate_up="fused")) / entry.grid.size
        seconds = work / (rate * 1e12) + 15 * matrices / entry.grid.size * overhead
        assert seconds == pytest.approx(throughput.longer(entry), rel=1e-9)
        found = throughput.predicted(entry, rate, overhead=overhead)
        assert found.slowdown == pytest.approx(published, abs=5e-4)
    assert 800 < rate < 2500  # no more than the GPU has
    assert 1e-6 < overhead < 1e-4


def test_an_exposed_gather_costs_and_a_faster_rate_saves():
    hidden, exposed = (throughput.predicted(KIMI, 1250.0, overlap=overlap) for overlap in (True, False))
    assert exposed.exposed > hidden.exposed
    assert exposed.slowdown > hidden.slowdown > throughput.predicted(KIMI, 2500.0).slowdown


def test_the_study_tells_what_it_is_asked():
    study = studies.get("throughput")
    point = {name: values[0] for name, values in study.defaults.items()}
    (case,) = study.settle(point, None)
    row = run_case("throughput", case)
    assert (row["outcome"], row["published_tflops"]) == ("ok", 51.0)
    assert row["over_published"] == pytest.approx(row["optimizer_tflops"] / 51)
    for name, value, message in (
        ("model", "kimi", "did you mean 'kimi-k2'"),
        ("order", "shrot", "did you mean 'short'"),
        ("rate", 0.0, "rate must lie above 0"),
        ("product_us", -1.0, "product_us must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            list(study.settle(point | {name: value}, None))
    with pytest.raises(ValueError, match="did you mean 'kimi-k2'"):
        throughput.published("kimi")
    with pytest.raises(ValueError, match=r"must be positive TFLOP/s, not 0\.0"):
        throughput.predicted(KIMI, 0.0)
