"""torchtitan's parallel dimensions with the axes `gtp` and `egtp`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_integration.settings import degrees

_KEYS = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
}
_DP_SHARD = "parallelism.data_parallel_shard_degree"
_SHARDS = "[gtp] tensor_parallel_num_weight_shards"


@dataclass
class GTPParallelDims(ParallelDims):
    """Ranks, slowest to fastest: pp, dp_replicate, dp_shard, cp, gtp, tp.

    `gtp` is a data axis: its peers read different samples. The base class gets it as the inner factor of `dp_shard`,
    so that everything torchtitan derives from that (batch and loss meshes, batch split, token counts, loss averages,
    tokens per second, validation) counts it. `dp_shard` given to the constructor excludes `gtp`; -1 means whatever
    ranks are left; after construction the attribute includes it.

    torchtitan's fsdp axis (dp_shard x cp, cp inside) is cut in two: its innermost ranks are `gtp`; what is left of it
    is `optimizer_shard`, of dp_shard x cp ranks, which cuts the optimizer's parameters further. So where cp > 1, gtp
    peers share sequences before they share the batch: whichever it is, they hold different tokens.

    Attributes:
        gtp: ranks that share a TP slice of each weight.
        egtp: the same for routed experts. Only 1 so far.
    """

    gtp: int = 1
    egtp: int = 1

    @classmethod
    def from_job_config(cls, job_config, world_size: int) -> GTPParallelDims:
        """Dimensions of a job on `world_size` ranks. Errors: see `degrees` and `_validate`."""
        parallelism, sizes = job_config.parallelism, degrees(job_config)
        return cls(
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=parallelism.data_parallel_shard_degree,
            cp=parallelism.context_parallel_degree,
            tp=sizes.tp,
            pp=parallelism.pipeline_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            etp=sizes.etp,
            world_size=world_size,
            gtp=sizes.gtp,
            egtp=sizes.egtp,
        )

    @property
    def gtp_enabled(self) -> bool:
        """Whether weights are sharded over `gtp`."""
        return self.gtp > 1

    @property
    def optimizer_shard(self) -> int:
        """Ranks that hold the same gathered weights and different rows of the optimizer's: dp_shard x cp, gtp apart."""
        return self.dp_shard * self.cp // self.gtp

    def _validate(self) -> None:
        """Refuses impossible degrees with numbers that would work; then includes gtp in `dp_shard`."""
        if self.egtp > 1:
            raise NotImplementedError(
                f"egtp = {self.egtp}: sharding routed experts is not supported yet; set [gtp] "
                f"expert_tensor_parallel_num_weight_shards to {self.etp} (its ETP degree) or leave it out"
            )
        for name, key in _KEYS.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{key} = {getattr(self, name)}: must be 1 or more")
            if self.gtp > 1 and name in ("ep", "etp") and getattr(self, name) > 1:
                raise NotImplementedError(
                    f"{key} = {getattr(self, name)} is not supported together with gtp yet; set it to 1"
                )
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ValueError(f"{_DP_SHARD} = {self.dp_shard}: must be 1 or more, or -1 for whatever ranks are left")
        self._check_product()
        if self.dp_shard > 0:
            self.dp_shard *= self.gtp
        super()._validate()

    def _check_product(self) -> None:
        """The degrees multiply to the number of ranks, or divide it where dp_shard takes what is left."""
        sizes = {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "gtp", "tp")}
        takes_rest = self.dp_shard == -1
        if takes_rest:
            del sizes["dp_shard"]
        product, ranks = math.prod(sizes.values()), self.world_size
        if ranks == product or (takes_rest and ranks % product == 0):
            return
        remedies = [f"start {product} ranks"]
        if not takes_rest and ranks % (product // self.dp_shard) == 0:
            remedies.append(f"set {_DP_SHARD} to {ranks * self.dp_shard // product}")
        others = product // self.gtp
        if self.gtp > 1 and ranks % others == 0:
            largest = ranks // others
            shards = [self.tp * gtp for gtp in range(1, largest + 1) if largest % gtp == 0]
            working = shards if takes_rest else shards[-1:]
            remedies.append(f"set {_SHARDS} to {' or '.join(map(str, working))}")
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every degree 1"
        verb = "does not divide" if ranks % product else "leaves idle ranks among"
        key = f" (gtp comes from {_SHARDS} = {self.tp * self.gtp})" if self.gtp > 1 else ""
        raise ValueError(f"{named} = {product} {verb} the {ranks} ranks of this job{key}; {', or '.join(remedies)}")

    def _mesh_exist(self, name: str, degree: int) -> bool:
        # The base class's fsdp axis has the ranks of gtp x optimizer_shard; nothing communicates on it as a whole.
        if name == "fsdp" and self.gtp > 1:
            return False
        return super()._mesh_exist(name, degree)

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """The meshes that have a process group. (The base class adds larger ones without, and warns about them.)"""
        meshes = super().get_all_one_dimensional_meshes()
        return {name: mesh for name, mesh in meshes.items() if self._mesh_exist(name, mesh.size())}

    def build_mesh(self) -> DeviceMesh:
        """Builds torchtitan's meshes; where gtp is on, also the 1-D meshes `gtp` and `optimizer_shard`.

        torchtitan's three views of the ranks have process groups of their own even for axes that they share (pp, tp);
        where gtp is on, an axis has a group in one view only, and only if it is larger than 1.
        """
        if self.gtp == 1:
            return super().build_mesh()
        world = init_device_mesh(device_type, (self.world_size,), mesh_dim_names=("world",))

        def view(with_group: tuple[str, ...], **sizes: int) -> DeviceMesh:
            fake = {name: "fake" for name, size in sizes.items() if size == 1 or name not in with_group}
            return world._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=fake)

        pp, replicate, cp, tp = self.pp, self.dp_replicate, self.cp, self.tp
        fsdp = self.dp_shard * cp
        samples = view(("pp", "batch", "cp", "tp"), pp=pp, batch=replicate * self.dp_shard, cp=cp, tp=tp)
        weights = view(
            ("dp_replicate", "optimizer_shard", "gtp"),
            pp=pp, dp_replicate=replicate, optimizer_shard=self.optimizer_shard, gtp=self.gtp, tp=tp,
        )  # fmt: skip
        dense = view((), pp=pp, dp_replicate=replicate, fsdp=fsdp, tp=tp)
        sparse = view((), pp=pp, dp_replicate=replicate, efsdp=fsdp * tp, ep=1, etp=1)
        # Without cp the ranks that average the loss are those that split the batch, and their group serves both.
        loss = samples["batch", "cp"]._flatten("loss_mesh") if cp > 1 else samples["batch"]
        self._world_mesh = world
        self._global_meshes = {
            "dataloading": samples, "loss": loss, "dense": dense, "sparse": sparse, "weights": weights,
        }  # fmt: skip
        self._meshes = {
            **{name: samples[name] for name in ("pp", "batch", "cp", "tp")},
            **{name: sparse[name] for name in ("ep", "efsdp", "etp")},
            **{name: weights[name] for name in ("dp_replicate", "optimizer_shard", "gtp")},
            "fsdp": dense["fsdp"],
            "loss": loss,
        }
        self._validate_meshes()
        active = {name: mesh.size() for name, mesh in self.get_all_one_dimensional_meshes().items()}
        logger.info(f"Built meshes: {', '.join(f'{name} {size}' for name, size in active.items())}")
        return world
