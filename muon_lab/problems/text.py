r"""Byte-level language modelling on English text that ships with Python.

The text is the documentation in ``pydoc_data.topics`` (what ``help("topics")`` shows), its topics joined in
alphabetical order and encoded as UTF-8: about 465 kB of technical English, available wherever Python is, without a
download. One token is one byte, so a model needs a vocabulary of 256, and its loss

.. math:: -\frac{1}{N} \sum_{i=1}^{N} \log p(\text{byte}_i \mid \text{bytes before})

is in nats per byte; a uniform guess costs :math:`\log 256 \approx 5.545`.

The topics change with the version of Python, so every result names the text by its SHA-256. The documentation repeats
itself (some 9 % of the validation bytes stand in paragraphs that the training part also has): validation losses compare
optimizers with each other, they do not measure generalisation.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

VOCABULARY = 256
"""Number of tokens: the values of a byte."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as bytes, cut into a training part and a validation part.

    Parameters
    ----------
    data : uint8 tensor of shape (n,)
        The whole text.
    boundary : int
        Number of leading bytes that are for training; the rest is for validation.
    sha256 : str
        Hexadecimal SHA-256 of the whole text.
    """

    data: UInt8[Tensor, " n"]
    boundary: int
    sha256: str

    @property
    def train(self) -> UInt8[Tensor, " k"]:
        """The leading part, a view."""
        return self.data[: self.boundary]

    @property
    def validation(self) -> UInt8[Tensor, " k"]:
        """The trailing part, a view."""
        return self.data[self.boundary :]


def corpus(validation: float = 0.1) -> Corpus:
    """Read Python's own documentation as bytes.

    Parameters
    ----------
    validation : float
        Fraction of the bytes, taken from the end, that is kept for validation.

    Raises
    ------
    ValueError
        If the fraction is not in [0, 1).

    Examples
    --------
    >>> text = corpus(validation=0.25)
    >>> text.train.dtype, len(text.train) > 3 * len(text.validation) - 4
    (torch.uint8, True)
    >>> bytes(text.data[:22].tolist()).decode()
    'The "assert" statement'
    """
    if not 0 <= validation < 1:
        raise ValueError(f"corpus: validation must be a fraction in [0, 1), got {validation}")
    raw = "\n".join(topics[name] for name in sorted(topics)).encode()
    boundary = len(raw) - round(validation * len(raw))
    return Corpus(torch.frombuffer(bytearray(raw), dtype=torch.uint8), boundary, hashlib.sha256(raw).hexdigest())


def batches(
    data: UInt8[Tensor, " n"], batch: int, context: int, generator: torch.Generator
) -> Iterator[tuple[Int64[Tensor, "batch context"], Int64[Tensor, "batch context"]]]:
    """Draw windows of the text without end, each with the bytes that follow its own.

    The starts are uniform and independent; ``targets[:, t]`` is the byte after ``inputs[:, t]``.

    Parameters
    ----------
    data : uint8 tensor of shape (n,)
        The text to draw from.
    batch, context : int
        Number of windows and their length.
    generator : torch.Generator
        The only source of randomness; it moves with every pair that is drawn.

    Raises
    ------
    ValueError
        If a size is not positive or the text is not longer than one window.

    Examples
    --------
    >>> data = torch.arange(20, dtype=torch.uint8)
    >>> inputs, targets = next(batches(data, batch=2, context=3, generator=torch.Generator().manual_seed(0)))
    >>> inputs.shape, torch.equal(targets, inputs + 1)
    (torch.Size([2, 3]), True)
    """
    if batch < 1 or context < 1:
        raise ValueError(f"batches: batch and context must be at least 1, got batch={batch} and context={context}")
    if len(data) <= context:
        raise ValueError(f"batches: data must be longer than context={context} bytes, got {len(data)} bytes")
    return _windows(data, batch, torch.arange(context), generator)


def _windows(
    data: UInt8[Tensor, " n"], batch: int, offsets: Int64[Tensor, " context"], generator: torch.Generator
) -> Iterator[tuple[Int64[Tensor, "batch context"], Int64[Tensor, "batch context"]]]:
    """Yield what :func:`batches` promises; apart from it so that bad sizes are refused at the call."""
    while True:
        starts = torch.randint(len(data) - len(offsets), (batch, 1), generator=generator)
        yield data[starts + offsets].long(), data[starts + offsets + 1].long()


def bits(nats: float) -> float:
    """Turn a loss in nats per byte into bits per byte.

    Examples
    --------
    >>> round(bits(math.log(256)), 12)
    8.0
    """
    return nats / math.log(2)
