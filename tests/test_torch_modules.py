"""Every kind of module of torch.nn that owns parameters trains under GTP as it does without."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrizations

from gtp_dtensor import GTPStyle, stats
from tests.harness import ranks
from tests.reference import build_pair, full_gradients, local_slice


class Called(nn.Module):
    """A module with how it is called."""

    def __init__(self, inner: nn.Module, call) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


def _floats(*shape):
    return lambda: torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _ids():
    return torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(3))


def _first(module, x):
    return module(x)[0]


def _attends(module, x):
    return module(x, x, x)[0]


def _attends_halves(module, x):
    return module(x, x[..., :8], x[..., 8:])[0]


def _twice(module, x):
    return module(x, x)


def _last_step(module, x):
    return module(x[:, 0])


def _two_steps(module, x):
    return module(x[:, 0], module(x[:, 1]))[0]


def _classify(module, x):
    rows = x.flatten(0, 1)
    return module(rows, rows[:, 0].abs().mul(10).long() % 30)[0]


def _log_prob(module, x):
    return module.log_prob(x.flatten(0, 1))


def _attention(**options):
    return nn.MultiheadAttention(16, 4, batch_first=True, **options)


def _lazy():
    module = nn.LazyLinear(7)
    module(torch.randn(2, 16))
    return module


_SEQUENCE, _IMAGE, _LINE, _VOLUME = _floats(5, 16), _floats(4, 6, 6), _floats(4, 6), _floats(4, 6, 6, 6)
_OPTIONS = dict(dropout=0.0, batch_first=True)
CASES = {
    "linear": (lambda: nn.Linear(16, 9), _SEQUENCE),
    "lazy_linear": (_lazy, _SEQUENCE),
    "bilinear": (lambda: Called(nn.Bilinear(16, 16, 5), _twice), _SEQUENCE),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), _LINE),
    "conv2d_groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), _IMAGE),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), _VOLUME),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), _IMAGE),
    "embedding_padding": (lambda: nn.Embedding(20, 8, padding_idx=3), _ids),
    "embedding_bag": (lambda: nn.EmbeddingBag(20, 8), _ids),
    "attention": (lambda: Called(_attention(), _attends), _SEQUENCE),
    "attention_bias_kv": (lambda: Called(_attention(add_bias_kv=True), _attends), _SEQUENCE),
    "attention_other_dims": (lambda: Called(_attention(kdim=8, vdim=8), _attends_halves), _SEQUENCE),
    "lstm": (lambda: Called(nn.LSTM(16, 8, bidirectional=True, proj_size=4, batch_first=True), _first), _SEQUENCE),
    "lstm_cell": (lambda: Called(nn.LSTMCell(16, 8), _two_steps), _SEQUENCE),
    "gru": (lambda: Called(nn.GRU(16, 8, num_layers=2, batch_first=True), _first), _SEQUENCE),
    "gru_cell": (lambda: Called(nn.GRUCell(16, 8), _last_step), _SEQUENCE),
    "rnn_cell": (lambda: Called(nn.RNNCell(16, 8), _last_step), _SEQUENCE),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, **_OPTIONS), _SEQUENCE),
    "decoder_layer": (lambda: Called(nn.TransformerDecoderLayer(16, 4, 32, **_OPTIONS), _twice), _SEQUENCE),
    "transformer": (lambda: Called(nn.Transformer(16, 4, 1, 1, 32, **_OPTIONS), _twice), _SEQUENCE),
    "layer_norm": (lambda: nn.LayerNorm((5, 16)), _SEQUENCE),
    "rms_norm": (lambda: nn.RMSNorm((5, 16)), _SEQUENCE),
    "group_norm": (lambda: nn.GroupNorm(2, 4), _IMAGE),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), _IMAGE),
    "prelu": (lambda: nn.PReLU(4), _IMAGE),
    "adaptive_softmax": (lambda: Called(nn.AdaptiveLogSoftmaxWithLoss(16, 30, [5, 10]), _classify), _SEQUENCE),
    "adaptive_softmax_log_prob": (lambda: Called(nn.AdaptiveLogSoftmaxWithLoss(16, 30, [5, 10]), _log_prob), _SEQUENCE),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(16, 9)), _SEQUENCE),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(16, 9)), _SEQUENCE),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(16, 9)), _SEQUENCE),
}


@ranks(2)
@pytest.mark.parametrize("min_numel", [0, pytest.param(10**9, marks=pytest.mark.slow)], ids=["sharded", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_trains_as_without(mesh, rank, world_size, case, min_numel):
    build, make_batch = CASES[case]
    model, reference = build_pair(lambda: build().double())
    parallelize_module(model, mesh, GTPStyle(min_numel=min_numel))
    num_matrices = sum(p.dim() > 1 for p in reference.parameters())
    assert stats(model).num_sharded_weights == (0 if min_numel else num_matrices)
    x = make_batch()
    for _ in range(2):  # the second one looks ahead
        model(local_slice(x, rank, world_size)).square().mean().backward()
        reference(x).square().mean().backward()
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert (grad is None) == (expected[name] is None), name
        assert grad is None or torch.allclose(grad, expected[name], rtol=1e-9, atol=1e-12), name
    model.eval(), reference.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.allclose(model(x), reference(x), rtol=1e-9, atol=1e-12)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    assert (stats(model).live_lease_bytes, stats(model).num_pending) == (0, 0)
