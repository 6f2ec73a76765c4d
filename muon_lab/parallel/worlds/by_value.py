"""Pickles of functions and results in which tensors are their own bytes.

What torch pickles for another process is a handle to shared memory, which vanishes with its owner; what it pickles for
a file is the whole storage that a view looks at, and not of every dtype.
"""

import io
import pickle
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

__all__ = ["dumps", "loads"]

loads = pickle.loads


def dumps(value: object) -> bytes:
    """Return a pickle with plain tensors as bytes, wherever they live.

    Examples
    --------
    >>> whole = torch.zeros(1_000_000)
    >>> len(dumps(whole[:2])) < 300, loads(dumps({"part": whole[:2]}))
    (True, {'part': tensor([0., 0.])})
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return _rebuilt, (bytearray(raw.view(torch.uint8).numpy()), obj.dtype, tuple(obj.shape), obj.requires_grad)


def _rebuilt(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> Shaped[Tensor, "..."]:
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(grad)
