"""The entry: `torchrun --nproc_per_node N -m titan_integration.train --job.config_file X.toml [torchtitan options]`.

Takes any torchtitan TOML of llama3, llama4, deepseek_v3 or qwen3, with or without a `[gtp]` section. (TOMLs of other
models train without.)
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib

from titan_integration.job_config import Gtp

JOB_CONFIG_MODULE = "titan_integration.job_config"


def _check_gtp_keys(toml: dict) -> None:
    """Refuses unknown `[gtp]` keys with a hint; torchtitan would name the key but point to a script that we lack."""
    known = [field.name for field in dataclasses.fields(Gtp)]
    for key in toml.get("gtp", {}):
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"[gtp] {key}: unknown key; {hint}")


def with_job_config(arguments: list[str]) -> list[str]:
    """`arguments` with `--job.custom_config_module` for our sections, unless they or their TOML name a module already.

    Raises:
        ValueError: an unknown key in the TOML's `[gtp]` section.
    """
    config_file = module = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else (arguments[position + 1 : position + 2] or [None])[0]
        if name.replace("-", "_") == "__job.custom_config_module":
            module = value
        if name.replace("-", "_") == "__job.config_file":
            config_file = value
    named = module is not None
    if config_file is not None:
        with open(config_file, "rb") as file:
            toml = tomllib.load(file)
        if module is None:
            module = toml.get("job", {}).get("custom_config_module")
        if module in (None, "", JOB_CONFIG_MODULE):
            _check_gtp_keys(toml)
        named = bool(module)
    return arguments if named else [f"--job.custom_config_module={JOB_CONFIG_MODULE}", *arguments]


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
