"""What ranks run in tests of communication that hides behind compute."""

import itertools
import statistics
import time
from functools import partial

import torch
from torch import nn
from torch.nn.utils import skip_init

from muon_lab import optim
from muon_lab.optim import routing
from muon_lab.parallel import namespaces, traffic
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.links import SimulatedLink, duration
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer
from muon_lab.parallel.timeline import Step
from muon_lab.problems.models import GPT, GPTConfig


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class _Taking(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx, x, take, seconds):
        ctx.take, ctx.seconds = take, seconds
        take(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.take(2 * ctx.seconds)
        return gradient.clone(), None, None


class Slow(nn.Module):
    """A matrix product that takes a given time forward and twice that backward, as on a device of its own."""

    def __init__(self, width, take, seconds, generator):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / width**0.5)
        self.take, self.seconds = take, seconds

    def forward(self, x):
        return _Taking.apply(x @ self.weight, self.take, self.seconds)


def layers(*sizes):
    """Return linear layers of given widths whose weights are all 1, made without random numbers."""
    model = nn.Sequential(*(skip_init(nn.Linear, m, n, bias=False) for m, n in itertools.pairwise(sizes)))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    return model


def slow_model(width, depth, take, seconds):
    generator = torch.Generator().manual_seed(0)
    return nn.Sequential(*(Slow(width, take, seconds, generator) for _ in range(depth)))


def train(model, world, steps, *, defer, overlap, make=None, between=None, **options):
    """Train a model and return the weights and the optimizer; a bucket is a layer."""
    make = make or partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5)
    optimizer = LayerwiseOptimizer(
        make(model.parameters()), world, model=model, defer=defer, overlap=overlap, bucket=1, **options
    )
    width = model[0].weight.shape[0]
    for step in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + world.rank))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        assert optimizer.report.taken
        if between is not None:
            between(step)
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], optimizer


def foretold(width, depth, ranks, seconds, *, alpha, beta, algorithm="ring"):
    """Return what a step of `train` should take, from what it computes and from the calls that it will make."""
    sizes, dtypes, owners = [width * width] * depth, ["float32"] * depth, [i % ranks for i in range(depth)]
    plan = traffic.layerwise(sizes, dtypes, owners, ranks, 0, bucket=1)
    reduce, gather, (agree, confirm) = (
        tuple(duration(call, 0, alpha, beta, algorithm) for call in made)
        for made in (plan.gradients, plan.parameters, plan.agreement)
    )
    return Step((seconds,) * depth, (2 * seconds,) * depth, reduce[::-1], gather, 0.0, agree, confirm)


def through_a_link(world):
    link = SimulatedLink(world, 1e-3, 0.0)
    x = torch.tensor([world.rank + 1.0])
    return [
        link.all_reduce(x).wait().tolist(),
        link.all_gather(x).wait().tolist(),
        link.all_gather_v(torch.full(((0, 1, 2)[world.rank],), world.rank + 1.0), (0, 1, 2)).wait().tolist(),
        link.broadcast(x, root=1).wait().tolist(),
        link.reduce_scatter(x, sizes=(1, 0, 0)).wait().tolist(),
        link.all_reduce(x, "mean").wait().tolist(),
    ]


#: A model whose layers are half a MB each, and compute 15 ms forward and 30 ms backward, on links of 200 Mbit/s.
WIDTH, DEPTH, SECONDS, MEGABITS, STEPS = 360, 10, 0.015, 200, 6


def over_a_limited_link(world):
    """Return seconds of a step without and with hiding, of computing and of talking; and all weights."""
    with namespaces.limited(world, MEGABITS) as slow:
        ledger = Ledger(slow, "gloo")
        times, ends = [], []
        for hiding in (False, True):
            model = slow_model(WIDTH, DEPTH, time.sleep, SECONDS)
            stamps = []
            ledger.records.clear()
            weights, _ = train(
                model,
                ledger,
                STEPS,
                defer=hiding,
                overlap=hiding,
                between=lambda _, to=stamps: to.append(time.monotonic()),
            )
            times.append(statistics.median(end - begin for begin, end in itertools.pairwise(stamps)))
            ends.append(weights)
        sent = sum(record.sent("gloo") for record in ledger.records if record.tags) / STEPS
    return *times, 3 * SECONDS * DEPTH, 8 * sent / (MEGABITS * 1e6), ends


def without_a_link(world):
    return train(slow_model(WIDTH, DEPTH, lambda _: None, 0.0), world, STEPS, defer=False, overlap=False)[0]


def there_and_back(world):
    with namespaces.limited(world, 1000) as slow:
        inside, there = namespaces.bridge_exists(), slow.all_reduce(torch.ones(1)).wait().tolist()
    return [inside, namespaces.bridge_exists(), there, world.all_reduce(torch.ones(1)).wait().tolist()]


def small_gpt():
    """Return a GPT of two blocks."""
    return GPT(GPTConfig(width=8, depth=2, heads=2, context=6, vocabulary=16), torch.Generator().manual_seed(0))


def routed(model):
    """Return Muon for the matrices of a model and AdamW for the rest, as one optimizer."""
    routes = routing.split(model, heads=("head",), show=None)
    return routes.optimizer(matrix=partial(optim.Muon, lr=0.02), other=partial(torch.optim.AdamW, lr=1e-2))


def batch(step, rank):
    return torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt(world, *, steps=2, between=None, **options):
    """Return the weights of a GPT trained on batches of this rank's own; `between` is called after every step."""
    model = small_gpt()
    optimizer = LayerwiseOptimizer(routed(model), world, model=model, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, world.rank)).backward()
        optimizer.step()
        if between is not None:
            between(step, model, optimizer)
    optimizer.wait()
    return [p.detach().clone() for p in model.parameters()]


def all_ways(world, bucket, reduce):
    """Return the weights without hiding, with either kind, and with both."""
    ways = itertools.product((False, True), repeat=2)
    return [gpt(world, bucket=bucket, reduce=reduce, defer=d, overlap=o) for d, o in ways]


def all_ways_over_sockets(world):
    return all_ways(world, 2000, "reduce_scatter")
