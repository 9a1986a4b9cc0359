"""How long a collective occupies the links of a GPU.

[Note: the links]
    A GPU has two: NVLink to the ranks of its domain, and the network to others; ranks of a domain are consecutive. Of n
    ranks of a collective, m lie in this rank's domain and others in k - 1 further ones. Collectives go round in
    rings, as NCCL's do for large tensors: of B bytes (the gathered tensor, the unsharded gradient) a GPU receives (n
    - 1) / n over NVLink where all are in one domain. Over several, each domain receives (k - 1) / k of B by the
    network adapters of its m ranks together, and passes that on over NVLink. An all-reduce does both ways. An
    all-to-all brings n - m of n parts of what a rank has over its own adapter. On top comes a latency for the start
    and for each doubling of the ranks. Two collectives on one link share its bandwidth.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .cluster import Cluster


class Demand(NamedTuple):
    """Seconds that a collective needs by itself: of each link, and of nothing but time."""

    nvlink_s: float
    network_s: float
    latency_s: float

    @property
    def seconds(self) -> float:
        """Alone on its links."""
        return self.latency_s + max(self.nvlink_s, self.network_s)


class Places(NamedTuple):
    """Where the ranks of a collective are: how many, how many of them in this rank's domain, in how many domains."""

    num_ranks: int
    num_near: int
    num_domains: int


@functools.lru_cache(maxsize=4096)
def places(ranks: tuple[int, ...], ranks_per_domain: int, of: int) -> Places:
    """As rank ``of`` sees them. Domains that hold unequal numbers count as the one with fewest: it has the fewest
    adapters."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // ranks_per_domain] = counts.get(rank // ranks_per_domain, 0) + 1
    return Places(len(ranks), min(counts.values()), len(counts))


def demand(cluster: Cluster, what: str, ranks: tuple[int, ...], num_bytes: int) -> Demand:
    """Of one collective (see ``record.Start``) on this cluster."""
    num_ranks, num_near, num_domains = places(ranks, cluster.ranks_per_domain, ranks[0])
    nvlink = cluster.nvlink.bandwidth_gb_s * 1e9 * cluster.efficiency.nvlink
    network = cluster.network.bandwidth_gb_s * 1e9 * cluster.efficiency.network
    steps = 1 + math.log2(num_near)
    latency = steps * cluster.nvlink.latency_us
    if num_domains > 1:
        latency += (1 + math.log2(num_domains)) * cluster.network.latency_us
    if what in ("send", "recv"):
        far = num_domains > 1
        return Demand(0 if far else num_bytes / nvlink, num_bytes / network if far else 0, latency * 1e-6)
    if what == "all_to_all":
        near_bytes = num_bytes * (num_near - 1) / num_ranks
        far_bytes = num_bytes * (num_ranks - num_near) / num_ranks
        return Demand(near_bytes / nvlink, far_bytes / network, latency * 1e-6)
    ways = 2 if what == "all_reduce" else 1
    far_bytes = num_bytes * (num_domains - 1) / num_domains / num_near
    near_bytes = num_bytes * (num_ranks - 1) / num_ranks if num_near > 1 else 0
    return Demand(ways * near_bytes / nvlink, ways * far_bytes / network, ways * latency * 1e-6)
