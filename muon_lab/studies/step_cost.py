r"""What does a step of an optimizer cost on the matrices of a model, beside the plain float32 loop?

The reference is Muon written out: one matrix at a time, an averaged gradient, five quintic steps in float32 by general
products, the weight moved. Candidate and reference take turns on equal weights and gradients; every round gives one
ratio. A candidate's update is compared with the exact polar factor of the averaged gradient: after one step from zero
momentum that is the polar factor of the gradient itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from muon_lab.cost import inventory
from muon_lab.nearest import unknown
from muon_lab.studies.speed import RATIO_COLUMNS, check_counts, interleaved, ratios
from muon_lab.studies.study import Case, Column, LeftOut, Metrics, Study

if TYPE_CHECKING:
    import torch

#: The hidden matrices of a layer, by model.
LAYERS: Mapping[str, tuple[tuple[int, int], ...]] = {
    **{name: tuple(layer.shape for layer in inventory.get(name).matrices) for name in ("gpt2", "gpt2-medium")},
    "tiny": ((96, 32), (32, 32), (128, 32), (32, 128)),
}

#: Optimizers of the lab, and those of others by their package.
OPTIMIZERS = ("muon", "mop", "soap", "rekls", "torch.optim.Muon", "torch.optim.AdamW", "pytorch_optimizer.Muon")

#: Whose updates are directions, so that they can be compared with polar factors.
DIRECTIONS = ("muon", "mop", "torch.optim.Muon", "pytorch_optimizer.Muon")

STEPS, LR = 5, 1e-3


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    model: tuple[str, ...] = ("gpt2",)
    """Whose matrices: gpt2, gpt2-medium or tiny."""
    layers: tuple[int, ...] = (12,)
    """Layers, of four matrices each."""
    threads: tuple[int, ...] = (1,)
    """CPU threads."""
    optimizer: tuple[str, ...] = ("muon",)
    """muon, mop, soap, rekls (of the lab), torch.optim.Muon, torch.optim.AdamW or pytorch_optimizer.Muon."""
    repeats: tuple[int, ...] = (5,)
    """Measured rounds; one round before them does not count."""


COLUMNS = (
    *RATIO_COLUMNS,
    Column("relative", "1", "‖X − U‖/‖U‖ of the first update, brought to the norm of U; median over matrices"),
    Column("reference_relative", "1", "the same for the reference"),
    Column("state_bytes", "count", "memory of the optimizer's state"),
    Column("parameter_bytes", "count", "memory of the matrices"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    for name, known in (("model", LAYERS), ("optimizer", OPTIMIZERS)):
        if point[name] not in known:
            raise unknown(name, point[name], known)
    check_counts(point)
    if point["layers"] < 1:
        raise ValueError(f"layers must be at least 1, not {point['layers']}")
    package = point["optimizer"].partition(".")[0]
    if "." in point["optimizer"] and find_spec(package) is None:
        raise LeftOut(f"optimizer {point['optimizer']!r} is missing: pip install -e '.[peers]' adds it")
    yield dict(point)


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = case["layers"] * LAYERS[case["model"]]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    weights, other = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    for W, G in zip(weights, gradients, strict=True):
        W.grad = G.clone()  # some write into it
    optimizer, reference = _maker(case["optimizer"])(weights), _plain_loop(other, gradients)
    optimizer.step()
    reference()
    measured = case["optimizer"] in DIRECTIONS
    errors = [_errors(updated, gradients) for updated in ((weights, other) if measured else (other,))]
    found: dict[str, float | int | None] = {"reference_relative": float(np.median(errors[-1]))}
    if measured:
        found["relative"] = float(np.median(errors[0]))
    for W, G in zip(weights, gradients, strict=True):
        W.grad = G.clone()
    held = [entry for state in optimizer.state.values() for entry in state.values() if isinstance(entry, torch.Tensor)]
    return {
        **ratios(interleaved((optimizer.step, reference), case["repeats"])),
        **found,
        "state_bytes": sum(entry.numel() * entry.element_size() for entry in held),
        "parameter_bytes": sum(W.numel() * W.element_size() for W in weights),
    }


def _maker(name: str) -> "Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]":
    from functools import partial
    from importlib import import_module

    from muon_lab import optim

    own = {"muon": optim.Muon, "mop": optim.MOP, "soap": optim.SOAP, "rekls": optim.REKLS}
    if name in own:
        return partial(own[name], lr=LR)
    module, _, attribute = name.rpartition(".")
    made = partial(getattr(import_module(module), attribute), lr=LR)
    if module == "pytorch_optimizer":
        return lambda weights: made([{"params": weights, "use_muon": True}])
    return made


def _plain_loop(weights: "list[torch.nn.Parameter]", gradients: "list[torch.Tensor]") -> Callable[[], None]:
    """Return the step of Muon, written out."""
    import torch

    from muon_lab import polar

    orthogonalize = polar.newton_schulz(polar.schedules.get("quintic", STEPS))
    averages = [torch.zeros_like(W) for W in weights]

    def step() -> None:
        with torch.no_grad():
            for W, M, G in zip(weights, averages, gradients, strict=True):
                M.lerp_(G, 0.05)
                W.add_(orthogonalize(M), alpha=-LR * max(M.shape) ** 0.5)

    return step


def _errors(weights: "list[torch.nn.Parameter]", gradients: "list[torch.Tensor]") -> list[float]:
    """Return how far the first updates, from zero weights, are from polar factors of the gradients up to scale.

    Layers are alike: those of the first one are looked at.
    """
    from muon_lab.measure.polar import errors
    from muon_lab.oracle.polar import polar

    found = []
    for W, G in list(zip(weights, gradients, strict=True))[:4]:
        truth, X = polar(G.double().numpy()), -W.detach().double()
        found.append(errors(X * (min(W.shape) ** 0.5 / X.norm()), truth).relative)
    return found


def work(case: Case) -> float:
    """Estimate the flops of a case: about twice the reference a round."""
    from muon_lab.studies import methods

    layer = sum(methods.work("quintic", STEPS, m, n) or 0.0 for m, n in LAYERS[case["model"]])
    return (case["repeats"] + 1) * 2.0 * case["layers"] * layer


STUDY = Study(
    name="step_cost",
    question="What does a step of an optimizer cost on the matrices of a model, beside the plain float32 loop?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="ratio",
    group=("model", "optimizer", "threads"),
    settle=settle,
    measure=measure,
    work=work,
    timed=True,
)
