"""How many ranks a job needs: `python -m titan_integration.num_ranks --job.config_file X.toml [torchtitan options]`.

Prints the product of the parallel degrees, which the TOML or the options name. Reads only those few keys and imports
neither torch nor torchtitan, so that a launcher can ask first.
"""

from __future__ import annotations

import argparse
import sys
import tomllib

_SHARDS = "gtp.tensor_parallel_num_weight_shards"
_TP = "parallelism.tensor_parallel_degree"
_OTHERS = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_degree",
)


def num_ranks(arguments: list[str]) -> int:
    """The ranks of the job that `arguments` (torchtitan's options) describe; dp_shard = -1 counts as 1."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--job.config_file", dest="config_file")
    for key in (_SHARDS, _TP, *_OTHERS):
        parser.add_argument(f"--{key}", dest=key, type=int)
    # Option names are normalised to underscores, as torchtitan accepts both spellings.
    normalised = [
        name.replace("-", "_").replace("__", "--", 1) + equals + value if argument.startswith("--") else argument
        for argument in arguments
        for name, equals, value in (argument.partition("="),)
    ]
    options = vars(parser.parse_known_args(normalised)[0])
    toml: dict = {}
    if options["config_file"]:
        with open(options["config_file"], "rb") as file:
            toml = tomllib.load(file)

    def value(key: str, default: int) -> int:
        section, name = key.split(".")
        given = options[key]
        return given if given is not None else toml.get(section, {}).get(name, default)

    ranks = max(value(_TP, 1), value(_SHARDS, value(_TP, 1)))
    for key in _OTHERS:
        ranks *= max(1, value(key, 1))
    return ranks


if __name__ == "__main__":
    print(num_ranks(sys.argv[1:]))
