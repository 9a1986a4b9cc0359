"""What torch's own errors do not say: which parameter of ours an operator met, and what to do about it."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from .members import STATE, RootState
from .plan import clean_fqn


def explain(error: BaseException, state: RootState) -> None:
    """Add a note to ``error``, with which the forward of a root ends, where a parameter was met as the DTensor that it is
    outside of its own module's forward."""
    if "DTensor" not in str(error) or any("gtp_dtensor" in note for note in getattr(error, "__notes__", ())):
        return
    note = _foreign_owner(state) or _read_outside(state)
    if note is not None:
        error.add_note(f"gtp_dtensor: {note}")


def _foreign_owner(state: RootState) -> str | None:
    """A module that got a parameter of ours after GTPStyle, and knows nothing of it."""
    ours = {id(member.param): member.fqn for member in state.members}
    for name, module in state.module().named_modules():
        for parameter_name, param in module._parameters.items():
            if isinstance(param, DTensor) and id(param) in ours and STATE not in module.__dict__:
                return (
                    f"{clean_fqn(f'{name}.{parameter_name}')} belongs to a {type(module).__name__} that took the place of the "
                    "module that GTPStyle was applied to: replace modules (converters, quantizers) before GTPStyle"
                )
    return None


def _read_outside(state: RootState) -> str | None:
    fqn = next((runtime.last_read_outside for runtime in state.runtimes if runtime.last_read_outside), None)
    if fqn is None:
        return None
    module, _, name = fqn.rpartition(".")
    return (
        f"{fqn} was read outside of its own module's forward, where it is the sharded DTensor. To compute with all of it "
        f"there: `with materialized(model.{module}, {name!r}) as w:` (gtp_dtensor.materialized; it gives the parameter itself "
        "where GTP is off)"
    )
