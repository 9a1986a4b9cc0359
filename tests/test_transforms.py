"""torch.func's transforms and forward-mode differentiation of a model's inputs, beside the unsharded model."""

import pytest
import torch
import torch.nn as nn
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

from gtp_dtensor import GTPConfig, GTPStyle, parallelize_module, stats
from tests.harness import ranks
from tests.reference import build_pair


class Model(nn.Module):
    """An embedding, a linear with a bias, a norm and a module that GTP does not know; all are differentiable in x."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 48)
        self.wide = nn.Linear(48, 64)
        self.norm = nn.LayerNorm(64)
        self.mix = nn.Conv1d(64, 40, 1)

    def forward(self, x):
        h = self.norm(torch.tanh(self.wide(x + self.table(torch.arange(x.shape[-2]) % 32))))
        return self.mix(h.transpose(-1, -2))


def forward_mode(model, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, t))).tangent


TRANSFORMS = {
    "grad": lambda model, x, t: grad(lambda x: (model(x) * 0.1).pow(2).sum())(x),
    "grad of grad": lambda model, x, t: grad(lambda x: grad(lambda x: model(x).pow(3).sum())(x).pow(2).sum())(x),
    "jvp": lambda model, x, t: jvp(model, (x,), (t,))[1],
    "jacrev": lambda model, x, t: jacrev(lambda x: model(x).sum((-1, -2)))(x),
    "vmap": lambda model, x, t: vmap(model)(x),
    "vmap of grad": lambda model, x, t: vmap(grad(lambda x: model(x).pow(2).sum()))(x),
    "forward mode": forward_mode,
}


@ranks(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_inputs(mesh, name):
    """... in training and without gradients, and weights get theirs from the graph around a transform."""
    config = GTPConfig(check_param_states=True)
    model, whole = build_pair(Model)
    parallelize_module(model, mesh, GTPStyle(config))
    transform = TRANSFORMS[name]
    x, t = torch.randn(3, 5, 48), torch.randn(3, 5, 48)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(transform(model, x, t), transform(whole, x, t), rtol=1e-5, atol=1e-6)
        ours, theirs = transform(model, x, t), transform(whole, x, t)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        ours.pow(2).mean().backward()  # the same on both ranks
        theirs.pow(2).mean().backward()
        for (fqn, param), other in zip(model.named_parameters(), whole.parameters()):
            assert (param.grad is None) == (other.grad is None), fqn
            if other.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6, msg=fqn)
        model.zero_grad()
        whole.zero_grad()
        del ours
    model(x).sum().backward()
    assert stats(model).live_lease_bytes == 0
