"""torchtitan's parallel dimensions with the axes `gtp` and `egtp`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
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
_EXPERT_SHARDS = "[gtp] expert_tensor_parallel_num_weight_shards"


# Axes with communicators, and what the specification calls two of them. Gathers and reductions over gtp, egtp and the
# replicas have communicators of the library's own, with high priority always.
_URGENT = (
    "tp",
    "ep",
    "etp",
    "pp",
    "cp",
    "batch",
    "gtp",
    "egtp",
    "dp_replicate",
    "optimizer_shard",
    "expert_optimizer_shard",
)
_ALIASES = {"gtp_remat": "gtp", "expt_gtp_remat": "egtp"}


def high_priority_axes(job_config) -> tuple[str, ...]:
    """`[gtp] high_priority_stream_groups`, by the names of axes. Raises ValueError for one that does not exist."""
    names = [_ALIASES.get(name, name) for name in job_config.gtp.high_priority_stream_groups]
    for name in names:
        if name not in _URGENT:
            raise ValueError(
                f"[gtp] high_priority_stream_groups: no axis {name!r}; use some of {', '.join((*_URGENT, *_ALIASES))}"
            )
    return tuple(names)


def _high_priority():
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _divisors(number: int) -> str:
    """All divisors, as an error message lists numbers that would work."""
    return " or ".join(str(size) for size in range(1, number + 1) if number % size == 0)


@dataclass
class GTPParallelDims(ParallelDims):
    """Ranks, slowest to fastest: pp, dp_replicate, dp_shard, cp, gtp, tp. For routed experts: pp, dp_replicate,
    expert_optimizer_shard, egtp, ep, etp.

    `gtp` is a data axis: its peers read different samples. The base class gets it as the inner factor of `dp_shard`,
    so that everything torchtitan derives from that (batch and loss meshes, batch split, token counts, loss averages,
    tokens per second, validation) counts it. `dp_shard` given to the constructor excludes `gtp`; -1 means whatever
    ranks are left; after construction the attribute includes it.

    torchtitan's fsdp axis (dp_shard x cp, cp inside) is cut in two: its innermost ranks are `gtp`; what is left of it
    is `optimizer_shard`, of dp_shard x cp ranks, which cuts the optimizer's parameters further. So where cp > 1, gtp
    peers share sequences before they share the batch: whichever it is, they hold different tokens.

    The same ranks without pp and dp_replicate form the experts' grid. Its innermost axes are torchtitan's: ep x etp, or
    tp where ep is 1, since torchtitan then shards experts over tp itself. What is left are the experts' data ranks:
    the innermost of them are `egtp`, the others `expert_optimizer_shard`.

    Attributes:
        gtp: ranks that share a TP slice of each weight.
        egtp: ranks that share an EP x ETP slice of each routed expert. Independent of `gtp`.
        has_experts: whether the model has routed experts; without them their axes get no process groups.
        high_priority: axes whose communicators run on streams of high priority, where they are NCCL's.
    """

    gtp: int = 1
    egtp: int = 1
    has_experts: bool = False
    high_priority: tuple[str, ...] = ()

    @classmethod
    def from_job_config(cls, job_config, world_size: int, has_experts: bool = False) -> GTPParallelDims:
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
            has_experts=has_experts,
            high_priority=high_priority_axes(job_config),
        )

    @property
    def gtp_enabled(self) -> bool:
        """Whether this integration shards weights: those of experts over `egtp` or the others over `gtp`."""
        return self.gtp > 1 or self.egtp > 1

    @property
    def optimizer_shard(self) -> int:
        """Ranks that hold the same gathered weights and different rows of the optimizer's: dp_shard x cp, gtp apart."""
        return self.dp_shard * self.cp // self.gtp

    @property
    def ranks_of_an_expert(self) -> int:
        """Ranks over which torchtitan spreads the experts of one layer: ep x etp, and tp where ep is 1."""
        return self.ep * self.etp if self.ep > 1 else self.tp

    @property
    def expert_data_ranks(self) -> int:
        """Ranks of one dp_replicate rank that have the same slice of the experts: egtp x expert_optimizer_shard."""
        return self.dp_shard * self.cp * self.tp // self.ranks_of_an_expert

    @property
    def expert_optimizer_shard(self) -> int:
        """Ranks that hold the same gathered experts and different rows of the optimizer's, egtp apart."""
        return self.expert_data_ranks // self.egtp

    def _validate(self) -> None:
        """Refuses impossible degrees with numbers that would work; then includes gtp in `dp_shard`."""
        for name, key in _KEYS.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{key} = {getattr(self, name)}: must be 1 or more")
        if not self.has_experts and self.egtp > 1:
            raise ValueError(
                f"egtp = {self.egtp} ({_EXPERT_SHARDS} = {self.etp * self.egtp}), and this model has no routed experts; set "
                f"{_EXPERT_SHARDS} to {self.etp} or leave it out"
            )
        if not self.has_experts and self.gtp > 1 and self.ep * self.etp > 1:
            name = "ep" if self.ep > 1 else "etp"
            raise ValueError(
                f"{_KEYS[name]} = {getattr(self, name)} is not supported together with gtp where the model, as this one, has "
                "no routed experts; set it to 1"
            )
        if self.etp not in (1, self.tp):
            raise ValueError(
                f"{_KEYS['etp']} = {self.etp}: experts are sharded over all tensor-parallel ranks or none; set it to 1 or "
                f"{self.tp} ({_KEYS['tp']})"
            )
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ValueError(f"{_DP_SHARD} = {self.dp_shard}: must be 1 or more, or -1 for whatever ranks are left")
        self._check_product()
        if self.dp_shard > 0:
            self.dp_shard *= self.gtp
        super()._validate()
        self._check_expert_grid()

    def _check_expert_grid(self) -> None:
        """ep x etp, and then egtp, divide the ranks that they are taken from."""
        ranks = self.dp_shard * self.cp * self.tp
        of = f"the {ranks} ranks of one model replica (dp_shard x cp x gtp x tp, without pp and dp_replicate)"
        if ranks % self.ranks_of_an_expert:
            etp = f" x {_KEYS['etp']} {self.etp} = {self.ranks_of_an_expert}" if self.etp > 1 else ""
            raise ValueError(
                f"{_KEYS['ep']} = {self.ep}{etp} does not divide {of}; set {_KEYS['ep']} to "
                f"{_divisors(ranks // self.etp)}"
            )
        if self.expert_data_ranks % self.egtp:
            largest = self.expert_data_ranks
            working = (self.etp * egtp for egtp in range(1, largest + 1) if largest % egtp == 0)
            taken = f"ep {self.ep} x etp {self.etp}" if self.ep > 1 else f"tp {self.tp}"
            raise ValueError(
                f"egtp = {self.egtp} ({_EXPERT_SHARDS} = {self.etp * self.egtp}) does not divide the {largest} expert data "
                f"ranks: {of} / ({taken}); set {_EXPERT_SHARDS} to {' or '.join(map(str, working))}"
            )

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
        if self.gtp_enabled:
            # The base class's fsdp axis has the ranks of gtp x optimizer_shard, its efsdp axis those of egtp x
            # expert_optimizer_shard; nothing communicates on them as a whole. Nor on etp where experts are on tp.
            if name in ("fsdp", "efsdp") or (name == "etp" and self.ep == 1):
                return False
            if name in ("egtp", "expert_optimizer_shard") and not self.has_experts:
                return False
            if name in ("gtp", "egtp"):
                return True  # the styles are applied to an axis of size 1, too
        return super()._mesh_exist(name, degree)

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """The meshes that have a process group. (The base class adds larger ones without, and warns about them.)"""
        meshes = super().get_all_one_dimensional_meshes()
        return {name: mesh for name, mesh in meshes.items() if self._mesh_exist(name, mesh.size())}

    def build_mesh(self) -> DeviceMesh:
        """Builds torchtitan's meshes; where gtp is on, also the 1-D meshes `gtp`, `optimizer_shard`, `egtp` and
        `expert_optimizer_shard`.

        torchtitan's three views of the ranks have process groups of their own even for axes that they share (pp, tp);
        where gtp is on, an axis has a group in one view only, and only if it is larger than 1.
        """
        if not self.gtp_enabled:
            return super().build_mesh()
        world = init_device_mesh(device_type, (self.world_size,), mesh_dim_names=("world",))

        def view(with_group: tuple[str, ...], **sizes: int) -> DeviceMesh:
            fake = {name: "fake" for name, size in sizes.items() if size == 1 or name not in with_group}
            urgent = {}
            if device_type == "cuda":
                urgent = {name: _high_priority() for name in sizes if name in self.high_priority and name not in fake}
            return world._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override={**fake, **urgent})

        cp, tp = self.cp, self.tp
        outside = {"pp": self.pp, "dp_replicate": self.dp_replicate}
        fsdp = self.dp_shard * cp
        samples = view(("pp", "batch", "cp", "tp"), pp=self.pp, batch=self.dp_replicate * self.dp_shard, cp=cp, tp=tp)
        weights = view(
            ("dp_replicate", "optimizer_shard", "gtp"),
            **outside, optimizer_shard=self.optimizer_shard, gtp=self.gtp, tp=tp,
        )  # fmt: skip
        experts = view(
            ("expert_optimizer_shard", "egtp") if self.has_experts else (),
            **outside, expert_optimizer_shard=self.expert_optimizer_shard, egtp=self.egtp, expert=self.ranks_of_an_expert,
        )  # fmt: skip
        dense = view((), **outside, fsdp=fsdp, tp=tp)
        efsdp = fsdp * tp // (self.ep * self.etp)
        sparse = view(("ep", "etp") if self.ep > 1 else (), **outside, efsdp=efsdp, ep=self.ep, etp=self.etp)
        # Without cp the ranks that average the loss are those that split the batch, and their group serves both.
        loss = samples["batch", "cp"]._flatten("loss_mesh") if cp > 1 else samples["batch"]
        self._world_mesh = world
        self._global_meshes = {
            "dataloading": samples, "loss": loss, "dense": dense, "sparse": sparse, "weights": weights, "experts": experts,
        }  # fmt: skip
        self._meshes = {
            **{name: samples[name] for name in ("pp", "batch", "cp", "tp")},
            **{name: sparse[name] for name in ("ep", "efsdp", "etp")},
            **{name: weights[name] for name in ("dp_replicate", "optimizer_shard", "gtp")},
            **{name: experts[name] for name in ("expert_optimizer_shard", "egtp")},
            "fsdp": dense["fsdp"],
            "loss": loss,
        }
        self._validate_meshes()
        active = {name: mesh.size() for name, mesh in self.get_all_one_dimensional_meshes().items()}
        logger.info(f"Built meshes: {', '.join(f'{name} {size}' for name, size in active.items())}")
        return world
