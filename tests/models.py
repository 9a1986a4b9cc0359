"""Small models for tests: plain PyTorch, nothing in them knows of sharding. All fit a CPU test of some milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

VOCAB = 37  # not a multiple of any number of ranks


class MLP(nn.Module):
    """Linears with tanh between them.

    Args:
        widths: features of the input, of every hidden layer and of the output.
        bias: whether the linears have one.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 32, 8), bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(num_in, num_out, bias=bias) for num_in, num_out in zip(widths[:-1], widths[1:])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., widths[0]) -> (..., widths[-1])."""
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads, no biases."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.wq = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads, num_kv_heads)
        self.ffn_norm = nn.RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class TinyLlama(nn.Module):
    """Llama's weights and their order of use, without rotary embeddings.

    Args:
        tied: the output head is the token embedding.
    """

    def __init__(
        self,
        vocab: int = VOCAB,
        dim: int = 16,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        hidden: int = 40,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads, num_kv_heads, hidden) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, length) -> logits (batch, length, vocab)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class PredictionModule(nn.Module):
    """What one more token ahead costs in DeepSeek's multi-token prediction: the hidden state and the embedding of the
    next token, each normed, are projected together and go through one block."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(dim)
        self.embedding_norm = nn.RMSNorm(dim)
        self.projection = nn.Linear(2 * dim, dim, bias=False)
        self.block = Block(dim, num_heads, num_kv_heads, hidden)

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Both (batch, length, dim) -> the same."""
        return self.block(self.projection(torch.cat([self.hidden_norm(x), self.embedding_norm(embedded)], -1)))


class MultiTokenLlama(TinyLlama):
    """Predicts the next token and, by a :class:`PredictionModule` each, further ones: all share embedding and head.

    Args:
        num_ahead: predictions beside the next token's.
        recompute: "no", or how prediction modules are recomputed: "reentrant" or "nonreentrant".
        kwargs: see :class:`TinyLlama`.
    """

    def __init__(self, num_ahead: int = 2, recompute: str = "no", **kwargs) -> None:
        super().__init__(**kwargs)
        dim, hidden = self.output.in_features, self.layers[0].feed_forward.w1.out_features
        self.ahead = nn.ModuleList(PredictionModule(dim, 4, 2, hidden) for _ in range(num_ahead))
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, length) -> logits (batch, 1 + num_ahead, length - num_ahead, vocab)."""
        length = tokens.shape[1] - len(self.ahead)
        x = self.tok_embeddings(tokens[:, :length])
        for layer in self.layers:
            x = layer(x)
        logits = [self.output(self.norm(x))]
        for number, module in enumerate(self.ahead, start=1):
            embedded = self.tok_embeddings(tokens[:, number : number + length])
            if self.recompute == "no":
                x = module(x, embedded)
            else:
                x = checkpoint(module, x, embedded, use_reentrant=self.recompute == "reentrant")
            logits.append(self.output(self.norm(x)))
        return torch.stack(logits, 1)


class WithMultiheadAttention(nn.Module):
    """torch's own attention, which reads its weights without calling a submodule's forward."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads=4, batch_first=True)
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class WithConv(nn.Module):
    """A 1-D convolution before a linear."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim, 2 * dim, kernel_size=3, padding=1)
        self.head = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        return self.head(torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2)))


class WithParametrization(nn.Module):
    """A linear whose weight is computed from its parameters.

    Args:
        kind: "weight_norm" (two parameters) or "orthogonal" (one).
    """

    def __init__(self, kind: str = "weight_norm", dim: int = 16) -> None:
        super().__init__()
        self.first = getattr(parametrizations, kind)(nn.Linear(dim, dim))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.head(torch.tanh(self.first(x)))


class Mixer(nn.Module):
    """Owns a 3-D weight and uses it in an einsum."""

    def __init__(self, num_heads: int = 5, dim: int = 16) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(num_heads, dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        return torch.einsum("bld,hde->ble", x, self.mix)


class WithEinsum(nn.Module):
    """A :class:`Mixer` between two linears."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.mixer = Mixer(dim=dim)
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        return self.head(torch.tanh(self.mixer(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class ModelCase:
    """A model with the inputs it takes.

    Attributes:
        name: id of the case.
        build: makes the model from the current random state.
        shape: of one sample, without the batch dim.
        vocab: None for float inputs, else inputs are int64 below this.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocab: int | None = None

    def batch(self, num_samples: int, seed: int = 0) -> torch.Tensor:
        """A batch of ``num_samples`` random samples, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocab is not None:
            return torch.randint(self.vocab, (num_samples, *self.shape), generator=generator)
        return torch.randn(num_samples, *self.shape, generator=generator)

    def in_float64(self, num_samples: int) -> tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]:
        """(builder of the model, step number -> batch), both in float64: shows what float32 rounding would hide."""

        def batch(step: int) -> torch.Tensor:
            inputs = self.batch(num_samples, seed=step)
            return inputs if self.vocab is not None else inputs.double()

        return lambda: self.build().double(), batch

    def __str__(self) -> str:
        return self.name


def _tied_llama() -> nn.Module:
    return TinyLlama(tied=True)


def _uneven_mlp() -> nn.Module:
    # Rows on 4 ranks: 5 = 2+2+1+0, 7 = 2+2+2+1, 9 = 3+3+3+0, 17 = 5+5+5+2; 3 leaves one rank of 4 without rows.
    return MLP((6, 5, 7, 9, 17, 3))


def _orthogonal() -> nn.Module:
    return WithParametrization("orthogonal")


MODEL_CASES = (
    ModelCase("mlp", MLP, (16,)),
    ModelCase("uneven_mlp", _uneven_mlp, (6,)),
    ModelCase("llama", TinyLlama, (7,), VOCAB),
    ModelCase("tied_llama", _tied_llama, (7,), VOCAB),
    ModelCase("multihead_attention", WithMultiheadAttention, (6, 16)),
    ModelCase("conv1d", WithConv, (6, 16)),
    ModelCase("weight_norm", WithParametrization, (6, 16)),
    ModelCase("orthogonal", _orthogonal, (6, 16)),
    ModelCase("einsum", WithEinsum, (6, 16)),
)
