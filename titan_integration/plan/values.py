"""Whether a job's values are of their types and in range: torchtitan takes what a TOML says as it is."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path

_KINDS = {int: ("an integer", int), float: ("a number", (int, float)), bool: ("true or false", bool)}
_KINDS[str] = ("a string", str)
_DEGREES = ("tensor", "pipeline", "context", "expert", "expert_tensor")
_LEAST = {
    ("training", "seq_len"): 1,
    ("training", "local_batch_size"): 1,
    ("training", "steps"): 1,
    ("parallelism", "data_parallel_replicate_degree"): 1,
    ("parallelism", "pipeline_parallel_microbatch_size"): 1,
    **{("parallelism", f"{name}_parallel_degree"): 1 for name in _DEGREES},
    ("gtp", "tensor_parallel_num_weight_shards"): 0,
    ("gtp", "expert_tensor_parallel_num_weight_shards"): 0,
}
_LEAST_OR_ALL = {("training", "global_batch_size"): 1, ("parallelism", "data_parallel_shard_degree"): 1}  # or -1


def check_readable(toml: str) -> None:
    """Raises:
    ValueError: it is no TOML file; names it.
    """
    try:
        tomllib.loads(Path(toml).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{toml}: not a TOML file: {error}") from None


def check_values(job_config) -> None:
    """Raises:
    ValueError: a value is of a wrong type, or too small; names the key.
    """
    for section, name, hint, value in _values(job_config):
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = set(typing.get_args(hint)) if is_union else {hint}
        if not all(kind in _KINDS or kind is type(None) for kind in kinds):
            continue
        allowed = [kind for kind in kinds if kind is not type(None)]
        if value is None and len(allowed) < len(kinds):
            continue
        if not any(isinstance(value, _KINDS[k][1]) and (k is bool or type(value) is not bool) for k in allowed):
            words = " or ".join(sorted(_KINDS[kind][0] for kind in allowed))
            raise ValueError(f"{section}.{name} = {value!r}: must be {words}")
        least = _LEAST.get((section, name))
        if least is not None and value is not None and value < least:
            raise ValueError(f"{section}.{name} = {value}: must be at least {least}")
        least = _LEAST_OR_ALL.get((section, name))
        if least is not None and value != -1 and value < least:
            raise ValueError(f"{section}.{name} = {value}: must be at least {least}, or -1")


def _values(job_config) -> Iterator[tuple[str, str, object, object]]:
    """(section, name, type, value) of each field of each section."""
    for section in dataclasses.fields(job_config):
        table = getattr(job_config, section.name)
        if dataclasses.is_dataclass(table):
            hints = typing.get_type_hints(type(table))
            for field in dataclasses.fields(table):
                yield section.name, field.name, hints[field.name], getattr(table, field.name)
