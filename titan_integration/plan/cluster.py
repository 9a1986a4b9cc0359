"""What a cluster can do, read from a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SHIPPED = Path(__file__).resolve().parent.parent / "clusters"


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, dense.

    Attributes:
        name: for people.
        memory_gb: 10^9 bytes.
        num_processors: streaming multiprocessors. A GEMM of few tiles leaves some idle.
        bf16_tflops, fp8_tflops, fp32_tflops: 10^12 operations a second.
        memory_gb_s: 10^9 bytes a second, read and written.
    """

    name: str
    memory_gb: float
    num_processors: int
    bf16_tflops: float
    fp8_tflops: float
    fp32_tflops: float
    memory_gb_s: float


@dataclass(frozen=True)
class Nvlink:
    """What joins the GPUs of a domain: NVLink, or a bus in its place.

    Attributes:
        domain_size: GPUs of a domain.
        bandwidth_gb_s: 10^9 bytes a second of one GPU, in one direction.
        latency_us: microseconds of a collective's start and of each doubling of its ranks.
        ranks_per_domain: how many ranks of a job are in one domain, consecutive ones; 0: all of its GPUs.
        num_processors: streaming multiprocessors that a collective takes from GEMMs while it is in flight.
    """

    domain_size: int
    bandwidth_gb_s: float
    latency_us: float
    ranks_per_domain: int = 0
    num_processors: int = 16


@dataclass(frozen=True)
class Network:
    """What joins domains.

    Attributes:
        bandwidth_gb_s: 10^9 bytes a second for each GPU, in one direction.
        latency_us: as for NVLink, of the domains that a collective spans.
    """

    bandwidth_gb_s: float
    latency_us: float


@dataclass(frozen=True)
class Host:
    """Microseconds that the host needs.

    Attributes:
        launch_us: for a kernel, with the Python and autograd around it.
        collective_us: for a gather or reduction of a weight beyond that, with the schedule around it.
    """

    launch_us: float
    collective_us: float


@dataclass(frozen=True)
class Efficiency:
    """Which fraction of a peak rate is reached: assumed, or calibrated.

    Attributes:
        gemm: of a GEMM whose tiles occupy all processors.
        attention: of fused attention, of the bf16 rate.
        memory: of kernels that only move memory.
        nvlink, network: of collectives.
    """

    gemm: float
    attention: float
    memory: float
    nvlink: float
    network: float


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal GPUs.

    Attributes:
        name: for people.
        num_gpus: how many a job gets, where nobody says otherwise.
        source: the file.
        calibrated: the file that efficiencies and host times were taken from; "" where they are the cluster file's.
    """

    name: str
    num_gpus: int
    gpu: Gpu
    nvlink: Nvlink
    network: Network
    host: Host
    efficiency: Efficiency
    source: str = ""
    calibrated: str = ""

    @property
    def ranks_per_domain(self) -> int:
        """Consecutive ranks that reach each other over NVLink."""
        return self.nvlink.ranks_per_domain or self.nvlink.domain_size


_SECTIONS = {"gpu": Gpu, "nvlink": Nvlink, "network": Network, "host": Host, "efficiency": Efficiency}


def read_cluster(name: str) -> Cluster:
    """The cluster of a file, or of one that is shipped ("h200x8_infiniband").

    Raises:
        FileNotFoundError: there is no such file; names those that are shipped.
        ValueError: a field is missing, unknown, or no such number; names it.
    """
    path = Path(name)
    if not path.exists() and path.suffix in ("", ".toml") and (SHIPPED / f"{path.stem}.toml").exists():
        path = SHIPPED / f"{path.stem}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml")))
        raise FileNotFoundError(f"--cluster {name}: no such file; shipped are {known}")
    try:
        toml = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    _check_names(path, "", toml, ["name", "num_gpus", *_SECTIONS])
    sections = {}
    for section, cls in _SECTIONS.items():
        table = toml.get(section)
        if not isinstance(table, dict):
            raise ValueError(f"{path}: section [{section}] is missing")
        sections[section] = _read_section(path, section, table, cls)
    name = _value(path, "", toml, "name", str)
    num_gpus = _value(path, "", toml, "num_gpus", int)
    cluster = Cluster(name, num_gpus, **sections, source=str(path))
    if cluster.ranks_per_domain > cluster.nvlink.domain_size:
        raise ValueError(
            f"{path}: nvlink.ranks_per_domain = {cluster.ranks_per_domain} is more than nvlink.domain_size = "
            f"{cluster.nvlink.domain_size}"
        )
    return cluster


def _read_section(path: Path, section: str, table: Mapping, cls: type):
    fields = dataclasses.fields(cls)
    _check_names(path, f"{section}.", table, [field.name for field in fields])
    kinds = {"str": str, "int": int, "float": float}
    values = {}
    for field in fields:
        if field.name not in table and field.default is not dataclasses.MISSING:
            continue
        values[field.name] = value = _value(path, f"{section}.", table, field.name, kinds[field.type])
        if section == "efficiency" and value > 1:
            raise ValueError(f"{path}: {section}.{field.name} = {value}: a fraction of the peak is at most 1")
    return cls(**values)


def _check_names(path: Path, prefix: str, table: Mapping, known: list[str]) -> None:
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"{path}: unknown field {prefix}{name}; {hint}")


def _value(path: Path, prefix: str, table: Mapping, name: str, kind: type):
    """A string, or a number above 0 (host times and latencies: 0 or more)."""
    if name not in table:
        raise ValueError(f"{path}: field {prefix}{name} is missing")
    value = table[name]
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{path}: {prefix}{name} = {value!r}: must be a string")
        return value
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"{path}: {prefix}{name} = {value!r}: must be {'a' if kind is float else 'an integer'} number")
    if not math.isfinite(value) or value < 0 or value == 0 and not name.endswith("_us"):
        least = "at least 0" if name.endswith("_us") else "above 0"
        raise ValueError(f"{path}: {prefix}{name} = {value}: must be {least}, and finite")
    return kind(value)
