"""Clipping (and, later, optimizers) for parameters of any mesh."""

from .clip import clip_grad_norm_, count_zero_grads

__all__ = ["clip_grad_norm_", "count_zero_grads"]
