"""What ranks of distributed optimizers run in tests, and what one process should make of the same gradients."""

import itertools
from functools import cache, partial

import torch
from torch import nn

from muon_lab import optim
from muon_lab.optim import routing
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.replicas.elementwise import ElementwiseOptimizer
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer

#: Matrices of several shapes, two of them alike so that they are stacked where one rank has both, and three dtypes.
MATRICES = (((6, 4), "float32"), ((4, 6), "float32"), ((4, 4), "float64"), ((6, 4), "float32"), ((3, 5), "bfloat16"))

#: What element-wise optimizers take beside them: vectors, a number, an empty one.
OTHERS = (((7,), "float32"), ((), "float32"), ((0, 3), "float32"), ((5,), "float64"))


def parameters(shapes, seed=0):
    """Return named parameters, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"w{i}", nn.Parameter(torch.randn(shape, generator=generator).to(getattr(torch, dtype))))
        for i, (shape, dtype) in enumerate(shapes)
    ]


def joint(named):
    """Return Muon for matrices and AdamW for the rest, as one optimizer."""
    matrices = [(name, p) for name, p in named if p.ndim == 2 and p.numel()]
    rest = [(name, p) for name, p in named if p.ndim != 2 or not p.numel()]
    return routing.Joint({"matrix": optim.Muon(matrices, lr=0.1), "other": torch.optim.AdamW(rest, lr=0.1)})


OPTIMIZERS = {
    "muon": (partial(optim.Muon, lr=0.1, weight_decay=0.1, nesterov=True), MATRICES),
    "mop": (partial(optim.MOP, lr=0.1), MATRICES),
    "soap": (partial(optim.SOAP, lr=0.1, eigenbasis="iteration"), MATRICES),
    "rekls": (partial(optim.REKLS, lr=0.1), MATRICES),
    "adamw": (partial(torch.optim.AdamW, lr=0.1), MATRICES + OTHERS),
    "joint": (joint, MATRICES + OTHERS),
}

MODES = tuple(itertools.product(("exact", "padded"), ("all_reduce", "reduce_scatter")))


def mean(step, shape, dtype):
    """Return the mean gradient of a step: small whole numbers, different for every step and shape."""
    count = int(torch.Size(shape).numel())
    values = (torch.arange(count) * (3 + step) + 5 * step + 2) % 11 - 5
    return values.reshape(shape).to(dtype)


def share(step, rank, ranks, p):
    """Return what a rank has of it: another gradient on every rank, and sums are exact for any number of ranks."""
    return mean(step, p.shape, p.dtype) + (2 * rank - ranks + 1) * (mean(step + 7, p.shape, p.dtype).abs() % 3)


def weights(named):
    return [p.detach().clone() for _, p in named]


@cache
def alone(name, steps=2, wanted=None):
    """Return the weights and the state that one process has after steps with the means; nobody writes to them."""
    make, shapes = OPTIMIZERS[name]
    named = parameters(shapes)
    optimizer = make(named)
    for step in range(steps):
        for key, p in named:
            p.grad = mean(step, p.shape, p.dtype) if wanted is None or key in wanted else None
        optimizer.step()
    return weights(named), optimizer.state_dict()


def trained(name, modes, world, steps=2, owners=None, kind=LayerwiseOptimizer):
    """Return, for each mode, the weights of this rank after steps with its own gradients."""
    found = []
    for gather, reduce in modes:
        make, shapes = OPTIMIZERS[name]
        named = parameters(shapes)
        optimizer = kind(make(named), world, owners, gather=gather, reduce=reduce)
        for step in range(steps):
            for _, p in named:
                p.grad = share(step, world.rank, world.size, p)
            optimizer.step()
        found.append(weights(named))
    return found


def in_groups(names, modes, world):
    """Return the weights of several optimizers, trained by groups of a world of four."""
    splits = [[0, 1, 2, 3]], [[0, 1, 2], [3]], [[0, 1], [2, 3]]
    return [{name: trained(name, modes, world.split(groups)) for name in names} for groups in splits]


def saved(name, world, steps=2, kind=LayerwiseOptimizer):
    """Return the weights and the whole state after some steps."""
    make, shapes = OPTIMIZERS[name]
    named = parameters(shapes)
    optimizer = kind(make(named), world)
    for step in range(steps):
        for _, p in named:
            p.grad = share(step, world.rank, world.size, p)
        optimizer.step()
    local = optimizer.local_state_dict() if kind is LayerwiseOptimizer else None
    return weights(named), optimizer.state_dict(), local


def resumed(name, before, state, world, begin=2, steps=4, kind=LayerwiseOptimizer):
    """Return the weights after more steps from a checkpoint."""
    make, shapes = OPTIMIZERS[name]
    named = parameters(shapes)
    with torch.no_grad():
        for (_, p), W in zip(named, before, strict=True):
            p.copy_(W)
    optimizer = kind(make(named), world)
    optimizer.load_state_dict(state)
    for step in range(begin, steps):
        for _, p in named:
            p.grad = share(step, world.rank, world.size, p)
        optimizer.step()
    return weights(named)


def entries(state):
    """Return all tensors of a dictionary of state, by path."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return {f"{key}/{path}": X for key, value in items for path, X in entries(value).items()}


def same(one, other):
    """Whether two lists of tensors are equal bit for bit."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def same_state(one, other):
    """Whether two dictionaries of state have the same tensors, bit for bit."""
    one, other = entries(one), entries(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Counting(torch.optim.SGD):
    """SGD that counts how often it has stepped each parameter."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.counts = {}

    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group.get("param_names", ()), group["params"], strict=True):
                if p.grad is not None:
                    self.counts[name] = self.counts.get(name, 0) + 1
        return super().step(closure)


def counted(layers, kind, world, steps=2):
    """Return how often this rank has stepped each layer, and the layers."""
    named = parameters([((3, 2), "float32")] * layers)
    inner = Counting([{"params": named}], lr=1.0)
    optimizer = kind(inner, world)
    for step in range(steps):
        for _, p in named:
            p.grad = share(step, world.rank, world.size, p)
        optimizer.step()
    return inner.counts, weights(named)


def ledgered(name, gather, reduce, world, missing=()):
    """Return the ledger of one step; gradients named missing are not there on ranks above 0."""
    make, shapes = OPTIMIZERS[name]
    named = parameters(shapes)
    ledger = Ledger(world)
    optimizer = LayerwiseOptimizer(make(named), ledger, gather=gather, reduce=reduce)
    ledger.records.clear()
    for key, p in named:
        p.grad = None if key in missing and world.rank else share(0, world.rank, world.size, p)
    optimizer.step()
    return ledger, list(optimizer.owners.values())


def sliced(name, world, steps=3, clip=None):
    """Return the weights of an element-wise optimizer after some steps."""
    make, shapes = OPTIMIZERS[name]
    named = parameters(shapes)
    optimizer = ElementwiseOptimizer(make(named), world, clip=clip)
    for step in range(steps):
        for _, p in named:
            p.grad = share(step, world.rank, world.size, p)
        optimizer.step()
    return weights(named), optimizer.report
