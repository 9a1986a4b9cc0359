"""Clipping and optimizers for parameters of any mesh."""

from .clip import clip_grad_norm_, count_zero_grads
from .muon import Muon, muon_param_groups

__all__ = ["Muon", "clip_grad_norm_", "count_zero_grads", "muon_param_groups"]
