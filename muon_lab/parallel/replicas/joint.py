"""Data parallelism for several optimizers joined: each part by its kind, and one step of all.

What a matrix optimizer steps is owned whole (`layerwise`), what an element-wise one steps lies in slices
(`elementwise`): an embedding that AdamW has would otherwise be one rank's alone, with its state. Gradients are clipped
by the norm of all parts, and ranks take the step of every part or of none.

References
----------
NVIDIA/Megatron-LM, ``megatron/core/optimizer/layer_wise_optimizer.py``, commit d98e8a6 (August 2026), which leaves
parameters that are no matrices to its distributed element-wise optimizer.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas import checkpoints
from muon_lab.parallel.replicas.elementwise import ElementwiseOptimizer, is_elementwise
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer
from muon_lab.parallel.replicas.ownership import Owners
from muon_lab.parallel.replicas.wrapping import Part, Wrapper, names_in


def is_mixed(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer is made of others (it has a mapping ``optimizers``), some of which are element-wise.

    Examples
    --------
    >>> is_mixed(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    False
    """
    parts = getattr(optimizer, "optimizers", None)
    return isinstance(parts, Mapping) and any(is_elementwise(part) for part in parts.values())


class JointOptimizer(Wrapper):
    """Several optimizers of which each is distributed by its kind, and all take one step.

    Parameters
    ----------
    optimizer : Optimizer
        Made of others that it has in a mapping ``optimizers``, such as `optim.routing.Joint`. Their steps are taken,
        not its own: hooks of a step belong on the whole.
    group : Collectives
        The ranks, each with equal weights and gradients of its own batch.
    owners : policy or its name, sequence of int or mapping of name to int, optional
        As for `LayerwiseOptimizer`, of the parameters that are stepped whole; only policies, where several optimizers
        do so.
    clip : float, optional
        The largest norm of the whole gradient.
    also, whole, sums
        As for `LayerwiseOptimizer`.
    **options
        Further ones of `LayerwiseOptimizer`, for what is stepped whole; slices are neither deferred nor overlapped.

    Attributes
    ----------
    parts : dict of str to LayerwiseOptimizer or ElementwiseOptimizer
        By the labels of the optimizers.
    report : Report
        What the last step did, the same on every rank.

    Raises
    ------
    ValueError
        As for `LayerwiseOptimizer` and `ElementwiseOptimizer`.

    Examples
    --------
    >>> from muon_lab import optim
    >>> from muon_lab.optim.routing import Joint
    >>> from muon_lab.parallel import worlds
    >>> def program(world):
    ...     W, E = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (6, 2)))
    ...     muon, adamw = optim.Muon([W], lr=0.1), torch.optim.AdamW([E], lr=0.1)
    ...     optimizer = JointOptimizer(Joint({"matrix": muon, "other": adamw}), world)
    ...     W.grad, E.grad = torch.eye(2), torch.ones(6, 2)
    ...     optimizer.step()
    ...     return optimizer.owners, [tuple(state["exp_avg"].shape) for state in adamw.state.values()]
    >>> worlds.run(program, ranks=2)[1]
    ({'parameter 0 of group 0': 0}, [(6,)])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Collectives,
        owners: Owners | None = None,
        *,
        clip: float | None = None,
        also: Collectives | None = None,
        whole: Collection[str] = (),
        sums: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, group, clip, also, whole)
        makers: Mapping[str, torch.optim.Optimizer] = optimizer.optimizers  # type: ignore[attr-defined]
        several = sum(not is_elementwise(each) for each in makers.values()) > 1
        if several and not (owners is None or callable(owners) or isinstance(owners, str)):
            raise ValueError(
                f"owners is a {type(owners).__name__} and several optimizers step whole parameters, needed a policy"
            )
        self.parts: dict[str, LayerwiseOptimizer | ElementwiseOptimizer] = {}
        shared: dict[str, Any] = {"clip": clip, "also": also, "sums": sums}
        for label, each in makers.items():
            known = self._whole_in(each)
            if is_elementwise(each):
                part: LayerwiseOptimizer | ElementwiseOptimizer = ElementwiseOptimizer(
                    each, group, whole=known, **shared
                )
            else:
                part = LayerwiseOptimizer(each, group, owners, whole=known, **shared, **options)
            self.parts[label] = part
        for part in self.parts.values():
            part.names = tuple(self.names[self._number[id(p)]] for p in part.parameters)
            part.whole = self.whole

    @property
    def owners(self) -> dict[str, int]:
        """The place of the rank that owns each parameter which is stepped whole."""
        return {name: owner for part in self._layered for name, owner in part.owners.items()}

    def wait(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Have the new weights of some parameters there, or of all: what reads them outside of forward calls it first.

        Raises
        ------
        ValueError
            For a parameter that is none of this optimizer's.
        """
        wanted = None if parameters is None else list(parameters)
        for place, p in enumerate(wanted or ()):
            if id(p) not in self._number:
                raise ValueError(f"parameter {place} to wait for is none of this optimizer's, needed one that is")
        for part in self._layered:
            own = {id(p) for p in part.parameters}
            part.wait(None if wanted is None else [p for p in wanted if id(p) in own])

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._layered:
                stack.enter_context(part.accumulate())
            yield

    def accumulate(self) -> AbstractContextManager[None]:
        """Let gradients of micro-batches add up: for every backward before a step but the last, with `overlap`."""
        return self._accumulating()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, on all ranks; also those that `overlap` has begun to reduce for a step that never came."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole states on every rank by label, as the optimizers alone would have them; all take part."""
        return {label: part.state_dict() for label, part in self.parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole states, saved on any number of ranks or by the wrapped optimizer alone: all of them, or none.

        Raises
        ------
        ValueError
            If the labels differ, or as the parts do.
        """
        if set(state_dict) != set(self.parts):
            raise ValueError(f"the loaded state is of {sorted(state_dict)}, needed {sorted(self.parts)}")
        before = [(leaf, dict(leaf.state), leaf.param_groups) for leaf in checkpoints.leaves(self.optimizer)]
        try:
            for label, part in self.parts.items():
                part.load_state_dict(state_dict[label])
        except Exception:
            for leaf, state, groups in before:
                leaf.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
            raise

    def close(self) -> None:
        """Wait for what is under way, and take the hooks off the model and its parameters."""
        for part in self._layered:
            part.close()

    # --- one step -----------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> Sequence[Part]:
        return list(self.parts.values())

    @property
    def _layered(self) -> list[LayerwiseOptimizer]:
        return [part for part in self.parts.values() if isinstance(part, LayerwiseOptimizer)]

    def _whole_in(self, part: torch.optim.Optimizer) -> list[str]:
        """Return what one of the optimizers calls its parameters that other ranks have whole."""
        own = zip(names_in(part), (p for group in part.param_groups for p in group["params"]), strict=True)
        return [name for name, p in own if self.names[self._number[id(p)]] in self.whole]
