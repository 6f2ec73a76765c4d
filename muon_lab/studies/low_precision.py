"""The small GPT under an optimizer of which one place is in a number format, beside the float32 run of its seed."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import linear
from muon_lab.optim.matrices import FLATTENED
from muon_lab.optim.soap import SOAP, EigensolverWarning, Troubles
from muon_lab.problems import models
from muon_lab.studies import convergence, descent, storage
from muon_lab.studies.study import Case, Ended, Metrics

#: The problem of `descent` that is trained.
PROBLEM = "gpt_small"

#: What Muon's direction and factor are; the other optimizers have those of the study `convergence`.
MUON: Mapping[str, object] = {"method": "quintic", "steps": 5, "scale": "match_rms_adamw", "planted": "none"}


class Setting(NamedTuple):
    """What a run and its float32 run have in common."""

    optimizer: str
    lr: float
    updates: int
    seed: int


@dataclass(frozen=True, eq=False)
class Trained:
    """Where a run began and ended: hidden weights, loss on validation text, failures of the eigensolver."""

    start: Float[Tensor, " weights"]
    end: Float[Tensor, " weights"]
    run: descent.Descent
    troubles: Troubles


def measure(case: Case, lr: float) -> Metrics:
    """Return the metrics of a case of the study `stability`, trained at a learning rate."""
    setting = Setting(case["optimizer"], lr, case["updates"], case["seed"])
    found, exact = train(setting, case), baseline(setting)
    metrics: dict[str, float | int | None] = {"failed_step": found.run.failed, **found.troubles._asdict()}
    if found.run.failed is not None:
        raise Ended("nonfinite", f"step {found.run.failed} is not finite", metrics)
    loss, away = found.run.curve[-1], exact.end - exact.start
    metrics |= {
        "loss": loss,
        "loss_gap": loss - exact.run.curve[-1],
        "error": float((found.end - exact.end).norm() / away.norm()),
    }
    if not loss < found.run.start:
        raise Ended("diverged", f"the loss went from {found.run.start:.3g} to {loss:.3g}", metrics)
    return metrics


def train(setting: Setting, case: Case | None = None) -> Trained:
    """Train with the place of a case in its format, or with everything in float32."""
    problem = descent.PROBLEMS[PROBLEM](setting.seed)
    network = problem.network
    assert isinstance(network, models.GPT)
    keep = None
    if case is not None and case["place"] == "products":
        linear.quantized(network, linear.uniform(case["format"], scale_mode=case["scale_mode"] or "rceil"))
        problem = replace(problem, views=dict.fromkeys(models.matrices(network), FLATTENED))  # they are no Linear now
    elif case is not None:
        keep = _storage(case).keep
    maker, _ = convergence.made({"optimizer": setting.optimizer, "lr": setting.lr, **MUON})
    made: list[torch.optim.Optimizer] = []

    def making(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made.append(maker(groups))
        return made[0]

    start = weights(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EigensolverWarning)  # they are counted
        run = descent.descend(problem, making, setting.updates, after=keep)
    return Trained(start, weights(network), run, troubles(made[0]))


def troubles(optimizer: torch.optim.Optimizer) -> Troubles:
    """Return how often eigensolvers failed, for all parameters together."""
    counts = optimizer.troubles().values() if isinstance(optimizer, SOAP) else ()
    return Troubles(sum(count.retried for count in counts), sum(count.kept for count in counts))


@lru_cache(maxsize=16)  # all formats and places of an optimizer and a seed are compared with the same run
def baseline(setting: Setting) -> Trained:
    """Return the float32 run."""
    return train(setting)


def weights(network: models.GPT) -> Float[Tensor, " weights"]:
    """Return a copy of the hidden weights, one after the other, in float64."""
    return torch.cat([weight.detach().flatten() for weight in models.matrices(network).values()]).double()


def _storage(case: Case) -> storage.Storage:
    """Return where the state of a case's optimizer is kept."""
    entries = storage.ENTRIES[case["place"]][case["optimizer"]]
    generator = torch.Generator().manual_seed(case["seed"]) if case["rounding"] == "stochastic" else None
    return storage.Storage(entries, case["format"], case["scale_mode"] or "rceil", case["rounding"], generator)
