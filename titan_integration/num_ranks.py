"""How many ranks a job needs: `python -m titan_integration.num_ranks --job.config_file X.toml [torchtitan options]`.

Prints the product of the parallel degrees, which the TOML or the options name; where dp_shard takes what is left, the
least that also fits the experts' grid. Reads only those few keys and imports
neither torch nor torchtitan, so that a launcher can ask first.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib

_SHARDS = "gtp.tensor_parallel_num_weight_shards"
_TP = "parallelism.tensor_parallel_degree"
_EXPERT_SHARDS = "gtp.expert_tensor_parallel_num_weight_shards"
_EP = "parallelism.expert_parallel_degree"
_ETP = "parallelism.expert_tensor_parallel_degree"
_DP_SHARD = "parallelism.data_parallel_shard_degree"
_CP = "parallelism.context_parallel_degree"
_OUTSIDE = ("parallelism.data_parallel_replicate_degree", "parallelism.pipeline_parallel_degree")


def num_ranks(arguments: list[str]) -> int:
    """The ranks of the job that `arguments` (torchtitan's options) describe; dp_shard = -1 is as small as can be."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--job.config_file", dest="config_file")
    for key in (_SHARDS, _TP, _EXPERT_SHARDS, _EP, _ETP, _DP_SHARD, _CP, *_OUTSIDE):
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

    tp, etp, ep = value(_TP, 1), value(_ETP, 1), value(_EP, 1)
    dense = max(tp, value(_SHARDS, tp)) * max(1, value(_CP, 1))
    # torchtitan spreads experts over ep x etp ranks, or over tp where ep is 1.
    egtp = max(1, value(_EXPERT_SHARDS, etp) // etp)
    experts = egtp * (ep * etp if ep > 1 else tp)
    dp_shard = value(_DP_SHARD, -1)
    replica = dense * dp_shard if dp_shard > 0 else math.lcm(dense, experts)
    return replica * math.prod(max(1, value(key, 1)) for key in _OUTSIDE)


if __name__ == "__main__":
    print(num_ranks(sys.argv[1:]))
