"""Runs of whole training jobs for test_titan.py, each in processes of its own.

Imported by a job (``--experimental.custom_import=tests.titan_probe``), titan_probe.py adds what its ranks know.

As a program: one training run whose losses, parameters, random state and statistics go to a file. With ``stock`` the
Trainer, the dimensions and the parallelize function are torchtitan's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEBUG_TOML = ROOT / "train_configs" / "llama3_debug.toml"
SMALL = ["--training.seq_len=64", "--training.local_batch_size=2", "--training.global_batch_size=8"]


def degrees(tp=1, gtp=1, ep=1, etp=1, egtp=1, cp=1, pp=1, dpr=1):
    """Options for all axes but dp_shard, which takes the other ranks."""
    return [
        f"--parallelism.data_parallel_replicate_degree={dpr}",
        f"--parallelism.tensor_parallel_degree={tp}",
        f"--parallelism.expert_parallel_degree={ep}",
        f"--parallelism.expert_tensor_parallel_degree={etp}",
        f"--parallelism.context_parallel_degree={cp}",
        f"--parallelism.pipeline_parallel_degree={pp}",
        f"--gtp.tensor_parallel_num_weight_shards={tp * gtp}",
        f"--gtp.expert_tensor_parallel_num_weight_shards={etp * egtp}",
    ]


def train(
    folder: Path,
    num_ranks: int,
    *options: str,
    config: Path = DEBUG_TOML,
    timeout: float = 300,
    check: bool = True,
    env=None,
) -> subprocess.CompletedProcess:
    """A torchrun of ``titan_integration.train`` on CPUs; raises with the end of its output where it fails."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={num_ranks}",
        "-m",
        "titan_integration.train",
        f"--job.config_file={config}",
        f"--job.dump_folder={folder}",
        *options,
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=environment() | (env or {}), capture_output=True, text=True, timeout=timeout
    )
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{(result.stdout + result.stderr)[-6000:]}")
    return result


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def metrics(folder: Path) -> list[dict]:
    """What a run wrote to metrics.jsonl, a dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def probes(folder: Path) -> list[dict]:
    """What the ranks of a run with ``tests.titan_probe`` knew at its end, a dict a rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("probe_*.json"))]


def gradients(folder: Path) -> dict:
    """The whole gradients that a run wrote to ``folder / "gradients"``, by parameter name."""
    import torch

    return {name: g for path in (folder / "gradients").glob("*.pt") for name, g in torch.load(path).items()}


def saved(folder: Path, step: int, tensors: dict) -> dict:
    """``tensors`` (name -> tensor of the whole shape), filled from the checkpoint that a run wrote after a step."""
    import torch.distributed.checkpoint as dcp

    dcp.load(tensors, checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)
    return tensors


def record(mode: str, out: str, arguments: list[str]) -> None:
    """One run in this process (a single rank); see the module's docstring."""
    from titan_integration import cpu

    cpu.install()
    import dataclasses

    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.train import Trainer

    from gtp_dtensor import stats
    from titan_integration import families, spec
    from titan_integration.trainer import GTPTrainer

    spec.register()
    trainer_class = GTPTrainer
    if mode == "stock":
        name = ConfigManager().parse_args(arguments).model.name
        ours, titan = get_train_spec(name), families.families()[name].titan_spec
        parts = ("model_cls", "parallelize_fn", "build_optimizers_fn")
        register_train_spec("stock", dataclasses.replace(ours, **{part: getattr(titan, part) for part in parts}))
        arguments, trainer_class = [*arguments, "--model.name=stock"], Trainer
    trainer = trainer_class(ConfigManager().parse_args(arguments))
    assert type(trainer.parallel_dims).__module__.startswith("torchtitan" if mode == "stock" else "titan_integration")
    initial = {name: param.detach().clone() for name, param in trainer.model_parts[0].named_parameters()}
    losses = []
    forward_backward_step = trainer.forward_backward_step

    def step(**kwargs):
        loss = forward_backward_step(**kwargs)
        losses.append(loss.detach().clone())
        return loss

    trainer.forward_backward_step = step
    trainer.train()
    model = trainer.model_parts[0]
    result = {
        "initial": initial,
        "losses": losses,
        "parameters": {name: param.detach() for name, param in model.named_parameters()},
        "types": {name: type(param).__name__ for name, param in model.named_parameters()},
        "state_dict": list(model.state_dict()),
        "buffers": {name: buffer.detach() for name, buffer in model.named_buffers()},
        "optimizer": trainer.optimizers.state_dict(),
        "rng": torch.get_rng_state(),
        "stats": dataclasses.asdict(stats(model)),
        "classes": [type(module).__name__ for module in model.modules()][1:],
    }
    torch.save(result, out)
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], sys.argv[3:])
