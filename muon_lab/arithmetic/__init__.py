"""How numbers are kept and multiplied."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.arithmetic import formats
    from muon_lab.arithmetic.counted import Counted
    from muon_lab.arithmetic.microscaling import Quantized, quantize, roundtrip
    from muon_lab.arithmetic.policy import Arithmetic, Exact, check_arithmetic, largest, unit
    from muon_lab.arithmetic.rounded import Rounded, TensorCore, Wide
    from muon_lab.arithmetic.symmetric import Symmetric

__all__ = [
    "Arithmetic",
    "Counted",
    "Exact",
    "Quantized",
    "Rounded",
    "Symmetric",
    "TensorCore",
    "Wide",
    "check_arithmetic",
    "formats",
    "largest",
    "quantize",
    "roundtrip",
    "unit",
]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "formats": "formats",
        "Counted": "counted",
        "Symmetric": "symmetric",
        **dict.fromkeys(("Quantized", "quantize", "roundtrip"), "microscaling"),
        **dict.fromkeys(("Arithmetic", "Exact", "check_arithmetic", "largest", "unit"), "policy"),
        **dict.fromkeys(("Rounded", "TensorCore", "Wide"), "rounded"),
    },
)
