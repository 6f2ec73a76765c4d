"""The text is the same everywhere, and batches are windows of it."""

import hashlib
import math
from itertools import islice

import pytest
import torch

from muon_lab.problems import text


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_corpus_is_named_by_the_hash_of_its_bytes():
    corpus = text.corpus()
    assert corpus.sha256 == hashlib.sha256(bytes(corpus.data.tolist())).hexdigest() == text.corpus().sha256
    assert corpus.data.dtype == torch.uint8
    assert len(corpus.data) > 300_000  # every Python since 3.11 documents this much


def test_training_and_validation_parts_make_up_the_whole():
    for fraction in (0.0, 0.1, 0.9):
        corpus = text.corpus(validation=fraction)
        assert torch.equal(torch.cat([corpus.train, corpus.validation]), corpus.data)
        assert len(corpus.validation) == round(fraction * len(corpus.data))


def test_targets_are_the_bytes_that_follow():
    data = torch.arange(200, dtype=torch.uint8)
    for inputs, targets in islice(text.batches(data, 4, 7, generator()), 5):
        assert inputs.shape == targets.shape == (4, 7)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)


def test_windows_reach_both_ends_of_the_text_and_no_further():
    data = torch.arange(6, dtype=torch.uint8)
    inputs, targets = next(text.batches(data, 200, 4, generator()))
    assert inputs[:, 0].unique().tolist() == [0, 1]
    assert targets.max() == 5


def test_equal_seeds_give_equal_batches_and_others_do_not():
    data = text.corpus().train
    first, again, other = (next(text.batches(data, 8, 32, generator(seed)))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_uniform_guess_costs_eight_bits():
    assert text.bits(math.log(text.VOCABULARY)) == pytest.approx(8, rel=4 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, math.nan])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"validation must be a fraction in \[0, 1\), got"):
        text.corpus(fraction)


@pytest.mark.parametrize(
    ("batch", "context", "message"),
    [(0, 4, "at least 1, got batch=0"), (2, 0, "context=0"), (2, 5, "longer than context=5 bytes, got 5 bytes")],
)
def test_sizes_that_do_not_fit_are_refused_at_the_call(batch, context, message):
    with pytest.raises(ValueError, match=message):
        text.batches(torch.zeros(5, dtype=torch.uint8), batch, context, generator())
