r"""Training the small GPT with AdamW, its hidden layers in emulated products.

Every arm has the same text, the same weights at the start and the same batches in the same order; they differ in the
products of the hidden linear layers alone (`arithmetic.linear`). Embedding, head, norms, attention scores, optimizer
and weights themselves stay in float32: the weights are masters, rounded anew for every product.

The gradient g of the hidden matrices, as one vector, is compared with that of exact products, and with that of products
in bfloat16, at the same weights and for the same batch: with :math:`g_q` of the arm,

.. math:: cosine = \frac{\langle g_q, g\rangle}{\|g_q\|\,\|g\|}, \qquad gain = \frac{\langle g_q, g\rangle}{\|g\|^2}.

A gain other than 1 is a bias, like that of scales that saturate; noise lowers the cosine and leaves the gain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from muon_lab.arithmetic import linear
from muon_lab.problems import models, streams, text

#: The model unless another is given: the one whose gradients are recorded.
MODEL = models.GPTConfig()
#: How many validation batches there are, and the sequences in each: with a context of 128, a third of the text.
VALIDATION = (4, 32)
#: Seeds what is drawn besides the training: validation batches and the batch of the compared gradients.
FIXED = 1

Batch: TypeAlias = tuple[Int64[Tensor, "batch context"], Int64[Tensor, "batch context"]]


class Agreement(NamedTuple):
    """How the gradient in an arm's products stands to that in others; None where it is zero or not finite."""

    cosine: float | None
    gain: float | None


class Agreements(NamedTuple):
    """How the gradient in an arm's products stands to that in exact ones, and to that in bfloat16."""

    exact: Agreement
    bf16: Agreement


class Comparison(NamedTuple):
    """How much higher an arm's losses are than a baseline's, in nats per byte; None where one of them broke off.

    `loss_gap` is of the validation losses at the end, `training_gap` of the training losses, over the last tenth.
    """

    loss_gap: float | None
    training_gap: float | None


@dataclass(frozen=True)
class Run:
    """What became of a training run.

    Attributes
    ----------
    losses : tuple of float
        Training loss of every step, before its update; up to the one that was not finite.
    validation : float, optional
        Loss on the validation batches at the end, in the arm's own products; None if it isn't finite or training ended
        before.
    nonfinite : int, optional
        The first step, counted from 1, whose loss or gradient was not finite: it updates nothing and is the last.
    gradients : mapping of int to Agreements
        By number of updates before, the agreement of the gradients.
    """

    losses: tuple[float, ...]
    validation: float | None
    nonfinite: int | None
    gradients: Mapping[int, Agreements]


def train(
    products: linear.Products | None,
    *,
    steps: int,
    seed: int = 0,
    lr: float = streams.Recording.lr,
    probe: Iterable[int] = (),
    model: models.GPTConfig = MODEL,
    batch: int = streams.Recording.batch,
) -> Run:
    """Train one arm. With products of None it is the run of which `problems.streams` records gradients.

    Parameters
    ----------
    products : Products, optional
        The products of the hidden layers; None takes them exactly, in float32.
    steps : int
        Number of steps.
    seed : int
        Seeds the weights and then the order of the data.
    lr : float
        Learning rate of AdamW, constant; the other settings are those of a `Recording`.
    probe : integers from 0 to steps
        After how many updates the gradients are compared: 0 is the common start, `steps` the end.
    model : GPTConfig
        Sizes of the model.
    batch : int
        Sequences a step, each of the model's full context.

    Raises
    ------
    ValueError
        If a value is outside its range.

    Examples
    --------
    >>> tiny = models.GPTConfig(width=32, depth=1, heads=2, context=16)
    >>> run = train(linear.uniform("mxfp8_e4m3"), steps=3, probe=[0, 3], model=tiny, batch=2)
    >>> len(run.losses), run.nonfinite, f"{run.gradients[0].exact.cosine:.2f}"
    (3, None, '1.00')
    """
    setting = streams.Recording(model, lr=lr, batch=batch, steps=(steps,), seed=seed)
    probe = _checked(probe, steps)
    corpus, generator = text.corpus(), _generator(seed)
    network = models.GPT(model, generator)
    if products is not None:
        linear.quantized(network, products)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, betas=setting.betas, weight_decay=setting.weight_decay)
    held_fixed = next(text.batches(corpus.train, batch, model.context, _generator(FIXED)))
    losses: list[float] = []
    gradients = {0: agreements(network, held_fixed)} if 0 in probe else {}
    batches = text.batches(corpus.train, batch, model.context, generator)
    for step, (inputs, targets) in zip(range(1, steps + 1), batches, strict=False):
        optimizer.zero_grad()
        loss = network.loss(inputs, targets)
        loss.backward()
        if not _finite(loss, network):
            return Run(tuple(losses), None, step, gradients)
        optimizer.step()
        losses.append(loss.item())
        if step in probe:
            gradients[step] = agreements(network, held_fixed)
    return Run(tuple(losses), _finite_or_none(validation(network, corpus)), None, gradients)


def compare(arm: Run, baseline: Run) -> Comparison:
    """Return how much worse an arm ended than a baseline: the run in exact products, or the one in bfloat16.

    Examples
    --------
    >>> arm, baseline = Run((5.5, 5.0), 5.25, None, {}), Run((5.5, 4.5), 4.75, None, {})
    >>> compare(arm, baseline)
    Comparison(loss_gap=0.5, training_gap=0.5)
    >>> compare(Run((5.5,), None, 2, {}), baseline)
    Comparison(loss_gap=None, training_gap=None)

    Raises
    ------
    ValueError
        If both ran to the end, with different numbers of steps.
    """
    if arm.nonfinite or baseline.nonfinite:
        return Comparison(None, None)
    if len(arm.losses) != len(baseline.losses):
        raise ValueError(f"compare: both runs must have equal steps, got {len(arm.losses)} and {len(baseline.losses)}")
    last = -(-len(arm.losses) // 10)
    training_gap = (sum(arm.losses[-last:]) - sum(baseline.losses[-last:])) / last
    if arm.validation is None or baseline.validation is None:
        return Comparison(None, training_gap)
    return Comparison(arm.validation - baseline.validation, training_gap)


def agreements(network: models.GPT, batch: Batch) -> Agreements:
    """Compare a network's gradient for a batch with those of exact and of bfloat16 products at the same weights."""
    g_q = gradient(network, batch)
    exact = models.GPT(network.config, _generator(0))
    exact.load_state_dict(network.state_dict())
    g = gradient(exact, batch)
    linear.quantized(exact, linear.BF16)
    return Agreements(agree(g_q, g), agree(g_q, gradient(exact, batch)))


def agree(g_q: Float[Tensor, " n"], g: Float[Tensor, " n"]) -> Agreement:
    """Return cosine and gain of a gradient relative to another, in float64.

    Examples
    --------
    >>> agree(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]))
    Agreement(cosine=0.6, gain=1.5)
    >>> agree(torch.zeros(2), torch.ones(2))
    Agreement(cosine=None, gain=0.0)
    """
    g_q, g = g_q.double(), g.double()
    product = torch.dot(g_q, g)
    return Agreement(_finite_or_none(product / (g_q.norm() * g.norm())), _finite_or_none(product / torch.dot(g, g)))


def gradient(network: models.GPT, batch: Batch) -> Float[Tensor, " n"]:
    """Return the gradient of all hidden matrices for a batch, one after the other; the network stays as it is."""
    found = torch.autograd.grad(network.loss(*batch), [*models.matrices(network).values()])
    return torch.cat([each.flatten() for each in found])


def validation(network: models.GPT, corpus: text.Corpus) -> Float[Tensor, ""]:
    """Return the mean loss over the validation batches, the same for every network of one context."""
    count, sequences = VALIDATION
    batches = text.batches(corpus.validation, sequences, network.config.context, _generator(FIXED))
    with torch.no_grad():
        return torch.stack([network.loss(*batch) for batch in islice(batches, count)]).mean()


def _checked(probe: Iterable[int], steps: int) -> frozenset[int]:
    chosen = frozenset(probe)
    if not chosen <= frozenset(range(steps + 1)):
        raise ValueError(f"train: probe must have integers from 0 to steps={steps}, got {sorted(chosen)}")
    return chosen


def _finite(loss: Tensor, network: models.GPT) -> bool:
    """Return whether a loss and all gradients are finite."""
    found = [loss, *(weight.grad for weight in network.parameters() if weight.grad is not None)]
    return all(bool(each.isfinite().all()) for each in found)


def _finite_or_none(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None


def _generator(seed: int) -> torch.Generator:
    generator = torch.Generator()
    return generator.manual_seed(seed)
