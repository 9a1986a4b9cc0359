"""The entry: `torchrun --nproc_per_node N -m titan_integration.train --job.config_file X.toml [torchtitan options]`.

Takes any torchtitan llama3 TOML, with or without a `[gtp]` section.
"""

from __future__ import annotations

import sys
import tomllib

JOB_CONFIG_MODULE = "titan_integration.job_config"


def with_job_config(arguments: list[str]) -> list[str]:
    """`arguments` with `--job.custom_config_module` for our sections, unless they or their TOML name a module already."""
    config_file = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        name = name.replace("-", "_")
        if name == "__job.custom_config_module":
            return arguments
        if name == "__job.config_file":
            config_file = value if equals else (arguments[position + 1 : position + 2] or [None])[0]
    if config_file is not None:
        with open(config_file, "rb") as file:
            if tomllib.load(file).get("job", {}).get("custom_config_module"):
                return arguments
    return [f"--job.custom_config_module={JOB_CONFIG_MODULE}", *arguments]


def main() -> None:
    """Trains the job that the command line describes."""
    # torchtitan binds sys.argv as a default argument when it is imported.
    sys.argv[1:] = with_job_config(sys.argv[1:])
    from titan_integration import cpu

    cpu.install()
    from torchtitan.train import main as titan_main

    from titan_integration import spec
    from titan_integration.trainer import GTPTrainer

    spec.register()
    titan_main(GTPTrainer)


if __name__ == "__main__":
    main()
