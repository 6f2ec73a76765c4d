r"""The small GPT that the lab trains.

A decoder of ``depth`` blocks, each of which adds two residuals to its input ``X`` (rows are positions),

.. math:: X \leftarrow X + \mathrm{attention}(\mathrm{rms}(X)), \qquad X \leftarrow X + \mathrm{mlp}(\mathrm{rms}(X)),

with causal multi-head attention, rotary positions and a GELU between two matrices. No biases; embedding and head are
separate parameters, so that every hidden matrix gets a gradient from the blocks alone. It is the smallest model whose
layers have the shapes and the names that matter to a matrix optimizer: a fused ``qkv`` of 3d × d, a square ``out``, a
tall ``up`` and a wide ``down``.

References
----------
Radford et al., *Language Models are Unsupervised Multitask Learners* (2019), section 2.3: scaled residual weights.
Zhang, Sennrich, *Root Mean Square Layer Normalization* (2019), equation 4.
Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021), section 3.2.2.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (PyTorch's own abbreviation)
from torch.nn.utils import skip_init

ROTARY_BASE = 10_000
"""Ratio of the slowest to the fastest rotation, about (RoFormer, section 3.2.2)."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a :class:`GPT`.

    Parameters
    ----------
    width : int
        Model dimension d.
    depth : int
        Number of blocks.
    heads : int
        Attention heads; they divide the width into parts of even size, since rotary positions turn pairs.
    context : int
        Longest sequence.
    vocabulary : int
        Number of tokens; 256 for bytes.
    ratio : int
        Hidden width of the MLP in units of the model's.

    Raises
    ------
    ValueError
        If a size is not a positive integer, or a head would not have an even, whole size.

    Examples
    --------
    >>> GPTConfig(width=64, depth=2)
    GPTConfig(width=64, depth=2, heads=4, context=128, vocabulary=256, ratio=4)
    """

    width: int = 96
    depth: int = 4
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    ratio: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"GPTConfig: {field.name} must be an integer of at least 1, got {value!r}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"GPTConfig: width must be a multiple of 2 * heads = {2 * self.heads}, so that every head has an even "
                f"size for rotary positions, got width={self.width}"
            )


def linear(inputs: int, outputs: int, std: float, generator: torch.Generator) -> nn.Linear:
    """Make a linear map without bias whose entries are normal with standard deviation ``std``.

    The global random generator is not touched: the usual initialisation is skipped, not overwritten.
    """
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std, generator=generator)
    return layer


def embedding(tokens: int, width: int, std: float, generator: torch.Generator) -> nn.Embedding:
    """Make a table of vectors, one a token, whose entries are normal with standard deviation ``std``."""
    table: nn.Embedding = skip_init(nn.Embedding, tokens, width)
    nn.init.normal_(table.weight, std=std, generator=generator)
    return table


def rotations(length: int, size: int) -> Float[Tensor, "2 length half"]:
    """Cosines and sines of the angle by which each pair of a head's coordinates turns at each position."""
    half = size // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotated(
    X: Float[Tensor, "*batch length size"], turns: Float[Tensor, "2 length half"]
) -> Float[Tensor, "*batch length size"]:
    """Turn coordinates ``i`` and ``i + size/2`` of every position as a pair.

    Examples
    --------
    >>> X = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    >>> rotated(X, rotations(2, 2)).norm(dim=-1)
    tensor([5., 5.])
    """
    cosines, sines = turns
    left, right = X.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with one fused matrix for queries, keys and values."""

    turns: Tensor

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        d = config.width
        self.heads = config.heads
        self.qkv = linear(d, 3 * d, d**-0.5, generator)
        self.out = linear(d, d, _residual_std(d, config.depth), generator)
        self.register_buffer("turns", rotations(config.context, d // config.heads), persistent=False)

    def forward(self, X: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Mix every position with those before it."""
        Q, K, V = self.qkv(X).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(-3, -2)
        turns = self.turns[:, : X.shape[1]]
        Y = F.scaled_dot_product_attention(rotated(Q, turns), rotated(K, turns), V, is_causal=True)
        mixed: Tensor = self.out(Y.transpose(-3, -2).flatten(-2))
        return mixed


class MLP(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        d, hidden = config.width, config.ratio * config.width
        self.up = linear(d, hidden, d**-0.5, generator)
        self.down = linear(hidden, d, _residual_std(hidden, config.depth), generator)

    def forward(self, X: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Transform every position by itself."""
        transformed: Tensor = self.down(F.gelu(self.up(X)))
        return transformed


class Block(nn.Module):
    """Attention and MLP, each behind its own norm and added to its input."""

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config, generator)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config, generator)

    def forward(self, X: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Add both residuals."""
        X = X + self.attention(self.attention_norm(X))
        added: Tensor = X + self.mlp(self.mlp_norm(X))
        return added


class GPT(nn.Module):
    """A small causal language model.

    Weights are normal with variance 1/fan-in; those that end a residual branch are smaller by sqrt(2 depth), so that
    the stream keeps its size through the 2 depth additions (Radford et al., section 2.3). The head starts small
    (1/width instead of 1/sqrt(width)), so the first loss is close to that of a uniform guess, log(vocabulary).

    Parameters
    ----------
    config : GPTConfig
        Sizes.
    generator : torch.Generator
        The only source of randomness: same seed, same weights.

    Examples
    --------
    >>> model = GPT(GPTConfig(width=8, depth=1, heads=2, context=4), torch.Generator().manual_seed(0))
    >>> [name for name, _ in model.named_parameters()][:3]
    ['embedding.weight', 'blocks.0.attention_norm.weight', 'blocks.0.attention.qkv.weight']
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        d = config.width
        self.config = config
        self.embedding = embedding(config.vocabulary, d, 1.0, generator)
        self.blocks = nn.ModuleList(Block(config, generator) for _ in range(config.depth))
        self.norm = nn.RMSNorm(d)
        self.head = linear(d, config.vocabulary, 1 / d, generator)

    def forward(self, tokens: Int64[Tensor, "batch length"]) -> Float[Tensor, "batch length vocabulary"]:
        """Logits of the token after each position.

        Raises
        ------
        ValueError
            If the sequences are longer than the configured context.
        """
        if tokens.shape[1] > self.config.context:
            raise ValueError(
                f"GPT: tokens must have at most context={self.config.context} positions, got {tokens.shape[1]}"
            )
        X = self.embedding(tokens)
        for block in self.blocks:
            X = block(X)
        logits: Tensor = self.head(self.norm(X))
        return logits

    def loss(self, tokens: Int64[Tensor, "batch length"], targets: Int64[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Mean cross entropy of the targets, in nats per token."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def matrices(model: GPT) -> dict[str, nn.Parameter]:
    """Name the hidden matrices, those that a matrix optimizer owns: not the embedding, not the head, no vectors.

    Examples
    --------
    >>> model = GPT(GPTConfig(width=8, depth=1, heads=2, context=4), torch.Generator().manual_seed(0))
    >>> for name, weight in matrices(model).items():
    ...     print(name, tuple(weight.shape))
    blocks.0.attention.qkv.weight (24, 8)
    blocks.0.attention.out.weight (8, 8)
    blocks.0.mlp.up.weight (32, 8)
    blocks.0.mlp.down.weight (8, 32)
    """
    return {name: weight for name, weight in model.blocks.named_parameters(prefix="blocks") if weight.ndim == 2}


def _residual_std(inputs: int, depth: int) -> float:
    """Standard deviation of weights that end one of the 2 ``depth`` residual branches."""
    return float((2 * depth * inputs) ** -0.5)
