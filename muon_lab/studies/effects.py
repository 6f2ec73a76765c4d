r"""What a number format does, one effect a function: a matrix and a format in, numbers out.

Each function takes the float64 matrix of a case and answers one question on it; the study `stability` names them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from muon_lab import polar
from muon_lab.arithmetic import Rounded, Wide, quantize, roundtrip
from muon_lab.arithmetic.formats import BlockFormat
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


def gradient(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    """Return what quantizing a matrix does to the matrix: in norm, element by element, and row by row."""
    X = torch.tensor(G, dtype=torch.float32)
    Q = quantize(X, case["format"], scale_mode=_mode(case), axis=-1)
    value = Q.dequantize()
    off = (value - X).abs()
    rows = X.norm(dim=1)
    top = torch.full_like(X, torch.inf)
    if isinstance(Q.format, BlockFormat) and Q.scale_bytes is not None:
        scale = effective(Q.scale_bytes, Q.format, Q.global_scale).to(X.dtype)
        top = (scale * Q.format.element.max).repeat_interleave(Q.format.block, dim=-1)[:, : X.shape[1]]
    return {
        "error": float((value - X).norm() / X.norm()),
        "gain": float((value * X).sum() / X.square().sum()),
        "saturated": float((X.abs() > top).double().mean()),
        "flushed": float(((value == 0) & (X != 0)).double().mean()),
        "coarse": float((off > COARSE * X.abs()).double().mean()),
        "worst_row": float(((value - X).norm(dim=1)[rows > 0] / rows[rows > 0]).max()),
    }


def factor(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return what quantizing the Kronecker factor of the short side, of full rank, does to its eigenvalues."""
    L = torch.tensor(G @ G.T if G.shape[0] <= G.shape[1] else G.T @ G, dtype=torch.float32)
    Q = roundtrip(L, case["format"], scale_mode=_mode(case)).double()
    eigenvalues = torch.linalg.eigvalsh((Q + Q.mT) / 2)
    return {
        "error": float((Q - L).norm() / L.norm()),
        "asymmetry": float((Q - Q.mT).norm() / Q.norm()),
        "negative": int((eigenvalues < 0).sum()),
        "lowest": float(eigenvalues[0] / eigenvalues[-1]),
    }


def factor_of_quantized(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return how far the exact polar factor moves when the matrix is quantized, and the bound :math:`\|δG\|/σ_r`."""
    Q = roundtrip(torch.tensor(G, dtype=torch.float32), case["format"], scale_mode=_mode(case), axis=-1)
    moved = Q.double().numpy() - G
    smallest = float(truth.s[truth.rank - 1])
    return {
        **_polar_metrics(torch.tensor(oracle.polar(Q.double().numpy()).U), truth),
        "error": float(np.linalg.norm(moved) / np.linalg.norm(G)),
        "bound": float(np.linalg.norm(moved) / smallest / math.sqrt(truth.rank)),
    }


def momentum(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return the share of its value that an average stored in a format reaches, for a constant gradient.

    :math:`M \leftarrow Q(\beta M + (1 - \beta) G)`: rounded to nearest, it stalls once the increment is below half a
    quantum of M. Stochastic rounding lets it arrive on average.
    """
    X = torch.tensor(G, dtype=torch.float32)
    M, beta = torch.zeros_like(X), case["beta"]
    generator = torch.Generator().manual_seed(0) if case["rounding"] == "stochastic" else None
    for _ in range(round(SETTLED / (1 - beta))):
        M = roundtrip(
            M.mul_(beta).add_(X, alpha=1 - beta),
            case["format"],
            scale_mode=_mode(case),
            rounding=case["rounding"],
            generator=generator,
        )
    return {"error": float((M - X).norm() / X.norm()), "gain": float((M * X).sum() / X.square().sum())}


def products(case: Case, G: Matrix, truth: oracle.Polar) -> Metrics:
    r"""Return what low-precision products do to an orthogonalization, and which part of its error comes from where.

    .. math:: X - U = \underbrace{(p - U)}_{truncation} + \underbrace{(X_{32} - p)}_{rounding}
              + \underbrace{(X_Q - p)}_{quantization} + remainder

    p is the iteration in float64, :math:`X_{32}` in float32, :math:`X_Q` with quantized operands and all else in
    float64: each source switched on alone. A format in which results are stored as well, such as bf16, has no
    quantization of its own: its rounding stands in the place of float32's.
    """
    schedule, X = schedules.get(case["method"], case["steps"]), torch.tensor(G, dtype=torch.float32)
    exact = polar.newton_schulz(schedule)(X.double())
    final = _last_finite(schedule, Rounded(case["format"], scale_mode=_mode(case)), X).double()
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
        "error": float((final - exact).norm() / exact.norm()),
        **{name: float(part.norm()) / size for name, part in parts.items()},
        "remainder": float((total - sum(parts.values())).norm()) / size,
    }


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


def _polar_metrics(X: torch.Tensor, truth: oracle.Polar) -> dict[str, Any]:
    found = errors(X, truth)._asdict()
    return {name: found[name] for name in ("relative", "cosine", "orthogonality", "sigma_max", "sigma_min")}


def _operands_alone(case: Case, schedule: schedules.Schedule, X: torch.Tensor) -> torch.Tensor:
    """Iterate with quantized operands (and results, where they are stored in the format) and all else in float64."""
    stored = case["format"] if case["format"] in STORED else "fp64"
    arithmetic = Rounded(case["format"], stored, _mode(case), Wide(torch.float64))
    return polar.newton_schulz(schedule, arithmetic)(X.double())


def _last_finite(schedule: schedules.Schedule, arithmetic: Rounded, X: torch.Tensor) -> torch.Tensor:
    """Return the last iterate; raises `Ended` that names the first step that is not finite."""
    for step, iterate in enumerate(polar.iterates(schedule, arithmetic)(X)):
        if not torch.isfinite(iterate).all():
            raise Ended("nonfinite", f"step {step} is not finite", {"failed_step": step})
        last = iterate
    return last
