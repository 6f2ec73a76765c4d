"""Memory that is used again: on a CPU, fresh pages cost as much as the rounding that fills them."""

import threading

import torch
from jaxtyping import Float
from torch import Tensor


class Scratch(threading.local):
    """Memory that is used again from one call to the next, by purpose; every thread has its own.

    What it returns is never a result, only an operand or an intermediate of the call that asked: the next request for
    the same purpose overwrites it. Nothing that carries a gradient may be written to it. Copies and pickles of it are
    empty.

    Examples
    --------
    >>> import torch
    >>> scratch, v = Scratch(), torch.zeros(2, 3)
    >>> scratch.like(v, torch.float32, "work").data_ptr() == scratch.like(v, torch.float32, "work").data_ptr()
    True
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __reduce__(self) -> tuple[type["Scratch"], tuple[()]]:
        return Scratch, ()

    def like(self, v: Float[Tensor, "..."], dtype: torch.dtype, purpose: str) -> Float[Tensor, "..."]:
        """Return memory of the shape of v, in row-major order, whose contents are arbitrary."""
        key = purpose, dtype, v.device
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < v.numel():
            with torch.inference_mode(False):  # memory made in inference mode could not be written outside it
                buffer = self.buffers[key] = torch.empty(v.numel(), dtype=dtype, device=v.device)
        return buffer[: v.numel()].view(v.shape)

    def cast(self, v: Float[Tensor, "..."], dtype: torch.dtype, purpose: str) -> Float[Tensor, "..."]:
        """Return v in a dtype: itself if that is its own."""
        return v if v.dtype == dtype else self.like(v, dtype, purpose).copy_(v)
