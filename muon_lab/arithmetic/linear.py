r"""Linear layers whose products are taken in low precision, forward and backward.

A layer :math:`Y = X W^T` (rows of X are tokens, W is out × in) takes three products in training, and each of them sums
over an axis of its own:

.. math:: Y = Q_{in}(X)\,Q_{in}(W)^T, \qquad dX = Q_{out}(dY)\,Q_{out}(W), \qquad
          dW = Q_{tokens}(dY)^T\,Q_{tokens}(X).

:math:`Q_a` rounds to a format in blocks along axis a, the one that is summed over. So every tensor has two copies,
both of them rounded from the high-precision tensor: neither follows from the other, and nothing is rounded twice.
The rounded operands are multiplied and summed in the dtype of the data, as a rule float32.

The backward pass is the one that hardware takes, with operands rounded for its own products. It is not the derivative
of the rounded forward pass, which is zero almost everywhere, nor that of one with the rounding left out; so it cannot
be differentiated again.

References
----------
NVIDIA, *Transformer Engine*, ``MXFP8BlockScaling``: which copy goes into which product.
Mishra et al., arXiv 2506.08027: E4M3 for weights, activations and gradients.
Micikevicius et al., *FP8 Formats for Deep Learning*, arXiv 2209.05433: E5M2 for gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from muon_lab.arithmetic import formats, scales
from muon_lab.arithmetic.formats import BlockFormat, Format
from muon_lab.arithmetic.microscaling import roundtrip

#: dtypes in which a layer can be emulated: those that `roundtrip` keeps.
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Products:
    """The formats in which a linear layer's products read their operands and leave their results.

    Parameters
    ----------
    weights, activations, gradients : str, Format or BlockFormat, optional
        Formats of W, X and dY, names of `formats.known` or records of your own; None leaves an operand as it is.
    scale_mode : "floor", "ceil", "rceil" or "even"
        How power-of-two scales are rounded; of no effect on formats without one.
    stored : str or Format, optional
        The scalar format to which all three results are rounded; None leaves them as they were accumulated.

    Raises
    ------
    ValueError
        If a name is unknown or its format cannot hold operands, or results are to be stored in blocks.

    Examples
    --------
    >>> Products("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e5m2")
    Products(weights='mxfp8_e4m3', activations='mxfp8_e4m3', gradients='mxfp8_e5m2', scale_mode='rceil', stored=None)
    >>> Products(stored="mxfp8_e4m3")
    Traceback (most recent call last):
    ValueError: stored must be a scalar format, since blocks would need an axis, got 'mxfp8_e4m3'
    """

    weights: str | Format | BlockFormat | None = None
    activations: str | Format | BlockFormat | None = None
    gradients: str | Format | BlockFormat | None = None
    scale_mode: str = "rceil"
    stored: str | Format | None = None

    def __post_init__(self) -> None:
        for format in (self.weights, self.activations, self.gradients):
            if format is not None:
                formats.of_numbers(format)
        if self.stored is not None:
            formats.of_results(self.stored)
        scales.checked(self.scale_mode)


def uniform(
    format: str | Format | BlockFormat, *, scale_mode: str = "rceil", stored: str | Format | None = None
) -> Products:
    """Return products whose operands all have one format.

    Examples
    --------
    >>> uniform("bf16", stored="bf16") == BF16
    True
    """
    return Products(format, format, format, scale_mode, stored)


#: Mixed precision as it is common: bfloat16 operands, float32 accumulation, bfloat16 results.
BF16 = uniform("bf16", stored="bf16")


def linear(
    X: Float[Tensor, "*batch inputs"], W: Float[Tensor, "outputs inputs"], products: Products
) -> Float[Tensor, "*batch outputs"]:
    """Return X Wᵀ, with both gradients, in emulated products.

    All leading axes of X are tokens, in the order of memory: blocks along tokens run from one sequence into the next.

    Examples
    --------
    >>> X, W = torch.tensor([[957.0, 1.0]]), torch.tensor([[1.0, 1.0]], requires_grad=True)
    >>> Y = linear(X, W, Products(activations="mxfp8_e4m3"))
    >>> Y.backward(torch.ones(1, 1))
    >>> Y.item(), W.grad  # 957 becomes 960 beside 1 along the inputs, 960 alone along the tokens
    (961.0, tensor([[960.,   1.]]))
    """
    Y: Tensor = _Linear.apply(X.reshape(-1, X.shape[-1]), W, products)  # type: ignore[no-untyped-call]
    return Y.reshape(*X.shape[:-1], W.shape[0])


class QuantizedLinear(nn.Module):
    """A layer without bias in emulated products. It has the parameter of the layer that it replaces, not a copy."""

    def __init__(self, weight: nn.Parameter, products: Products) -> None:
        super().__init__()
        self.weight = weight
        self.products = products

    def forward(self, X: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Transform every token."""
        return linear(X, self.weight, self.products)

    def extra_repr(self) -> str:
        """Return sizes and formats, for printing."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, {self.products}"


def quantized(model: nn.Module, products: Products) -> None:
    """Let the hidden linear layers of a model, those in ``blocks``, take their products in low precision.

    Parameters, their names and everything else stay; an optimizer made before goes on. Only plain ``nn.Linear`` layers
    are swapped: subclasses have products of their own.

    Parameters
    ----------
    model : module
        Changed in place.
    products : Products
        Formats of operands and results.

    Raises
    ------
    ValueError
        If there is no such layer, or one has a bias or weights that are neither float32 nor float64; no layer is
        swapped then.

    Examples
    --------
    >>> from muon_lab.problems import models
    >>> model = models.GPT(models.GPTConfig(width=8, depth=1, heads=2, context=4), torch.Generator().manual_seed(0))
    >>> quantized(model, Products(weights="mxfp4_e2m1"))
    >>> model.blocks[0].mlp.up.products.weights, type(model.head).__name__
    ('mxfp4_e2m1', 'Linear')
    """
    layers = {name: layer for name, layer in model.named_modules() if _hidden(name) and type(layer) is nn.Linear}
    if not layers:
        raise ValueError(f"quantized: model must have nn.Linear layers in blocks, got a {type(model).__name__} without")
    for name, layer in layers.items():
        if layer.bias is not None:
            raise ValueError(f"quantized: layers in blocks must have no bias, got one in {name}")
        if layer.weight.dtype not in DTYPES:
            raise ValueError(f"quantized: weights must be float32 or float64, got {layer.weight.dtype} in {name}")
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, QuantizedLinear(layer.get_parameter("weight"), products))


class _Linear(torch.autograd.Function):
    """The three products, for a matrix X of tokens × inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        X: Float[Tensor, "tokens inputs"],
        W: Float[Tensor, "outputs inputs"],
        products: Products,
    ) -> Float[Tensor, "tokens outputs"]:
        """Return Y, summed over inputs; keep X and W as they came."""
        ctx.save_for_backward(X, W)
        ctx.products = p = products
        return _stored(_rounded(X, p.activations, p, axis=1) @ _rounded(W, p.weights, p, axis=1).mT, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dY: Float[Tensor, "tokens outputs"]) -> tuple[Tensor | None, Tensor | None, None]:
        """Return dX, summed over outputs, and dW, summed over tokens, where they are asked for."""
        X, W = ctx.saved_tensors
        p: Products = ctx.products
        dX = dW = None
        if ctx.needs_input_grad[0]:
            dX = _stored(_rounded(dY, p.gradients, p, axis=1) @ _rounded(W, p.weights, p, axis=0), p)
        if ctx.needs_input_grad[1]:
            dW = _stored(_rounded(dY, p.gradients, p, axis=0).mT @ _rounded(X, p.activations, p, axis=0), p)
        return dX, dW, None


def _rounded(
    operand: Float[Tensor, "m n"], format: str | Format | BlockFormat | None, products: Products, *, axis: int
) -> Float[Tensor, "m n"]:
    """Return an operand in its format, with blocks along an axis."""
    return operand if format is None else roundtrip(operand, format, scale_mode=products.scale_mode, axis=axis)


def _stored(result: Float[Tensor, "m n"], products: Products) -> Float[Tensor, "m n"]:
    """Return a result as it is kept."""
    return result if products.stored is None else roundtrip(result, products.stored)


def _hidden(name: str) -> bool:
    return name.startswith("blocks.")
