"""torchtitan's CheckpointManager, loading whole checkpoints or nothing, running no code from them, safe to kill.

The files are torchtitan's. What differs from torchtitan 0.2.2:

* Loading compares keys, shapes, dtypes and file lengths before anything is written, and unpickles plain data only.
* A job continues from the newest *whole* checkpoint and says which ones it passed over.
* A save into a folder that exists takes the old checkpoint away first, so that a killed save does not look whole.
* `keep_latest_k` counts whole checkpoints, so that what it leaves can be resumed from.
* Saving disturbs nothing, also before the first optimizer step; closing waits for an asynchronous save.
* Extra states of modules, such as scales of TransformerEngine's, are those of the step that is saved.
* What cannot work is refused at set-up, and not at the end of the training.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)
from torchtitan.tools.logging import logger

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner
from titan_integration.hugging_face import GatheringAdapter, check_names, is_extra_state
from titan_integration.optimizer import initialize_state
from titan_integration.rank_zero import run_on_rank_zero

_STATES = (MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)
_METADATA = ".metadata"
_HF_INDEX = "model.safetensors.index.json"
_DATA_OF_RANK = re.compile(r"dp_rank_\d+")
_PLAIN = {
    "builtins": frozenset({"bytearray", "complex", "frozenset", "range", "set", "slice"}),
    "collections": frozenset({"OrderedDict", "deque"}),
}
_START_DATA_ANEW = "--checkpoint.exclude_from_loading dataloader starts the data from its beginning"


def check_checkpoint(checkpoint) -> None:
    """Refuses settings of `[checkpoint]` that torchtitan fails on later, some of them after the last step.

    Raises:
        ValueError: names the keys and what would work.
    """
    if not checkpoint.enable:
        return
    for state in checkpoint.exclude_from_loading:
        if state not in _STATES:
            raise ValueError(
                f"checkpoint.exclude_from_loading has {state!r}: choose from {', '.join(map(repr, _STATES))}"
            )
    if checkpoint.keep_latest_k < 0 or checkpoint.keep_latest_k == 1:
        raise ValueError(
            f"checkpoint.keep_latest_k = {checkpoint.keep_latest_k}: set it to 0 (all are kept) or to 2 or more, as the "
            "newest one may be one that is being saved"
        )
    for key, needed, why in (
        ("last_save_in_hf", "last_save_model_only", "that format holds models only"),
        ("initial_load_in_hf", "initial_load_model_only", "that format holds models only"),
        ("initial_load_in_hf_quantized", "initial_load_in_hf", "only that format is quantized"),
    ):
        if getattr(checkpoint, key) and not getattr(checkpoint, needed):
            raise ValueError(f"checkpoint.{key} = true needs checkpoint.{needed} = true: {why}")


class _PlainUnpickler(pickle.Unpickler):
    """Makes builtin containers and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a data loader's state")


class _PickledStates(DefaultLoadPlanner):
    """Looks at pickles within entries, keeps nothing."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        pickled = torch.load(value, map_location="cpu", weights_only=True)
        try:
            _PlainUnpickler(io.BytesIO(pickled)).load()
        except Exception as error:  # a broken pickle raises almost anything
            key = read_item.dest_index.fqn
            raise ValueError(f"{key}: not loaded, it is more than plain data, or broken: {error}") from error


class _Reader(CheckedFileSystemReader):
    """Also looks into the state of torchtitan's data loader, which has its own pickle and loads it without care."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan = super().prepare_local_plan(plan)
        prefix = f"{DATALOADER}.dp_rank_"
        entries = [
            item for item in plan.items if item.type == LoadItemType.BYTE_IO and item.dest_index.fqn.startswith(prefix)
        ]
        self.read_data(LoadPlan(entries), _PickledStates())
        return plan


def _steps(folder: str) -> list[int]:
    """Steps of which there is a folder, newest first."""
    if not os.path.isdir(folder):
        return []
    matches = (re.fullmatch(r"step-(\d+)", name) for name in os.listdir(folder))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _fault(path: str) -> str | None:
    """Why the folder of a step is not a whole checkpoint; None if it is."""
    if not os.path.isfile(os.path.join(path, _METADATA)):
        # Of the files in Hugging Face format this one is written last.
        return None if os.path.isfile(os.path.join(path, _HF_INDEX)) else "its save did not finish"
    try:
        reader = CheckedFileSystemReader(path)
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        reader.check_files()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _newest_whole(folder: str) -> int:
    """The newest step of which there is a whole checkpoint; -1 if there is none. Logs what it passes over.

    Raises:
        ValueError: there is none, and of one the save did finish: something has happened to the files since.
    """
    faults: dict[int, str] = {}
    for step in _steps(folder):
        fault = _fault(os.path.join(folder, f"step-{step}"))
        if fault is None:
            return step
        logger.warning(f"Passing over checkpoint {folder}/step-{step}: {fault}")
        faults[step] = fault
    damaged = [step for step in faults if os.path.isfile(os.path.join(folder, f"step-{step}", _METADATA))]
    if damaged:
        named = "\n".join(f"step-{step}: {faults[step]}" for step in damaged)
        raise ValueError(
            f"{folder} has no whole checkpoint, and these were saved whole once; restore them, or start anew with "
            f"another checkpoint.folder:\n{named}"
        )
    return -1


def _states_in(metadata: Metadata) -> set[str]:
    """Which of torchtitan's states a checkpoint has; the model is whatever tensors stand at the top level."""
    found = {state for state in _STATES for key in metadata.state_dict_metadata if key.startswith(f"{state}.")}
    if any(isinstance(value, TensorStorageMetadata) for value in metadata.state_dict_metadata.values()):
        found.add(MODEL)
    return found


class GTPCheckpointManager(CheckpointManager):
    """See the module's docstring. Errors of `load` are raised on all ranks.

    Args:
        gathers_for_hf: convert to and from Hugging Face format weight by weight, on whole weights.
        others: torchtitan's.

    Raises:
        ValueError: the model's weights cannot be written or read in Hugging Face format, where the job asks for it.
    """

    def __init__(self, *, gathers_for_hf: bool, checkpoint_config, sd_adapter, **others) -> None:
        in_hf = checkpoint_config.last_save_in_hf or checkpoint_config.initial_load_in_hf
        if checkpoint_config.enable and in_hf:
            check_names(sd_adapter, others["model_parts"], saves=checkpoint_config.last_save_in_hf)
            if gathers_for_hf:
                sd_adapter = GatheringAdapter(sd_adapter)
        self._step_to_save = -1
        super().__init__(checkpoint_config=checkpoint_config, sd_adapter=sd_adapter, **others)

    # ---- saving

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """torchtitan's, of states that are complete. Raises what an asynchronous save before it failed with."""
        if self._should_save(curr_step, last_step):
            self._step_to_save = curr_step
            initialize_state(self.states[OPTIMIZER])
            if torch.__version__ < "2.13":
                # There async_save closes the stager that it was given, which torchtitan would use again.
                self.stager = None
        super().save(curr_step, last_step)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args, to_hf: bool = False, **kwargs) -> Any:
        """torchtitan's, into a folder that is new."""
        run_on_rank_zero(lambda: _remove(checkpoint_id))
        state_dict = _weights(state_dict) if to_hf else self._with_extra_state(state_dict)
        return super().dcp_save(state_dict, checkpoint_id, *args, to_hf=to_hf, **kwargs)

    def _with_extra_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """With extra states of modules as they are now. They are copies, and torchtitan keeps those of before the first
        step; in an export it converts their bytes to the weights' dtype."""
        keys = list(filter(is_extra_state, state_dict))
        if not keys:
            return state_dict
        now = self.states[MODEL]._get_state_dict()
        return state_dict | {key: now[key] for key in keys}

    def _purge_stale_checkpoints(self) -> None:
        """Keeps the newest k of the whole checkpoints until now and of the one that is being saved.

        torchtitan counts folders: after a killed save, or a return to an older step, it would take away what was just
        saved. Newer folders than the current step stay, unfinished ones go.
        """
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        older = [step for step in _steps(self.folder) if step < self._step_to_save]
        finished = [step for step in older if self._is_finished(step)]
        kept = finished[: self.keep_latest_k - 1]
        for step in reversed(older):
            if step not in kept:
                self.purge_queue.put(self._create_checkpoint_id(step))

    def _is_finished(self, step: int) -> bool:
        path = Path(self._create_checkpoint_id(step))
        return (path / _METADATA).is_file() or (path / _HF_INDEX).is_file()

    def close(self) -> None:
        """Waits for the save in progress; raises what it failed with."""
        try:
            future = getattr(self, "save_future", None)  # absent where checkpoints are off
            if future is not None:
                self.save_future = None
                future.result()
        finally:
            super().close()

    # ---- loading

    def load(self, step: int = -1) -> bool:
        """torchtitan's. Where there is no whole checkpoint in the job's own folder, also if that folder exists, the
        initial load takes place.

        Args:
            step: to load; -1: the newest whole one.

        Returns:
            Whether anything was loaded.

        Raises:
            FileNotFoundError: there is no such step.
            ValueError: what there is cannot be continued from, with what would work.
            CheckpointException: it does not fit, is not whole, or would run code; nothing was loaded.
        """
        if not self.enable:
            return super().load(step)
        steps = run_on_rank_zero(lambda: _steps(self.folder))
        if step == -1:
            step = self._find_load_step()
        elif step not in steps:
            there = ", ".join(map(str, reversed(steps))) or "none"
            raise FileNotFoundError(f"checkpoint.load_step = {step}: {self.folder} has no such step; there is {there}")
        elif steps[0] > step and dist.get_rank() == 0:
            logger.warning(
                f"Going back to step {step}: {self.folder} has newer checkpoints up to step {steps[0]}, which a resume "
                "without checkpoint.load_step would load; move them away"
            )
        with contextlib.nullcontext() if step != -1 else self._without_folder():
            return super().load(step)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """torchtitan's, with checks before anything is written."""
        if from_hf:
            self._load_hf(state_dict, checkpoint_id, from_quantized)
            return
        model_only = not any(state in state_dict for state in self.states if state != MODEL)
        if not model_only:
            run_on_rank_zero(lambda: self._check_states(state_dict, checkpoint_id))
        # An export may be in another dtype; a run goes on in the dtypes that it had.
        planner = CheckedLoadPlanner(casts=model_only)
        dcp.load(state_dict, storage_reader=_Reader(checkpoint_id), planner=planner)
        self.states[MODEL].load_state_dict(state_dict)

    def _load_hf(self, state_dict: dict[str, Any], folder: str, from_quantized: bool) -> None:
        adapter = self.sd_adapter
        convert = adapter.template if isinstance(adapter, GatheringAdapter) else adapter.to_hf
        hf_state_dict = convert(_weights(state_dict))
        reader = adapter.get_hf_storage_reader(folder, from_quantized)
        # Such files may have more than the model: tables of rotary embeddings, heads that predict further tokens.
        dcp.load(hf_state_dict, storage_reader=reader, planner=CheckedLoadPlanner(strict=False, casts=True))
        self.states[MODEL].load_state_dict(adapter.from_hf(hf_state_dict))

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step with a whole checkpoint, the same on all ranks; -1 if there is none."""
        return run_on_rank_zero(lambda: _newest_whole(folder or self.folder))

    @contextlib.contextmanager
    def _without_folder(self) -> Iterator[None]:
        """torchtitan makes the initial load only where the checkpoints' folder does not exist. It may: the tokenizer is
        kept there, and a job that was killed in its first save leaves it."""
        folder = self.folder
        self.folder = os.path.join(folder, "none yet")
        try:
            yield
        finally:
            self.folder = folder

    def _check_states(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """Whether a checkpoint has the states that are asked for, and the data loader's for as many ranks."""
        if not os.path.isfile(os.path.join(checkpoint_id, _METADATA)) and _fault(checkpoint_id) is None:
            raise ValueError(self._not_resumable(checkpoint_id, "is a model in Hugging Face format"))
        metadata = CheckedFileSystemReader(checkpoint_id).read_metadata()
        saved = _states_in(metadata)
        missing = [state for state in _STATES if state in state_dict and state not in saved]
        if missing:
            raise ValueError(self._not_resumable(checkpoint_id, f"has no {', '.join(missing)}"))
        if DATALOADER in state_dict:
            prefix = f"{DATALOADER}."
            keys = [key.removeprefix(prefix) for key in metadata.state_dict_metadata if key.startswith(prefix)]
            _check_data_ranks(checkpoint_id, keys, state_dict[DATALOADER])

    def _not_resumable(self, checkpoint_id: str, what: str) -> str:
        resumable = [
            str(step)
            for step in reversed(_steps(self.folder))
            if os.path.isfile(os.path.join(path := self._create_checkpoint_id(step), _METADATA))
            and _fault(path) is None
            and _states_in(CheckedFileSystemReader(path).read_metadata()).issuperset(_STATES)
        ]
        steps = f"set checkpoint.load_step to one that can be ({', '.join(resumable)}), " if resumable else ""
        return (
            f"{checkpoint_id} {what}, so a run cannot be continued from it (checkpoint.last_save_model_only = true makes "
            f"the last checkpoint such a one): {steps}name what it lacks in checkpoint.exclude_from_loading, or start "
            "another run from it, with its path in checkpoint.initial_load_path"
        )


def _weights(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if not is_extra_state(key)}


def _remove(checkpoint_id: str) -> None:
    """Takes an old checkpoint away, what makes it look whole first."""
    if not os.path.isdir(checkpoint_id):
        return
    logger.warning(f"{checkpoint_id} exists: it is taken away before the new one is saved")
    for name in (_METADATA, _HF_INDEX):
        Path(checkpoint_id, name).unlink(missing_ok=True)
    shutil.rmtree(checkpoint_id)


def _check_data_ranks(checkpoint_id: str, keys: Iterable[str], loader) -> None:
    """torchtitan's data loader has a state for each data-parallel rank, ours one for all.

    Raises:
        ValueError: the checkpoint's is of the other kind, or of another number of ranks.
    """
    num_saved = sum(bool(_DATA_OF_RANK.fullmatch(key)) for key in keys)
    num_ranks = loader.dp_world_size if any(map(_DATA_OF_RANK.fullmatch, loader.state_dict())) else 0
    if num_saved == num_ranks:
        return
    if not (num_saved and num_ranks):
        raise ValueError(
            f"{checkpoint_id}: the state of the data belongs to another kind of data set (training.dataset); restore "
            f"that, or {_START_DATA_ANEW}"
        )
    raise ValueError(
        f"{checkpoint_id}: the state of the data is that of {num_saved} data-parallel ranks (dp_replicate x dp_shard x "
        f"gtp), this job has {num_ranks}, and torchtitan's data loader continues on the same number only; use "
        f"{num_saved}, or {_START_DATA_ANEW} (data sets 'python_stdlib' and 'text_files' continue on any number)"
    )
