"""The small GPT: its names, its start, what it may look at, and that it learns."""

import math
from itertools import islice

import pytest
import torch

from muon_lab.problems import models, text

TINY = models.GPTConfig(width=16, depth=2, heads=2, context=12)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=generator(7))


def test_the_default_model_has_the_layers_that_matrix_optimizers_meet():
    model = models.GPT(models.GPTConfig(), generator())
    shapes = {name: tuple(weight.shape) for name, weight in models.matrices(model).items()}
    d = model.config.width
    assert shapes == {
        f"blocks.{i}.{layer}.weight": shape
        for i in range(4)
        for layer, shape in {
            "attention.qkv": (3 * d, d),
            "attention.out": (d, d),
            "mlp.up": (4 * d, d),
            "mlp.down": (d, 4 * d),
        }.items()
    }
    others = {name for name, weight in model.named_parameters() if weight.ndim == 2} - {*shapes}
    assert others == {"embedding.weight", "head.weight"}
    assert sum(weight.numel() for weight in model.parameters()) == 492_384
    assert {*model.state_dict()} == {name for name, _ in model.named_parameters()}


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = (models.GPT(TINY, generator(seed)).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_the_first_loss_is_that_of_a_uniform_guess():
    model = models.GPT(models.GPTConfig(), generator())
    inputs = tokens(4, 33)
    loss = model.loss(inputs[:, :-1], inputs[:, 1:]).item()
    # logits have variance 1/width at the start, which adds half of that to log(vocabulary); factor 3 for the sample
    assert abs(loss - math.log(256)) < 3 * 0.5 / model.config.width


def test_no_position_sees_those_after_it():
    model = models.GPT(TINY, generator())
    inputs = tokens(2, 10)
    changed = inputs.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 256
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().min(dim=1).values.max() > 0


def test_the_order_of_the_tokens_before_matters():
    model = models.GPT(TINY, generator())
    inputs = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    first, second = model(inputs)[:, -1]
    assert (first - second).abs().max() > 100 * torch.finfo(torch.float32).eps  # far above rounding


def test_rotary_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 8, generator=generator(), dtype=torch.float64)
    turns = models.rotations(20, 8).double()
    Q, K = (models.rotated(x.expand(20, 8), turns) for x in (q, k))
    products = Q @ K.mT
    for distance in (0, 3, 11):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(
            diagonal, diagonal[:1].expand_as(diagonal), atol=40 * torch.finfo(torch.float32).eps, rtol=0
        )  # the table is float32: angles up to 20 are rounded by 20 eps, twice


def test_every_parameter_gets_a_gradient():
    model = models.GPT(TINY, generator())
    inputs = tokens(3, 13)
    model.loss(inputs[:, :-1], inputs[:, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.norm() > 0, name


@pytest.fixture
def one_thread():
    """Small products gain nothing from more threads, and wait long for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_default_model_learns_english():
    corpus = text.corpus()
    source = generator()
    model = models.GPT(models.GPTConfig(), source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for inputs, targets in islice(text.batches(corpus.train, 8, 128, source), 80):
        optimizer.zero_grad()
        model.loss(inputs, targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = model.loss(*next(text.batches(corpus.validation, 32, 128, generator(1)))).item()
    assert loss < 2.7  # nats per byte; 5.5 before; the entropy of the byte frequencies alone is 3.3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 0}, "width must be an integer of at least 1, got 0"),
        ({"context": True}, "context must be an integer of at least 1, got True"),
        ({"width": 90}, r"width must be a multiple of 2 \* heads = 8.*got width=90"),
        ({"width": 12, "heads": 4}, "even size for rotary positions, got width=12"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        models.GPTConfig(**sizes)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="at most context=12 positions, got 13"):
        models.GPT(TINY, generator())(tokens(1, 13))
