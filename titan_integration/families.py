"""The model families of torchtitan that this integration serves, each under torchtitan's own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models import deepseek_v3, llama3, llama4, qwen3
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_infra
from torchtitan.models.llama3.infra import parallelize as llama3_infra
from torchtitan.models.llama4.infra import parallelize as llama4_infra
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.infra import parallelize as qwen3_infra
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec


@dataclass(frozen=True)
class Family:
    """What differs between model families.

    Attributes:
        name: `model.name` in the TOML.
        flavors: torchtitan's and ours, by name. torchtitan writes job settings into the one that it trains.
        titan_spec: torchtitan's own specification.
        infra: torchtitan's module with the family's parallelize function, its selective-checkpointing list included.
        apply_tp: tensor parallelism outside of MoE layers: (model, tp mesh, loss_parallel=, cp_enabled=).
        apply_compile: torchtitan's: (model, section, whether there is expert parallelism).
        num_moe_layers: how many layers of a flavor have routed experts.
        attention_on_dtensors: whether under tensor parallelism attention itself is called with DTensors.
    """

    name: str
    flavors: Mapping[str, BaseModelArgs]
    titan_spec: TrainSpec
    infra: ModuleType
    apply_tp: Callable[..., None]
    apply_compile: Callable[..., None]
    num_moe_layers: Callable[[BaseModelArgs], int]
    attention_on_dtensors: bool = False

    def num_experts(self, flavor: str) -> int:
        """Routed experts of a MoE layer; 0 where the flavor has no such layer, or torchtitan will refuse the name."""
        args = self.flavors.get(flavor)
        return args.moe_args.num_experts if args is not None and self.num_moe_layers(args) else 0


def _llama4_tp(model: nn.Module, tp_mesh: DeviceMesh, *, loss_parallel: bool, cp_enabled: bool) -> None:
    """torchtitan's llama4 declares no placement for the positions that context parallelism adds: none is needed."""
    llama4_infra.apply_non_moe_tp(model, tp_mesh, loss_parallel=loss_parallel, enable_float8_tensorwise_tp=False)


def _debug_experts(num_experts: int, use_grouped_mm: bool = False, **options) -> MoEArgs:
    """By default experts in a loop, in the model's own dtype: torch's grouped GEMM knows bfloat16 only."""
    return MoEArgs(num_experts=num_experts, use_grouped_mm=use_grouped_mm, **options)


def _llama3_flavors() -> dict[str, BaseModelArgs]:
    return {
        # The model of section 2.3 of the GTP specification.
        "gtp_minimal": llama3.TransformerModelArgs(
            dim=1024, n_layers=12, n_heads=16, vocab_size=32000, rope_theta=500000
        ),
        # 18 million parameters: large enough to learn, small enough to be trained many times over.
        "20M": llama3.TransformerModelArgs(dim=576, n_layers=4, n_heads=9, vocab_size=2048, rope_theta=500000),
        # 3.7 billion parameters: the 8B's shape at a depth that two GPUs hold with all that is measured beside it.
        "8B_12_layers": replace(llama3.llama3_args["8B"], n_layers=12),
    }


def _deepseek_v3_flavors() -> dict[str, BaseModelArgs]:
    small = {
        "vocab_size": 2048, "dim": 64, "inter_dim": 128, "moe_inter_dim": 64, "n_layers": 3, "n_dense_layers": 1,
        "n_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    return {
        # About 280 billion parameters, a tenth of them active: see train_configs/weak_scaling_280b.toml.
        "gtp_280B_proxy": deepseek_v3.DeepSeekV3ModelArgs(
            vocab_size=131072, dim=5120, inter_dim=14336, moe_inter_dim=704, n_layers=48, n_dense_layers=0, n_heads=64,
            moe_args=MoEArgs(
                num_experts=512, num_shared_experts=4, top_k=22, score_func="sigmoid", route_norm=True, route_scale=2.5,
                score_before_experts=False,
            ),
        ),
        "gtp_debug": deepseek_v3.DeepSeekV3ModelArgs(
            **small, moe_args=_debug_experts(8, top_k=2, score_func="softmax", score_before_experts=False)
        ),
        # The routing of the large flavors, and latent queries.
        "gtp_debug_q_lora": deepseek_v3.DeepSeekV3ModelArgs(
            **small,
            q_lora_rank=32,
            moe_args=_debug_experts(
                8, top_k=2, route_norm=True, route_scale=2.5, score_before_experts=False,
                num_expert_groups=4, num_limited_groups=2,
            ),
        ),
    }  # fmt: skip


def _qwen3_flavors() -> dict[str, BaseModelArgs]:
    small = {
        "vocab_size": 2048, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 128,
    }  # fmt: skip
    # Six experts: with ep 2 a rank has three, which egtp 2 cannot deal out whole.
    routing = {
        "num_experts": 6, "num_shared_experts": 0, "top_k": 2, "score_func": "softmax", "route_norm": True,
        "score_before_experts": False,
    }  # fmt: skip
    with_experts = {**small, "moe_enabled": True, "moe_inter_dim": 64}
    return {
        "gtp_debug": qwen3.Qwen3ModelArgs(**with_experts, moe_args=_debug_experts(**routing)),
        # The grouped GEMM also on a CPU, where torchtitan switches it off in other families.
        "gtp_debug_grouped": qwen3.Qwen3ModelArgs(
            **with_experts, moe_args=_debug_experts(**routing, use_grouped_mm=True)
        ),
        "gtp_debug_tied": qwen3.Qwen3ModelArgs(**small, enable_weight_tying=True),
    }


def _llama4_flavors() -> dict[str, BaseModelArgs]:
    return {
        "gtp_debug": llama4.TransformerModelArgs(
            dim=64,
            n_layers=4,
            n_heads=4,
            vocab_size=2048,
            multiple_of=32,
            rope_theta=500000,
            moe_args=_debug_experts(8),
        ),
    }


def families() -> dict[str, Family]:
    """All of them, by name."""
    return {
        "llama3": Family(
            "llama3",
            {**llama3.llama3_args, **_llama3_flavors()},
            llama3.get_train_spec(),
            llama3_infra,
            partial(llama3_infra.apply_tp, enable_float8_tensorwise_tp=False),
            lambda model, section, ep_enabled: llama3_infra.apply_compile(model, section),
            lambda args: 0,
        ),
        "deepseek_v3": Family(
            "deepseek_v3",
            {**deepseek_v3.deepseekv3_args, **_deepseek_v3_flavors()},
            deepseek_v3.get_train_spec(),
            deepseek_v3_infra,
            partial(deepseek_v3_infra.apply_non_moe_tp, enable_float8_tensorwise_tp=False),
            deepseek_v3_infra.apply_compile,
            lambda args: max(0, args.n_layers - args.n_dense_layers),
        ),
        "qwen3": Family(
            "qwen3",
            {**qwen3.qwen3_args, **_qwen3_flavors()},
            qwen3.get_train_spec(),
            qwen3_infra,
            partial(qwen3_infra.apply_non_moe_tp, enable_float8_tensorwise_tp=False, enable_async_tp=False),
            qwen3_infra.apply_compile,
            lambda args: args.n_layers if args.moe_enabled else 0,
            attention_on_dtensors=True,
        ),
        "llama4": Family(
            "llama4",
            {**llama4.llama4_args, **_llama4_flavors()},
            llama4.get_train_spec(),
            llama4_infra,
            _llama4_tp,
            llama4_infra.apply_compile,
            lambda args: args.n_layers // args.interleave_moe_layer_step,
        ),
    }
