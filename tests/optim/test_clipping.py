"""QK-clip: the largest logit comes down to the threshold, and only there."""

import pytest
import torch

from muon_lab.measure import bounds
from muon_lab.optim import qk_clip

U64, U32 = bounds.unit_roundoff("fp64"), bounds.unit_roundoff("fp32")


def weights(heads, groups, size=3, n=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    query = torch.nn.Parameter(torch.randn(heads * size, n, generator=generator).to(dtype))
    key = torch.nn.Parameter(torch.randn(groups * size, n, generator=generator).to(dtype))
    return query, key, torch.randn(20, n, generator=generator).to(dtype)


def largest(query, key, X, heads, groups):
    """Return the largest logit of each head."""
    Q = (X @ query.detach().T).unflatten(-1, (heads, -1)).transpose(0, 1)
    K = (X @ key.detach().T).unflatten(-1, (groups, -1)).transpose(0, 1).repeat_interleave(heads // groups, dim=0)
    return (Q @ K.mT).amax(dim=(-2, -1))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0, 0.3])
def test_the_largest_logit_of_a_group_becomes_the_threshold(heads, groups, alpha):
    query, key, X = weights(heads, groups)
    before = largest(query, key, X, heads, groups)
    threshold = float(before.reshape(groups, -1).amax(-1).median())
    gamma = qk_clip(query.view(heads, -1, 5), key.view(groups, -1, 5), before, threshold, alpha)
    after = largest(query, key, X, heads, groups)
    by_head = gamma.repeat_interleave(heads // groups)
    torch.testing.assert_close(after, by_head * before, rtol=64 * U64, atol=0)
    tops = after.reshape(groups, -1).amax(-1)
    assert bool((tops <= threshold * (1 + 64 * U64)).all())
    assert torch.equal(gamma == 1, before.reshape(groups, -1).amax(-1) <= threshold)


def test_what_is_below_the_threshold_stays_bit_for_bit():
    query, key, _ = weights(2, 2, dtype=torch.float32)
    kept = query.detach().clone(), key.detach().clone()
    gamma = qk_clip(query.view(2, -1, 5), key.view(2, -1, 5), torch.tensor([100.0, -3e4]))
    assert gamma.tolist() == [1.0, 1.0]
    assert torch.equal(query, kept[0])
    assert torch.equal(key, kept[1])


def test_heads_are_shared_out_between_queries_and_keys():
    W = [torch.nn.Parameter(torch.ones(2, 3, 4)) for _ in range(3)]
    gamma = qk_clip(W[0], W[1], torch.tensor([50.0, 1600.0]), alpha=0.25, rotary=W[2])
    assert gamma.tolist() == [1.0, 1 / 16]
    assert [X.detach()[1, 0, 0].item() for X in W] == pytest.approx([1 / 2, 1 / 8, 1 / 16], rel=4 * U32)
    assert [X.detach()[0, 0, 0].item() for X in W] == [1.0, 1.0, 1.0]


def test_rows_by_group_are_reached_through_a_view():
    """Two groups of two query heads, a key and a value: values stay."""
    W = torch.nn.Parameter(torch.ones(2 * 4 * 3, 5))
    heads = W.view(2, 4, 3, 5)
    gamma = qk_clip(heads[:, :2], heads[:, 2], torch.tensor([[1.0, 400.0], [1.0, 2.0]]))
    assert gamma.tolist() == [0.25, 1.0]
    found = W.detach().view(2, 4, 3, 5)[:, :, 0, 0]
    assert found.tolist() == [[0.5, 0.5, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]]


def test_bfloat16_weights_are_rounded_once():
    W = torch.nn.Parameter(torch.full((1, 2, 3), 1.5, dtype=torch.bfloat16))
    qk_clip(W, torch.nn.Parameter(torch.ones(1, 2, 3)), torch.tensor([300.0]), alpha=1.0)
    assert torch.equal(W.detach(), torch.full((1, 2, 3), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_logits": torch.tensor([1.0, float("nan")])}, "max_logits are .*, needed finite numbers"),
        ({"max_logits": torch.tensor([1.0, float("inf")])}, "needed finite numbers"),
        ({"key": torch.ones(3, 2, 2)}, "2 heads and 3 groups of keys"),
        ({"key": torch.ones(0, 2, 2)}, "2 heads and 0 groups of keys"),
        ({"rotary": torch.ones(3, 1, 2)}, r"rotary has shape \(3, 1, 2\), needed \(2,\) as max_logits"),
        ({"max_logits": torch.full((4,), 1e4)}, r"query has shape \(2, 3, 2\), needed \(4,\)"),
        ({"max_logits": torch.full((1,), 1e4), "key": torch.ones(1, 3, 2)}, r"query has shape .*, needed \(1,\)"),
        ({"max_logits": torch.full((2, 2), 1e4)}, r"query has shape .*, needed \(2, 2\)"),
        ({"threshold": 0.0}, "threshold is 0.0, needed a finite number above 0"),
        ({"alpha": 1.5}, r"alpha is 1.5, needed a number in \[0, 1\]"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(more, message):
    given = {"query": torch.ones(2, 3, 2), "key": torch.ones(2, 3, 2), "max_logits": torch.tensor([1e4, 1e4]), **more}
    with pytest.raises(ValueError, match=message):
        qk_clip(**given)
    assert all(bool((given[name] == 1).all()) for name in ("query", "key"))
