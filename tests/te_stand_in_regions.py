"""Recipes, regions, scales and checkpointing of the stand-in for TransformerEngine (te_stand_in.py)."""

from __future__ import annotations

import contextlib
import enum

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from tests.te_stand_in_tensors import LARGEST

HISTORY = 4


class Format(enum.Enum):
    E4M3, HYBRID = range(2)


class Recipe:
    backward_override = None

    def __init__(self, kind, amax_history_len=HISTORY, fp8_format=Format.HYBRID):
        self.amax_history_len, self.fp8_format = amax_history_len, fp8_format
        self.kind = kind  # "delayed", "current", "block", "mx" or "nv"

    def delayed(self):
        return self.kind == "delayed"


def _in_backward():
    return torch._C._current_graph_task_id() != -1


class _FP8:
    """TE's own state of the process: the recipe in force, and the modules whose scales the outermost region's end updates."""

    recipe: Recipe | None = None
    init_recipe: Recipe | None = None
    region: dict = {}  # modules that ran; the backward of the first updates the scales of all their backwards
    group = None
    depth = 0
    checkpoint_phase: str | None = None  # "forward", "recompute"

    @classmethod
    def is_fp8_enabled(cls):
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe


@contextlib.contextmanager
def autocast(recipe=None, amax_reduction_group=None, enabled=True):
    before, _FP8.recipe = _FP8.recipe, recipe if enabled else None
    if _FP8.depth == 0 and not _in_backward():
        _FP8.region = {}
    if enabled and not _in_backward():
        _FP8.group = amax_reduction_group
    _FP8.depth += 1
    try:
        yield
    finally:
        _FP8.recipe = before
        _FP8.depth -= 1
        if enabled and recipe is not None and recipe.delayed() and _FP8.depth == 0 and torch.is_grad_enabled():
            for module in _FP8.region:
                module.fp8_meta["scaling_fwd"].roll(amax_reduction_group)


@contextlib.contextmanager
def _phase(name):
    _FP8.checkpoint_phase = name
    try:
        yield
    finally:
        _FP8.checkpoint_phase = None


def checkpoint(function, *args, use_reentrant=True, **kwargs):
    assert not use_reentrant
    recipe = _FP8.recipe

    def run(*args):
        if not _in_backward():
            with _phase("forward"):
                return function(*args, **kwargs)
        # Without the group, as TE does it, and at its end all scales move on.
        with _phase("recompute"), autocast(recipe, enabled=recipe is not None):
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, early_stop=False)


SUPPORTED = ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available")


def is_available(return_reason=False):
    return (True, "") if return_reason else True


@contextlib.contextmanager
def quantized_model_init(recipe, enabled=True, preserve_high_precision_init_val=True):
    _FP8.init_recipe = recipe
    try:
        yield
    finally:
        _FP8.init_recipe = None


class Scaling:
    def __init__(self, num, length):
        self.scale, self.amax_history = torch.ones(num), torch.zeros(length, num)
        self.stashed = []

    def reset(self):
        self.scale.fill_(1.0), self.amax_history.zero_()

    @contextlib.contextmanager
    def in_checkpoint(self, phase):
        """A recompute reads and writes copies of what the forward found."""
        mine = self.scale, self.amax_history
        if phase == "forward":
            self.stashed.append([tensor.clone() for tensor in mine])
        if phase == "recompute":
            after = [tensor.clone() for tensor in mine]
            [tensor.copy_(before) for tensor, before in zip(mine, self.stashed.pop(0))]
        yield
        if phase == "recompute":
            [tensor.copy_(later) for tensor, later in zip(mine, after)]

    def roll(self, group):
        if group is not None:
            dist.all_reduce(self.amax_history[0], dist.ReduceOp.MAX, group=group)
        amax = self.amax_history.amax(0)
        self.scale.copy_(torch.where(amax > 0, LARGEST / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()
