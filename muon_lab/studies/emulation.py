r"""What does emulating a number format cost, beside the float32 work that it stands for?

``roundtrip`` quantizes a matrix and dequantizes it, beside a plain copy of it; ``product`` multiplies two square
matrices with rounded operands, beside their float32 product. Candidate and reference take turns; every round gives one
ratio.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from muon_lab.arithmetic import formats
from muon_lab.nearest import unknown
from muon_lab.studies.speed import RATIO_COLUMNS, interleaved, ratios
from muon_lab.studies.study import Case, Column, LeftOut, Metrics, Study

if TYPE_CHECKING:
    from torch import Tensor

OPERATIONS = ("roundtrip", "product")
PEERS = ("lab", "torch", "torchao")


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    operation: tuple[str, ...] = OPERATIONS
    """roundtrip (quantize and dequantize, beside a copy) or product (beside the float32 product)."""
    size: tuple[int, ...] = (1024, 2048)
    """Rows and columns of the square matrices."""
    threads: tuple[int, ...] = (1,)
    """CPU threads."""
    format: tuple[str, ...] = ("bf16", "mxfp8_e4m3")
    """A number format of arithmetic.formats."""
    peer: tuple[str, ...] = PEERS
    """lab, torch (native bfloat16 products) or torchao (its eager MX quantizer)."""
    repeats: tuple[int, ...] = (9,)
    """Measured rounds; one round before them does not count."""


COLUMNS = (
    *RATIO_COLUMNS,
    Column("error", "1", "distance of the result to the unrounded one, relative"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    for name, known in (("operation", OPERATIONS), ("peer", PEERS)):
        if point[name] not in known:
            raise unknown(name, point[name], known)
    for name in ("size", "threads", "repeats"):
        if point[name] < 1:
            raise ValueError(f"{name} must be at least 1, not {point[name]}")
    format = formats.get(point["format"]).name
    if point["peer"] == "torch" and (point["operation"], format) != ("product", "bf16"):
        raise LeftOut("peer 'torch' is timed for native products in bf16 alone")
    if point["peer"] == "torchao":
        if point["operation"] != "roundtrip" or format != "mxfp8_e4m3":
            raise LeftOut("peer 'torchao' is timed for the roundtrip of mxfp8_e4m3 alone")
        if find_spec("torchao") is None:
            raise LeftOut("peer 'torchao' is missing: pip install torchao adds it")
    yield {**point, "format": format}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(case["size"], case["size"], generator=generator) for _ in range(2))
    out = torch.empty_like(A)
    if case["operation"] == "roundtrip":
        candidate, reference = _roundtrip(case, A, out), lambda: out.copy_(A)
        exact = A
    else:
        candidate, reference = _product(case, A, B), lambda: A @ B
        exact = A @ B
    seconds = interleaved((candidate, reference), case["repeats"])
    return {**ratios(seconds), "error": float((candidate().float() - exact).norm() / exact.norm())}


def _roundtrip(case: Case, A: "Tensor", out: "Tensor") -> "Callable[[], Tensor]":
    from muon_lab.arithmetic import roundtrip

    if case["peer"] == "lab":
        return lambda: roundtrip(A, case["format"], out=out)
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return lambda: MXTensor.to_mx(A, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL).dequantize(
        torch.float32
    )


def _product(case: Case, A: "Tensor", B: "Tensor") -> "Callable[[], Tensor]":
    from muon_lab.arithmetic import Rounded

    if case["peer"] == "lab":
        arithmetic = Rounded(case["format"])
        return lambda: arithmetic.matmul(A, B)
    left, right = A.bfloat16(), B.bfloat16()
    return lambda: left @ right


STUDY = Study(
    name="emulation",
    question="What does emulating a number format cost, beside the float32 work that it stands for?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="ratio",
    group=("operation", "size", "format", "peer"),
    settle=settle,
    measure=measure,
    work=lambda case: (case["repeats"] + 1) * 4.0 * case["size"] ** 3,
    timed=True,
)
