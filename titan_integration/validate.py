"""torchtitan's validator on the held-out end of our data sets."""

from __future__ import annotations

from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.components.validate import build_validator as build_titan_validator

from titan_integration.data import build_validation_dataloader
from titan_integration.text import DATASETS


class HeldOutValidator(Validator):
    """torchtitan's `Validator` with our loader: the same global batches at every data-parallel degree."""

    def __init__(self, job_config, dp_world_size, dp_rank, tokenizer, **components) -> None:
        # torchtitan's constructor builds a loader of its own data sets, so only its base class's is called; the
        # other components are attributes under the names of its arguments.
        BaseValidator.__init__(self, job_config)
        self.tokenizer = tokenizer
        self.pp_schedule = self.pp_has_first_stage = self.pp_has_last_stage = None
        for name, component in components.items():
            setattr(self, name, component)
        self.validation_dataloader = build_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config)


def build_validator(job_config, **kwargs) -> BaseValidator:
    """torchtitan's `build_validator_fn`: ours for our data sets, torchtitan's own otherwise."""
    if job_config.validation.dataset in DATASETS:
        return HeldOutValidator(job_config, **kwargs)
    return build_titan_validator(job_config=job_config, **kwargs)
