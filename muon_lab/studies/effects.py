r"""What a number format does, one effect a function: a matrix and a format in, numbers out.

Each function takes the float64 matrix of a case and answers one question on it; the study `stability` names them.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from muon_lab import polar
from muon_lab.arithmetic import Exact, Quantized, Rounded, Wide, quantize, roundtrip
from muon_lab.arithmetic.formats import Format
from muon_lab.arithmetic.kernels import effective
from muon_lab.arithmetic.rounded import STORED
from muon_lab.measure.polar import errors
from muon_lab.oracle import polar as oracle
from muon_lab.polar import schedules
from muon_lab.studies.study import Case, Ended, Metrics

Matrix = Float[np.ndarray, "m n"]

#: An element that is off by more than this is called coarse: twice the unit roundoff of E4M3, 2^-4.
COARSE = 0.125

#: Time constants after which an average of a constant counts as settled: what is missing is exp(-20), 2e-9.
SETTLED = 20.0

#: Seeds the order of the entries of the gradient at which an average starts.
ORDER = 1


def gradient(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    """Return what quantizing a matrix does to the matrix: in norm, element by element, and row by row."""
    X = _single(G, "the matrix")
    Q = quantize(X, case["format"], scale_mode=_mode(case), axis=-1)
    value, exact = _finite(Q.dequantize(), f"the matrix in {case['format']}").double(), X.double()
    off, rows = value - exact, exact.norm(dim=1)
    return {
        "error": _relative(off, exact),
        "gain": _gain(value, exact),
        "saturated": _share(exact.abs() > _ceiling(Q)),
        "flushed": _share((value == 0) & (exact != 0)),
        "coarse": _share(off.abs() > COARSE * exact.abs()),
        "worst_row": float((off.norm(dim=1) / torch.where(rows > 0, rows, 1.0)).max()),
    }


def factor(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return what storing the Kronecker factor of the short side in a format does to its eigenvalues.

    The factor is formed in float64 and handed over in float32: that of entries above 1e19 is not finite there, that of
    entries below 1e-23 vanishes. A zero factor has no lowest eigenvalue, and 0 in its place.
    """
    X = _single(G, "the matrix").double()
    exact = X @ X.mT if X.shape[0] <= X.shape[1] else X.mT @ X
    L = _single(exact, "the factor")
    if exact.any() and not L.any():
        warnings.warn("the factor vanishes in float32", stacklevel=2)
    Q = _finite(roundtrip(L, case["format"], scale_mode=_mode(case)), f"the factor in {case['format']}").double()
    eigenvalues = torch.linalg.eigvalsh((Q + Q.mT) / 2)
    largest = float(eigenvalues[-1])
    noise = len(Q) * oracle.ROUNDOFF * largest  # what the decomposition may make of a zero eigenvalue
    return {
        "error": _relative(Q - exact, exact),
        "asymmetry": _relative(Q - Q.mT, Q),
        "negative": int((eigenvalues < -noise).sum()),
        "lowest": float(eigenvalues[0]) / (largest or 1.0),
    }


def factor_of_quantized(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return how far the exact polar factor moves when the matrix is quantized, and the bound :math:`\|δG\|/σ_r`.

    A zero matrix does not move, and its bound is 0.
    """
    X, exact = _single(G, "the matrix"), torch.tensor(G)
    Q = roundtrip(X, case["format"], scale_mode=_mode(case), axis=-1)
    Q = _finite(Q, f"the matrix in {case['format']}").double()
    smallest = float(truth.s[truth.rank - 1]) * math.sqrt(truth.rank) if truth.rank else math.inf
    return {
        **_polar_metrics(torch.tensor(oracle.polar(Q.numpy()).U), truth),
        "error": _relative(Q - exact, exact),
        "bound": _size(Q - exact) / smallest,
    }


def momentum(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return the share of its value that an average stored in a format reaches, for a constant gradient.

    :math:`M \leftarrow Q(\beta M + (1 - \beta) G)`: rounded to nearest, it stalls once the increment is below half a
    quantum of M. Stochastic rounding lets it arrive on average. An average that starts at zero has the signs and the
    pattern of G from the first step on, and so have its scales: the other start is an unrelated gradient of equal size,
    the entries of G in random order.
    """
    X, beta, rounding = _single(G, "the matrix"), case["beta"], case["rounding"]
    M = roundtrip(_start(case, X), case["format"], scale_mode=_mode(case))
    generator = torch.Generator().manual_seed(0) if rounding == "stochastic" else None
    for step in range(1, round(SETTLED / (1 - beta)) + 1):
        M = M.mul_(beta).add_(X, alpha=1 - beta)
        M = roundtrip(M, case["format"], scale_mode=_mode(case), rounding=rounding, generator=generator)
        _finite(M, f"step {step}", step)
    value, exact = M.double(), X.double()
    return {"error": _relative(value - exact, exact), "gain": _gain(value, exact)}


def products(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return what low-precision products do to an orthogonalization, and which part of its error comes from where.

    .. math:: X - U = \underbrace{(p - U)}_{truncation} + \underbrace{(X_{32} - p)}_{rounding}
              + \underbrace{(X_Q - p)}_{quantization} + remainder

    p is the iteration in float64, :math:`X_{32}` in float32, :math:`X_Q` with quantized operands and all else in
    float64: each source switched on alone. A format in which results are stored as well, such as bf16, has no
    quantization of its own: its rounding stands in the place of float32's.
    """
    schedule, X = schedules.get(case["method"], case["steps"]), _single(G, "the matrix")
    exact = polar.newton_schulz(schedule)(X.double())
    final, escaped = _followed(schedule, Rounded(case["format"], scale_mode=_mode(case)), X)
    quantized = _operands_alone(case, schedule, X)
    if case["format"] in STORED:
        parts = {"rounding": quantized - exact}
    else:
        parts = {"rounding": polar.newton_schulz(schedule)(X).double() - exact, "quantization": quantized - exact}
    parts["truncation"] = exact - torch.tensor(truth.U)
    total = final - torch.tensor(truth.U)
    size = float(np.linalg.norm(truth.U)) or 1.0
    return {
        **_polar_metrics(final, truth),
        "error": _relative(final - exact, exact),
        **{name: float(part.norm()) / size for name, part in parts.items()},
        "remainder": float((total - sum(parts.values())).norm()) / size,
        "sigma_in": 1 / float(np.linalg.norm(truth.s / truth.s[0])) if truth.s[0] else 0.0,
        "escaped_step": escaped,
    }


def runaway(a: float, b: float, c: float) -> float:
    r"""Return the singular value above which a step :math:`a x + b x^3 + c x^5` enlarges every value.

    It is the largest root of :math:`|p(x)| = x`, a repelling fixed point for the published quintics: what noise pushes
    beyond it goes away from 1, step by step. 0 if there is no root.

    Examples
    --------
    >>> [round(runaway(*row), 4) for row in ((1.875, -1.25, 0.375), (3.4445, -4.7750, 2.0315), (1.5, -0.5, 0.0))]
    [1.5275, 1.2637, 2.2361]
    """
    squares = np.concatenate([np.roots([c, b, a - 1]), np.roots([c, b, a + 1])])
    return math.sqrt(max((square.real for square in squares if np.isreal(square) and square.real > 0), default=0.0))


#: The effects by the values of the axis `what`.
EFFECTS: Mapping[str, Callable[[Case, Matrix, oracle.Polar], Metrics]] = {
    "products": products,
    "gradient": gradient,
    "momentum": momentum,
    "factor": factor,
    "polar": factor_of_quantized,
}


def _mode(case: Case) -> str:
    return case["scale_mode"] or "rceil"


def _single(G: Matrix | torch.Tensor, name: str) -> torch.Tensor:
    """Return a float64 matrix in float32, as training has it; raises `Ended` if it isn't finite there."""
    return _finite(torch.as_tensor(G).float(), f"{name} in float32")


def _finite(X: torch.Tensor, name: str, step: int | None = None) -> torch.Tensor:
    """Return what is finite; raises `Ended` for anything else."""
    if not torch.isfinite(X).all():
        raise Ended("nonfinite", f"{name} is not finite", {"failed_step": step})
    return X


def _size(X: torch.Tensor) -> float:
    """Return the Frobenius norm, safe from overflow and underflow."""
    return float(Exact().norm(X))


def _relative(off: torch.Tensor, exact: torch.Tensor) -> float:
    """Return a distance relative to the size of what it is a distance to; 0 for a zero matrix, which stays zero."""
    return _size(off) / (_size(exact) or 1.0)


def _gain(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ⟨value, exact⟩/⟨exact, exact⟩ of float32 numbers in float64; 1 for a zero matrix: nothing is lost."""
    size = float(exact.square().sum())
    return float((value * exact).sum()) / size if size else 1.0


def _share(chosen: torch.Tensor) -> float:
    return float(chosen.double().mean())


def _ceiling(Q: Quantized) -> torch.Tensor:
    """Return, for every element, the magnitude above which it is clamped: Inf in formats that overflow instead."""
    if isinstance(Q.format, Format):
        return torch.tensor(Q.format.max if Q.format.saturates else math.inf)
    assert Q.scale_bytes is not None
    scales = effective(Q.scale_bytes, Q.format, Q.global_scale)
    return (scales * Q.format.element.max).repeat_interleave(Q.format.block, dim=-1)[:, : Q.shape[-1]]


def _start(case: Case, X: torch.Tensor) -> torch.Tensor:
    """Return where an average starts: at zero, or at the entries of the matrix in random order."""
    if case["start"] == "zero":
        return torch.zeros_like(X)
    order = torch.randperm(X.numel(), generator=torch.Generator().manual_seed(ORDER))
    return X.flatten()[order].reshape(X.shape)


def _polar_metrics(X: torch.Tensor, truth: oracle.Polar) -> dict[str, Any]:
    found = errors(X, truth)._asdict()
    return {name: found[name] for name in ("relative", "cosine", "orthogonality", "sigma_max", "sigma_min")}


def _operands_alone(case: Case, schedule: schedules.Schedule, X: torch.Tensor) -> torch.Tensor:
    """Iterate with quantized operands (and results, where they are stored in the format) and all else in float64."""
    stored = case["format"] if case["format"] in STORED else "fp64"
    arithmetic = Rounded(case["format"], stored, _mode(case), Wide(torch.float64))
    return polar.newton_schulz(schedule, arithmetic)(X.double())


def _followed(schedule: schedules.Schedule, arithmetic: Rounded, X: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """Return the last iterate in float64, and the first step after which the next one runs away with a singular value.

    Raises `Ended` that names the first step that is not finite.
    """
    limits = [math.inf, *(runaway(*row) for row in schedule.coefficients[1:]), math.inf]
    escaped = None
    for step, (iterate, limit) in enumerate(zip(polar.iterates(schedule, arithmetic)(X), limits, strict=True)):
        if not torch.isfinite(iterate).all():
            raise Ended("nonfinite", f"step {step} is not finite", {"failed_step": step, "escaped_step": escaped})
        last = iterate.double()
        if escaped is None and limit < math.inf and _spectral(last) > limit:
            escaped = step
    return last, escaped


def _spectral(X: torch.Tensor) -> float:
    """Return the largest singular value, from the Gram matrix of the short side: a fifth of the time of an SVD."""
    short = X if X.shape[0] <= X.shape[1] else X.mT
    return math.sqrt(max(float(torch.linalg.eigvalsh(short @ short.mT)[-1]), 0.0))
