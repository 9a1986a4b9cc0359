"""The model that scripts/bench.py measures and that plans are compared with: blocks of a Llama, without its ends."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle


class Block(nn.Module):
    """One pre-norm Llama block. x (batch, tokens, dim) -> the same."""

    def __init__(self, dim: int, ffn: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(h.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Stack(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, num_layers: int, dim: int, ffn: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, ffn, num_heads, num_kv_heads) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def shard_stack(
    model: nn.Module,
    mesh: DeviceMesh,
    wire_format: str,
    look_ahead: int,
    transport: str,
    reduce_dtype: torch.dtype = torch.float32,
    **meshes: DeviceMesh,
) -> None:
    """Under GTP, computing in bfloat16. ``meshes``: of replicas, as GTPStyle takes them."""
    config = GTPConfig(
        param_dtype=torch.bfloat16,
        reduce_dtype=reduce_dtype,
        look_ahead=look_ahead,
        transport=transport,
        wire_format=wire_format,
        calculate_per_token_loss=True,
    )
    parallelize_module(model, mesh, GTPStyle(config, **meshes), src_data_rank=None)
