"""torchtitan's parallel dimensions with the axes `gtp` and `egtp`."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims

from titan_integration.settings import degrees


@dataclass
class GTPParallelDims(ParallelDims):
    """Ranks, slowest to fastest: pp, dp_replicate, dp_shard, cp, gtp, tp.

    `gtp` is a data axis: its peers read different samples. The base class gets it as the inner factor of `dp_shard`,
    so that everything torchtitan derives from that (batch and loss meshes, batch split, token counts, loss averages,
    tokens per second, validation) counts it. `dp_shard` given to the constructor excludes `gtp`; -1 means whatever
    ranks are left; after construction the attribute includes it.

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

    def _validate(self) -> None:
        if self.egtp > 1:
            raise NotImplementedError(
                f"egtp = {self.egtp}: sharding routed experts is not supported yet; set [gtp] "
                f"expert_tensor_parallel_num_weight_shards to {self.etp} (its ETP degree) or leave it out"
            )
        if self.gtp > 1:
            self._validate_gtp()
            if self.dp_shard > 0:
                self.dp_shard *= self.gtp
        super()._validate()

    def _validate_gtp(self) -> None:
        """Refuses, with numbers, what does not work together with gtp yet."""
        for name, size in (
            ("parallelism.data_parallel_replicate_degree", self.dp_replicate),
            ("parallelism.context_parallel_degree", self.cp),
            ("parallelism.pipeline_parallel_degree", self.pp),
            ("parallelism.expert_parallel_degree", self.ep),
            ("parallelism.expert_tensor_parallel_degree", self.etp),
            ("parallelism.data_parallel_shard_degree", self.dp_shard),
        ):
            if size > 1:
                raise NotImplementedError(f"{name} = {size} is not supported together with gtp yet; set it to 1")
        num_shards = self.tp * self.gtp
        number = f"[gtp] tensor_parallel_num_weight_shards = {num_shards} (tp {self.tp} x gtp {self.gtp})"
        if self.world_size % num_shards:
            raise ValueError(
                f"{number} does not divide the {self.world_size} ranks of this job; start {num_shards} ranks"
                + (f" or set it to {self.world_size}" if self.world_size % self.tp == 0 else "")
            )
        left = self.world_size // num_shards
        if self.dp_shard == 1 and left > 1:
            raise ValueError(
                f"{number} leaves {left} of {self.world_size} ranks without work; start {num_shards} ranks, "
                f"or set it to {self.world_size}"
            )
        if left > 1:
            raise NotImplementedError(
                f"data_parallel_shard_degree = {self.dp_shard} would be {left}: {self.world_size} ranks over {number}; "
                "dp_shard > 1 is not supported together with gtp yet. "
                f"Start {num_shards} ranks, or set tensor_parallel_num_weight_shards to {self.world_size}"
            )

    def _mesh_exist(self, name: str, degree: int) -> bool:
        # The base class's fsdp axis has the ranks of gtp; nothing communicates on it, so it gets no process group.
        if name == "fsdp" and self.gtp > 1:
            return False
        return super()._mesh_exist(name, degree)

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """The meshes that have a process group. (The base class adds larger ones without, and warns about them.)"""
        meshes = super().get_all_one_dimensional_meshes()
        return {name: mesh for name, mesh in meshes.items() if self._mesh_exist(name, mesh.size())}

    def build_mesh(self) -> DeviceMesh:
        """Builds torchtitan's meshes and, where gtp is on, the 1-D mesh `gtp` (`get_mesh("gtp")`)."""
        world_mesh = super().build_mesh()
        if self.gtp > 1:
            sizes = dict(
                pp=self.pp,
                dp_replicate=self.dp_replicate,
                dp_shard=self.dp_shard // self.gtp,
                cp=self.cp,
                gtp=self.gtp,
                tp=self.tp,
            )
            # Only gtp is new here; process groups of the other axes exist in torchtitan's own meshes.
            without_group = {name: "fake" for name in sizes if name != "gtp"}
            view = world_mesh._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=without_group)
            self._global_meshes["gtp_view"] = view
            self._meshes["gtp"] = view["gtp"]
        return world_mesh
