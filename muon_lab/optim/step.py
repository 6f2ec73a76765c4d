r"""The pieces of one step, as pure functions of matrices: decay, momentum, scale, and the checks of what steers them.

A weight W (m, n) with gradient G, learning rate :math:`\eta` and weight decay :math:`\lambda` goes through decay,
momentum, direction and scale,

.. math:: W \leftarrow W - \eta\, x\, s\, D,

with the candidate C of the momentum, its direction D, a factor s that may depend on both, and an extra factor x.
Decay comes before everything else, and by :math:`\eta` itself, not by a scaled one:

============= ====================================================
`decoupled`   :math:`W \leftarrow (1 - \eta\lambda) W`
`independent` :math:`W \leftarrow (1 - \lambda) W`
`palm`        :math:`W \leftarrow (1 - \eta^2\lambda) W`
`l2`          :math:`G \leftarrow G + \lambda W`
============= ====================================================

======== ============================================= =======================================
momentum buffer                                        with Nesterov's look-ahead the candidate
======== ============================================= =======================================
`average` :math:`M \leftarrow \mu M + (1 - \mu) G`     :math:`C = \mu M + (1 - \mu) G`
`sum`    :math:`M \leftarrow \mu M + G`                :math:`C = \mu M + G`
======== ============================================= =======================================

Without look-ahead C = M; the buffer starts at zero and has no bias correction.

When the two forms agree. Let :math:`\mu` be constant, and let neither the direction nor the factor s depend on the
scale of C. Then both forms give the same weights, in every form of decay. By induction: equal weights give equal
gradients, and with `l2` equal weights are added to them, so :math:`C_{average} = (1 - \mu)\, C_{sum}` and the
directions are equal. The nuclear norm depends on the scale: there `sum` moves :math:`1 / (1 - \mu)` times as far where
the gradients are the same. A :math:`\mu` that changes makes two different averages of the gradients, with two
directions.

=================== =================================================================================
mode                factor s
=================== =================================================================================
`none`              1
`spectral`          :math:`\sqrt{\max(m, n)}`, for an update of RMS 1 from orthonormal rows or columns
`match_rms_adamw`   :math:`0.2 \sqrt{\max(m, n)}`, for RMS 0.2
`unit_rms_norm`     :math:`\sqrt{m / n}`
`shape_scaling`     :math:`\sqrt{\max(1, m / n)}`
`nuclear_norm`      :math:`\langle D, C \rangle`, the nuclear norm of C if D is its polar factor
=================== =================================================================================

m and n, and the sum over entries, are those of the whole matrix where a layout sees a shard. Matrices come with any
number of leading axes. Nothing here changes its arguments.

References
----------
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), for the order and the names; Loshchilov & Hutter (2019)
and Chowdhery et al. (2022) for decoupled decay and the one with :math:`\eta^2`; Liu et al. (2025), *Muon is scalable
for LLM training*, for 0.2; Lau et al. (2025), *PolarGrad*, for the nuclear norm.
"""

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.nearest import unknown
from muon_lab.parallel.layouts import ALONE, Whole

DECAYS: Final = ("decoupled", "independent", "palm", "l2")
FORMS: Final = ("average", "sum")
SCALES: Final = ("none", "spectral", "match_rms_adamw", "unit_rms_norm", "shape_scaling", "nuclear_norm")

#: The RMS of a typical AdamW update (Liu et al. 2025, section 2.2).
ADAMW_RMS: Final = 0.2


def decayed(
    W: Float[Tensor, "*batch m n"], G: Float[Tensor, "*batch m n"], lr: float, weight_decay: float, method: str
) -> tuple[Float[Tensor, "*batch m n"], Float[Tensor, "*batch m n"]]:
    """Return the weight and the gradient after decay, in one of the forms `DECAYS`.

    Examples
    --------
    >>> W, G = decayed(torch.ones(1, 1), torch.zeros(1, 1), lr=0.1, weight_decay=0.5, method="decoupled")
    >>> W, G
    (tensor([[0.9500]]), tensor([[0.]]))
    """
    if weight_decay == 0:
        return W, G
    if method == "l2":
        return W, G + weight_decay * W
    rate = {"decoupled": lr * weight_decay, "independent": weight_decay, "palm": lr * lr * weight_decay}[method]
    return (1 - rate) * W, G


def momentum(
    M: Float[Tensor, "*batch m n"], G: Float[Tensor, "*batch m n"], mu: float, form: str, nesterov: bool
) -> tuple[Float[Tensor, "*batch m n"], Float[Tensor, "*batch m n"]]:
    """Return the new buffer M and the candidate C, in one of the forms `FORMS`.

    Examples
    --------
    >>> M, C = momentum(torch.zeros(1, 1), torch.ones(1, 1), mu=0.5, form="average", nesterov=True)
    >>> M, C
    (tensor([[0.5000]]), tensor([[0.7500]]))
    """
    fresh = 1 - mu if form == "average" else 1.0
    M = torch.add(mu * M, G, alpha=fresh)
    return M, torch.add(mu * M, G, alpha=fresh) if nesterov else M


def scale(
    mode: str, C: Float[Tensor, "*batch m n"], D: Float[Tensor, "*batch m n"], shards: Whole = ALONE
) -> float | Float[Tensor, "*batch 1 1"]:
    """Return the factor of the direction D of the candidate C, in one of the modes `SCALES`; 0 for an empty matrix.

    `shards` says what C and D are shards of. The sum for `nuclear_norm` is one of products rounded to the dtype of the
    matrices, taken in float64 and rounded once: for float32 ranks have the bits of one, but where an error of float64
    decides that rounding.

    Examples
    --------
    >>> C = torch.full((32, 8), 0.5)
    >>> [round(float(scale(mode, C, C)), 3) for mode in SCALES]
    [1.0, 5.657, 1.131, 2.0, 2.0, 64.0]
    """
    if mode == "nuclear_norm":
        return shards.summed((D * C).sum(dim=(-2, -1), keepdim=True, dtype=torch.float64)).to(C.dtype)
    m, n = shards.whole_shape(C.shape)[-2:]
    if m * n == 0:
        return 0.0
    factors = {
        "none": 1.0,
        "spectral": math.sqrt(max(m, n)),
        "match_rms_adamw": ADAMW_RMS * math.sqrt(max(m, n)),
        "unit_rms_norm": math.sqrt(m / n),
        "shape_scaling": math.sqrt(max(1.0, m / n)),
    }
    return factors[mode]


def moved(
    W: Float[Tensor, "*batch m n"], U: Float[Tensor, "*batch m n"], size: float | Float[Tensor, "*batch 1 1"]
) -> Float[Tensor, "*batch m n"]:
    r"""Return :math:`W - size \cdot U`.

    Examples
    --------
    >>> moved(torch.ones(1, 2), torch.tensor([[1.0, -2.0]]), 0.25)
    tensor([[0.7500, 1.5000]])
    """
    return W - size * U  # alpha of torch.add would refuse a size beyond float32 instead of giving infinity


def number(name: str, value: object) -> float:
    """Return a hyperparameter as a Python float.

    A tensor of one number in float32 or float16 stands for the shortest decimal that rounds to it, so that
    ``torch.tensor(0.1)`` and 0.1 give the same bits.

    Raises
    ------
    ValueError
        If it is not one real number.

    Examples
    --------
    >>> number("lr", torch.tensor(0.1)), number("lr", 1)
    (0.1, 1.0)
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}, needed one real number")
        if value.dtype in (torch.float32, torch.float16):
            return float(str(value.detach().reshape(()).cpu().numpy()))
        return float(value.detach())
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ValueError(f"{name} is {value!r}, needed one real number")
    return float(value)


def check_rate(name: str, value: object) -> float:
    """Return a value that must be finite and not negative: a learning rate, a decay, a factor.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_rate("lr", 0.0)
    0.0
    """
    found = number(name, value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} is {found}, needed a finite number of at least 0")
    return found


def check_fraction(name: str, value: object) -> float:
    """Return a value that must be in [0, 1): the coefficient of an average.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_fraction("momentum", 0.95)
    0.95
    """
    found = number(name, value)
    if not 0 <= found < 1:
        raise ValueError(f"{name} is {found}, needed a number in [0, 1)")
    return found


def check_positive(name: str, value: object) -> float:
    """Return a value that must be finite and above 0: what keeps a quotient finite.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_positive("eps", 1e-8)
    1e-08
    """
    found = number(name, value)
    if not 0 < found < math.inf:
        raise ValueError(f"{name} is {found}, needed a finite number above 0")
    return found


def check_flag(name: str, value: object) -> bool:
    """Return a value that must be true or false; text and numbers are neither.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_flag("nesterov", True)
    True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} is {value!r}, needed True or False")
    return bool(value)


def check_name(what: str, name: object, known: tuple[str, ...]) -> None:
    """Refuse a name that is none of the known ones.

    Raises
    ------
    ValueError
        With the nearest known name.
    """
    if name not in known:
        raise unknown(what, name, known)
