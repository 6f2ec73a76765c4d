r"""QK-clip: query and key weights shrink where attention logits have grown too large (MuonClip).

For a head h whose largest logit is S and the threshold :math:`\tau`,

.. math:: \gamma_h = \min(1, \tau / S_h), \qquad W_q \leftarrow \gamma_h^{\alpha} W_q, \qquad
          W_k \leftarrow \gamma_h^{1 - \alpha} W_k,

after the optimizer's step, so that logits are bilinear in weights and the largest becomes :math:`\tau`.

References
----------
Kimi Team (2025), *Kimi K2: Open Agentic Intelligence*, section 2.1; NVIDIA/Megatron-LM for query groups.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.optim.step import check_positive, number


@torch.no_grad()
def qk_clip(
    query: Float[Tensor, "*heads rows n"],
    key: Float[Tensor, "groups key_rows n"],
    max_logits: Float[Tensor, "*logits"],
    threshold: float = 100.0,
    alpha: float = 0.5,
    rotary: Float[Tensor, "*others rotary_rows n"] | None = None,
) -> Float[Tensor, " groups"]:
    r"""Shrink query and key weights in place, and return the factor of each group.

    Heads that share keys form a group, which has one factor: that of its largest logit. A head whose key is shared by
    all (``rotary`` in latent attention) takes the whole factor in its queries, so that shared keys stay.

    Parameters
    ----------
    query : tensor
        Weights of the queries by head, a view of the parameter: ``W.view(heads, size, n)``, or for rows by group
        ``W.view(groups, heads + 2, size, n)[:, :heads]``.
    key : tensor
        Weights of the keys by group; groups follow each other as the heads do.
    max_logits : tensor
        The largest logit of each head over all that is attended to, on all ranks; the axes are those of the heads of
        the queries.
    threshold, alpha : float
        :math:`\tau`, above 0, and the share of the queries, in [0, 1].
    rotary : tensor, optional
        Query rows whose keys are shared by all heads, multiplied by :math:`\gamma` itself.

    Raises
    ------
    ValueError
        If the heads are no whole number for each group, weights are not those of as many heads as there are logits, a
        logit is not finite, or a number is out of its range; nothing has changed then.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2, 1, 1)), torch.nn.Parameter(torch.ones(2, 1, 1))
    >>> qk_clip(*W, max_logits=torch.tensor([50.0, 400.0]))
    tensor([1.0000, 0.2500])
    >>> W[0].flatten().tolist(), W[1].flatten().tolist()
    ([1.0, 0.5], [1.0, 0.5])
    """
    tau, share, groups = check_positive("threshold", threshold), number("alpha", alpha), len(key)
    if not 0 <= share <= 1:
        raise ValueError(f"alpha is {share}, needed a number in [0, 1]")
    if groups == 0 or max_logits.numel() % groups:
        raise ValueError(f"{max_logits.numel()} heads and {groups} groups of keys, needed a whole number of heads each")
    _check_heads("query", query, max_logits.shape)
    _check_heads("key", key, key.shape[:1])
    if rotary is not None:
        _check_heads("rotary", rotary, max_logits.shape)
    if not torch.isfinite(max_logits).all():
        raise ValueError(f"max_logits are {max_logits.tolist()}, needed finite numbers")
    largest = max_logits.reshape(groups, -1).amax(dim=-1).to(torch.promote_types(max_logits.dtype, torch.float32))
    gamma = torch.where(largest > tau, tau / largest.clamp(min=tau), 1.0)
    by_head = gamma.repeat_interleave(max_logits.numel() // groups).reshape(max_logits.shape)
    _scaled(query, by_head, share)
    _scaled(key, gamma, 1 - share)
    if rotary is not None:
        _scaled(rotary, by_head, 1.0)
    return gamma


def _check_heads(name: str, W: Tensor, heads: torch.Size) -> None:
    """Raise ``ValueError`` unless weights begin with axes of so many heads."""
    if W.ndim <= len(heads) or W.shape[: len(heads)] != heads:
        raise ValueError(f"{name} has shape {tuple(W.shape)}, needed {tuple(heads)} as max_logits and then its rows")


def _scaled(W: Tensor, gamma: Tensor, power: float) -> None:
    """Multiply rows of heads by powers of their factors, in the memory of the parameter."""
    factors = gamma.to(W.device).pow(power).reshape(*gamma.shape, *(1,) * (W.ndim - gamma.ndim))
    W.detach().mul_(factors if math.prod(W.shape) == 0 else factors.to(torch.promote_types(W.dtype, torch.float32)))
