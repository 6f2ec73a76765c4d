"""What an optimizer keeps in a number format is that format's, and nothing else changes."""

from pathlib import Path

import pytest
import torch

from muon_lab import optim, studies
from muon_lab.arithmetic import roundtrip
from muon_lab.optim.matrices import View
from muon_lab.studies import stability, storage
from muon_lab.studies.running import run_case
from muon_lab.studies.study import LeftOut


def settled(**point):
    study = studies.get("stability")
    defaults = {name: values[0] for name, values in study.defaults.items()}
    return list(study.settle(defaults | {"what": "optimizer", "format": "mxfp8_e4m3", "updates": 10} | point, None))


def row(**point):
    (case,) = settled(**point)
    return run_case("stability", case)


def stepped(make, shape=(40, 36)):
    generator = torch.Generator().manual_seed(0)
    W = torch.nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = make([W])
    for _ in range(2):
        W.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return optimizer, W


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "muon": lambda params: optim.Muon(params, lr=0.1),
    "mop": lambda params: optim.MOP(params, lr=0.1),
    "soap": lambda params: optim.SOAP(params, lr=0.1),
    "rekls": lambda params: optim.REKLS(params, lr=0.1),
}


@pytest.mark.parametrize("place", storage.ENTRIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_place_is_rounded_and_the_rest_of_the_state_stays(name, place):
    if name not in storage.ENTRIES[place]:
        with pytest.raises(LeftOut, match=f"{name} has no {place.replace('_', ' ')}"):
            settled(optimizer=name, place=place)
        return
    optimizer, W = stepped(OPTIMIZERS[name])
    before = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[W].items()}
    entries = storage.ENTRIES[place][name]
    assert set(entries) <= set(before)
    storage.Storage(entries, "mxfp8_e4m3").keep(optimizer)
    for key, value in optimizer.state[W].items():
        value, old = torch.as_tensor(value), before[key]
        if key not in entries:
            assert torch.equal(value, old), key
            continue
        assert not torch.equal(value, old), key
        expected = roundtrip(old, "mxfp8_e4m3")
        if place == "factors":
            assert torch.equal(value, value.mT)
            value, expected = value.tril(), expected.tril()
        assert torch.equal(value, expected), key


def test_the_factors_of_all_parts_of_a_fused_weight_are_rounded():
    view = View(blocks=(8, 8, 8))
    optimizer, W = stepped(lambda params: optim.SOAP([{"params": params, "view": view}], lr=0.1), (24, 8))
    before = {key: value.clone() for key, value in optimizer.state[W].items() if key.startswith("L.")}
    assert len(before) == 3
    storage.Storage(("L",), "mxfp4_e2m1").keep(optimizer)
    assert all(not torch.equal(optimizer.state[W][key], old) for key, old in before.items())


def test_stochastic_rounding_draws_from_the_generator_that_it_is_given():
    results = []
    for seed in (0, 0, 1):
        optimizer, W = stepped(OPTIMIZERS["muon"])
        generator = torch.Generator().manual_seed(seed)
        storage.Storage(("momentum_buffer",), "mxfp4_e2m1", "rceil", "stochastic", generator).keep(optimizer)
        results.append(optimizer.state[W]["momentum_buffer"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "place"), [("muon", "momentum"), ("rekls", "factors")])
def test_a_run_in_float32_is_the_baseline_itself_and_one_in_four_bits_is_not(optimizer, place):
    same = row(optimizer=optimizer, place=place, format="fp32")
    assert (same["outcome"], same["loss_gap"], same["error"]) == ("ok", 0.0, 0.0)
    coarse = row(optimizer=optimizer, place=place, format="mxfp4_e2m1")
    assert coarse["outcome"] == "ok"
    assert coarse["error"] > 0.01


def test_axes_of_optimizers_are_no_part_of_other_cases():
    """Keys of other effects are what they were before there were optimizers."""
    study = studies.get("stability")
    point = {name: values[0] for name, values in study.defaults.items()}
    (other,) = study.settle(point | {"what": "products", "spectrum": "gaussian"}, None)
    assert not {"optimizer", "place", "rate"} & set(other)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"optimizer": "moun"}, "did you mean 'muon'"),
        ({"place": "factor"}, "did you mean 'factors'"),
        ({"rate": 0.0}, "rate must lie above 0 and below 1000, not 0.0"),
    ],
)
def test_what_is_wrong_is_said(point, message):
    with pytest.raises(ValueError, match=message):
        settled(**point)
    assert set(stability.RATES) == set(OPTIMIZERS)


def test_the_rates_are_the_best_ones_of_the_committed_table():
    pl = pytest.importorskip("polars")
    from muon_lab.figures.convergence import best

    table = pl.read_parquet(Path(__file__).parents[2] / "experiments/convergence/table.parquet")
    found = best(table.with_columns(pl.col("outcome").cast(pl.String)).filter(problem="gpt_small"))
    assert dict(found.select("optimizer", "lr").iter_rows()) == stability.RATES
