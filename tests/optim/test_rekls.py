"""REKLS is SOAP with three settings, bit for bit."""

import numpy as np
import pytest
import torch

from muon_lab import optim, oracle
from muon_lab.oracle.optimizers import trajectory


def walk(make, shape, dtype, steps=6, seed=0):
    """Return the weights after each of some steps, and the state after the last."""
    generator = np.random.default_rng(seed)
    p = torch.nn.Parameter(torch.tensor(generator.standard_normal(shape), dtype=dtype))
    optimizer, found = make([p]), []
    for _ in range(steps):
        p.grad = torch.tensor(generator.standard_normal(shape), dtype=dtype)
        optimizer.step()
        found.append(p.detach().clone())
    return found, optimizer.state[p]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (24, 8), (1, 1)])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "second_moment": "rotated", "max_rms": 0.5}])
def test_soap_with_decompositions_the_correction_and_frequency_one_is_rekls_bit_for_bit(shape, dtype, settings):
    ours = walk(lambda p: optim.REKLS(p, 0.1, **settings), shape, dtype)
    soap = walk(lambda p: optim.SOAP(p, 0.1, eigenbasis="eigh", kl=True, frequency=1, **settings), shape, dtype)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], soap[0], strict=True))
    for name, value in ours[1].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(soap[1][name])), name


@pytest.mark.parametrize("changed", [{"kl": False}, {"frequency": 2}, {"eigenbasis": "iteration"}])
def test_another_of_the_three_settings_is_not_rekls(changed):
    ours, _ = walk(lambda p: optim.REKLS(p, 0.1, eps=0.05), (4, 4), torch.float64)
    given = {"eigenbasis": "eigh", "kl": True, "frequency": 1, **changed}
    other, _ = walk(lambda p: optim.SOAP(p, 0.1, eps=0.05, **given), (4, 4), torch.float64)
    assert float((ours[-1] - other[-1]).norm()) > 1e-3


def test_the_settings_are_those_of_the_oracle():
    group = optim.REKLS([torch.nn.Parameter(torch.ones(2, 3))], 0.1).param_groups[0]
    rule = oracle.optimizers.rekls(0.1)
    assert {name: group[name] for name in vars(rule)} == vars(rule)


def test_a_usual_eps_on_a_rectangular_matrix_is_not_determined_by_float32():
    """The first factors are 1 / eps too large, and rounding in the singular one as large as eps: two runs that differ
    by a rounding of one gradient part. Values to start with, and a larger eps, keep them together."""

    def apart(**settings):
        generator = np.random.default_rng(0)
        W = torch.tensor(generator.standard_normal((24, 8)), dtype=torch.float32)
        gradients = torch.tensor(generator.standard_normal((5, 24, 8)), dtype=torch.float32)
        nudged = gradients.clone()
        nudged[0] *= 1 + 2.0**-22
        ends = []
        for stream in (gradients, nudged):
            p = torch.nn.Parameter(W.clone())
            optimizer = optim.REKLS([p], 1.0, **settings)
            for G in stream:
                p.grad = G.clone()
                optimizer.step()
            ends.append(p.detach())
        return float((ends[0] - ends[1]).norm() / (ends[0] - W).norm())

    assert apart() > 1e-2
    assert apart(eps=0.05) < 1e-3
    assert apart(start=1.0, first_step="skip", eps=1e-2) < 1e-3


def test_values_to_start_with_leave_float32_its_digits_on_a_rectangular_matrix():
    """One step in float32 and in float64 from the same state, after 30 steps with the usual eps."""

    def off(**settings):
        generator = np.random.default_rng(0)
        gradients = torch.tensor(generator.standard_normal((31, 64, 32)), dtype=torch.float32)
        p = torch.nn.Parameter(torch.zeros(64, 32))
        q = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.float64))
        coarse, fine = optim.REKLS([p], 1.0, **settings), optim.REKLS([q], 1.0, **settings)
        for G in gradients[:30]:
            p.grad = G.clone()
            coarse.step()
        q.data.copy_(p.data)
        fine.load_state_dict(coarse.state_dict())
        before = q.detach().clone()
        p.grad, q.grad = gradients[30].clone(), gradients[30].double()
        coarse.step()
        fine.step()
        return float((p.detach() - q.detach()).norm() / (q.detach() - before).norm())

    assert off() > 1e-2
    assert off(start=1.0, first_step="skip") < 2e-3
    assert off(start=1.0, first_step="skip", second_moment="rotated") < 2e-4


@pytest.mark.parametrize("given", [{"kl": False}, {"frequency": 2}, {"eigenbasis": "iteration"}])
def test_the_three_settings_are_not_to_be_given(given):
    with pytest.raises(TypeError, match="multiple values"):
        optim.REKLS([torch.nn.Parameter(torch.ones(2, 2))], 0.1, **given)


@pytest.mark.parametrize("given", [{"kl": False}, {"frequency": 9}, {"eigenbasis": "iteration"}])
def test_the_three_settings_are_not_to_be_had_in_a_group_or_a_checkpoint_either(given):
    p = torch.nn.Parameter(torch.ones(2, 2))
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"REKLS: {name} is {value!r}, needed"):
        optim.REKLS([{"params": [p], **given}], 0.1)
    saved = optim.SOAP([p], 0.1, **{"eigenbasis": "eigh", "kl": True, "frequency": 1, **given}).state_dict()
    with pytest.raises(ValueError, match=f"REKLS: {name} is {value!r}, needed"):
        optim.REKLS([p], 0.1).load_state_dict(saved)


def test_agrees_with_the_oracle():
    generator = np.random.default_rng(3)
    W, gradients = generator.standard_normal((3, 5)), list(generator.standard_normal((6, 3, 5)))
    p = torch.nn.Parameter(torch.tensor(W))
    optimizer = optim.REKLS([p], 0.1, eps=0.05, weight_decay=0.1)
    for G, state in zip(
        gradients, trajectory(oracle.optimizers.rekls(0.1, eps=0.05, weight_decay=0.1), W, gradients), strict=True
    ):
        p.grad = torch.tensor(G)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), state.W, rtol=0, atol=1e4 * 2.0**-53 * np.linalg.norm(G) / 0.05)
