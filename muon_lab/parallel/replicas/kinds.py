"""Which data parallelism an optimizer gets: by what it does to a parameter."""

import torch

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas.elementwise import ElementwiseOptimizer, is_elementwise
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer


def distribute(
    optimizer: torch.optim.Optimizer, group: Collectives, *, clip: float | None = None
) -> LayerwiseOptimizer | ElementwiseOptimizer:
    """Wrap an optimizer for data parallelism: whole layers for matrix optimizers, slices for element-wise ones.

    Whole layers are right for every optimizer that steps its parameters one by one; slices are for those of which it is
    known that they treat every entry by itself (`elementwise.is_elementwise`). Several optimizers joined are wrapped
    together, in whole layers.

    Parameters
    ----------
    optimizer : Optimizer
        Of all parameters, the same on every rank.
    group : Collectives
        The ranks.
    clip : float, optional
        The largest norm of the whole gradient.

    Raises
    ------
    ValueError
        As for `LayerwiseOptimizer` and `ElementwiseOptimizer`.

    Examples
    --------
    >>> from muon_lab.parallel.rendezvous import alone
    >>> W = torch.nn.Parameter(torch.ones(2, 2))
    >>> type(distribute(torch.optim.AdamW([W]), alone())).__name__
    'ElementwiseOptimizer'
    >>> type(distribute(torch.optim.Muon([W]), alone())).__name__
    'LayerwiseOptimizer'
    """
    if is_elementwise(optimizer):
        return ElementwiseOptimizer(optimizer, group, clip=clip)
    return LayerwiseOptimizer(optimizer, group, clip=clip)
