"""A small Mamba-2, attention and mixture-of-experts hybrid in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import VOCAB, Attention
from tests.moe import MoE


class Mamba2Mixer(nn.Module):
    """Mamba-2's mixer with one group of B and C: a selective state space, computed step by step.

    One projection, fused, gives the gate z, the input x, B, C and the step sizes dt.

    Args:
        dim: features of the input and the output.
        num_heads, head_dim: of the inner features.
        state: size of each head's state, for each of its features.
    """

    def __init__(self, dim: int, num_heads: int = 3, head_dim: int = 6, state: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.state = num_heads, head_dim, state
        inner = num_heads * head_dim
        self.sizes = (inner, inner, state, state, num_heads)
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(inner + 2 * state, inner + 2 * state, 3, groups=inner + 2 * state, padding=2)
        self.dt_bias = nn.Parameter(torch.randn(num_heads))
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, num_heads + 1)))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = nn.RMSNorm(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        batch, length, _ = u.shape
        z, x, b, c, dt = self.in_proj(u).split(self.sizes, dim=-1)
        mixed = self.conv(torch.cat([x, b, c], dim=-1).transpose(1, 2))[..., :length].transpose(1, 2)
        x, b, c = F.silu(mixed).split(self.sizes[1:4], dim=-1)
        x = x.view(batch, length, self.num_heads, self.head_dim)
        dt = F.softplus(dt + self.dt_bias)
        decay = torch.exp(-dt * torch.exp(self.A_log))
        state = u.new_zeros(batch, self.num_heads, self.head_dim, self.state)
        outputs = []
        for t in range(length):
            added = torch.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], b[:, t])
            state = decay[:, t, :, None, None] * state + added
            outputs.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]) + self.D[:, None] * x[:, t])
        y = torch.stack(outputs, dim=1).reshape(batch, length, -1)
        return self.out_proj(self.norm(y * F.silu(z)))


class LatentMoE(nn.Module):
    """A mixture of experts in fewer features than the model has."""

    def __init__(self, dim: int, latent: int, **moe) -> None:
        super().__init__()
        self.latent_down = nn.Linear(dim, latent, bias=False)
        self.moe = MoE(latent, **moe)
        self.latent_up = nn.Linear(latent, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> the same."""
        return self.latent_up(self.moe(self.latent_down(x)))


class HybridBlock(nn.Module):
    """A norm and one kind of mixer around a residual."""

    def __init__(self, mixer: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.mixer = mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> the same."""
        return x + self.mixer(self.norm(x))


class Hybrid(nn.Module):
    """Token embedding, blocks by a pattern (M: Mamba-2, A: attention, E: experts), head."""

    def __init__(self, pattern: str = "MEAMEMAE", dim: int = 12, num_experts: int = 6) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        kinds = {
            "M": lambda: Mamba2Mixer(dim),
            "A": lambda: Attention(dim, num_heads=2, num_kv_heads=1),
            "E": lambda: LatentMoE(dim, latent=8, num_experts=num_experts),
        }
        self.layers = nn.ModuleList(HybridBlock(kinds[kind](), dim) for kind in pattern)
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, length) -> logits (batch, length, vocab)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))
