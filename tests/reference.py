"""An unsharded model beside every parallel one: same logical weights, same global batch, and comparisons.

A parallel model's gtp peers each see their own slice of the global batch; the reference sees the whole batch. Every
rank runs the reference by itself, so a comparison needs no communication but that of ``full_tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gtp_dtensor import set_requires_gradient_sync

RTOL = 1e-6  # float32: some ulps of the tensor's norm, for sums in another order
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def build_pair(
    build: Callable[[], nn.Module], fill: Callable[[nn.Module], None] | None = None, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """The same model twice, from the same seed: one to shard and one to keep whole.

    Args:
        build: makes the model from the current random state.
        fill: writes other weights into it, for example :func:`fill_with_integers`.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(seed)
        model = build()
        if fill is not None:
            fill(model)
        models.append(model)
    first, second = models
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), f"{name}: the builder does not draw the same weights from the same seed"
    return first, second


def replica_options(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """What GTPStyle is told of the axes "dps" (optimizer shards) and "dpr" (copies) of ``mesh``, those it has."""
    options = {"dps": "optimizer_shard_mesh", "dpr": "replicate_mesh"}
    return {option: mesh[axis] for axis, option in options.items() if axis in mesh.mesh_dim_names}


def local_slice(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """This rank's share of a global batch: contiguous samples along dim 0, as many on every rank."""
    if batch.shape[0] % world_size:
        raise ValueError(f"a global batch of {batch.shape[0]} samples cannot be dealt evenly to {world_size} ranks")
    return batch.chunk(world_size)[rank]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the logical tensor; of a DTensor its ``full_tensor()``, which is a collective."""
    tensor = tensor.detach()
    # A full_tensor() of what is whole on every rank is the local tensor itself: later writes would show in it.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def plain_fqn(fqn: str) -> str:
    """The name without the parts that activation-checkpoint and compile wrappers add."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logical parameters by FQN. Collective for a sharded model."""
    return {plain_fqn(fqn): full(parameter) for fqn, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Logical gradients by FQN, None where there is none. Collective for a sharded model."""
    return {
        plain_fqn(fqn): None if parameter.grad is None else full(parameter.grad)
        for fqn, parameter in model.named_parameters()
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``, in float64; inf if they differ from an expected zero."""
    expected = expected.detach().double()
    error = torch.linalg.vector_norm(actual.detach().double() - expected).item()
    if error == 0.0:
        return 0.0
    norm = torch.linalg.vector_norm(expected).item()
    return error / norm if norm else float("inf")


def _pairs(actual, expected, what: str):
    """(name, actual, expected) of two mappings with the same keys, or of two tensors."""
    if not isinstance(expected, Mapping):
        return [(what, actual, expected)]
    missing = sorted(set(expected) ^ set(actual))
    if missing:
        raise AssertionError(f"{what}: only on one side: {', '.join(missing)}")
    return [(f"{what} of {name}", actual[name], expected[name]) for name in expected]


def _none_or_shape_fault(name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> str | None:
    if one is None or other is None:
        if one is other:
            return None
        return f"{name}: is {'None' if one is None else 'a tensor'}, the reference's is not"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{name}: {tuple(one.shape)} {one.dtype}, the reference's is {tuple(other.shape)} {other.dtype}"
    return None


def assert_close_to_reference(actual, expected, what: str = "value", rtol: float = RTOL) -> float:
    """Compare logical tensors with the reference's, relative to the norm of each tensor.

    Args:
        actual, expected: tensors, or mappings from FQN to tensor or None; None must meet None.
        what: what is compared, for the message ("gradient").

    Returns:
        The worst relative error.

    Raises:
        AssertionError: names every FQN beyond ``rtol``, the worst first, with its error.
    """
    faults, errors = [], [(0.0, what)]
    for name, one, other in _pairs(actual, expected, what):
        fault = _none_or_shape_fault(name, one, other)
        if fault is not None:
            faults.append(fault)
        elif one is not None:
            error = relative_error(one, other)
            # A NaN compares false with everything: it must not pass.
            errors.append((error if error == error else float("inf"), name))
    errors.sort(key=lambda item: -item[0])
    faults += [f"{name}: relative error {error:.3e}" for error, name in errors if error > rtol]
    if faults:
        raise AssertionError(f"differs from the reference by more than {rtol:g}:\n  " + "\n  ".join(faults))
    return errors[0][0]


def assert_equal_to_reference(actual, expected, what: str = "value") -> None:
    """As :func:`assert_close_to_reference`, but bit for bit; the message has the first differing element of each."""
    faults = []
    for name, one, other in _pairs(actual, expected, what):
        fault = _none_or_shape_fault(name, one, other)
        if fault is None and one is not None and not torch.equal(one, other):
            wrong = (one != other) | (one != one)
            place = tuple(wrong.nonzero()[0].tolist())
            fault = (
                f"{name}: {int(wrong.sum())} of {one.numel()} elements differ, the first at {place}: "
                f"{one[place].item():g}, the reference has {other[place].item():g}"
            )
        if fault is not None:
            faults.append(fault)
    if faults:
        raise AssertionError("not equal to the reference:\n  " + "\n  ".join(faults))


@torch.no_grad()
def fill_with_integers(model: nn.Module, low: int = -2, high: int = 2, seed: int = 0) -> None:
    """Give every parameter small integers of its own, so that sums are exact in float32 and a wrong read shows.

    Parameters of equal shape get different values. For models of linears and embeddings; norms and softmax are not
    exact whatever the weights. Call it before sharding.

    Raises:
        ValueError: two parameters are too small to be told apart.
    """
    seen: dict[tuple, list[tuple[str, torch.Tensor]]] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        for attempt in range(20):
            generator = torch.Generator().manual_seed(1000 * seed + 100_000 * attempt + number)
            values = torch.randint(low, high + 1, parameter.shape, generator=generator)
            twins = [other for other, old in seen.get(tuple(parameter.shape), []) if torch.equal(old, values)]
            if not twins and (values != 0).any():
                break
        else:
            others = ", ".join(twins) or "zero"
            raise ValueError(f"{name} {tuple(parameter.shape)} is too small to differ from {others}")
        seen.setdefault(tuple(parameter.shape), []).append((name, values))
        parameter.copy_(values)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """A loss that is a mean over samples, so that equal slices of a batch average to the whole."""
    return output.square().mean()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """ "sgd" or "adam" with settings that suit comparisons."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    if name == "adam":
        # A large eps: with torch's default, the step of an element whose gradient is all rounding noise is +-lr.
        return torch.optim.Adam(parameters, lr=1e-2, eps=1e-2)
    raise ValueError(f"optimizer {name!r}: choose 'sgd' or 'adam'")


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean of a scalar over all ranks, float64."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train_beside_reference(
    model: nn.Module,
    reference: nn.Module,
    batch: Callable[[int], torch.Tensor],
    *,
    rank: int,
    world_size: int,
    optimizer: str = "sgd",
    num_steps: int = 3,
    num_microbatches: int = 1,
    loss: Callable[[torch.Tensor], torch.Tensor] = mean_square,
    rtol: float = RTOL,
    syncs_last_only: bool = False,
) -> list[float]:
    """Train both models on the same global batches and compare outputs, losses, gradients and weights at every step.

    Args:
        model: sharded over all ranks, its gradients averaged over them.
        reference: the whole model, as built by :func:`build_pair`.
        batch: step number -> global batch; dim 0 is a multiple of ``num_microbatches * world_size``.
        optimizer: see :func:`make_optimizer`.
        loss: mean over samples.
        syncs_last_only: gradients are kept back from the replicas until the last microbatch.

    Returns:
        The reference's loss of every step.
    """
    pair = (model, reference)
    optimizers = [make_optimizer(optimizer, one) for one in pair]
    losses = []
    for step in range(num_steps):
        microbatches = batch(step).chunk(num_microbatches)
        step_loss = 0.0
        for index, whole in enumerate(microbatches):
            if syncs_last_only:
                set_requires_gradient_sync(model, index == num_microbatches - 1)
            mine, expected = model(local_slice(whole, rank, world_size)), reference(whole)
            assert_close_to_reference(mine, local_slice(expected, rank, world_size), f"output of step {step}", rtol)
            my_loss, expected_loss = loss(mine) / num_microbatches, loss(expected) / num_microbatches
            my_loss.backward()
            expected_loss.backward()
            assert_close_to_reference(
                mean_over_ranks(my_loss), expected_loss.double(), f"loss of step {step}", max(rtol, RTOL)
            )
            step_loss += expected_loss.item()
        gradients = [full_gradients(one) for one in pair]
        assert_close_to_reference(*gradients, f"gradient of step {step}", rtol)
        for one in optimizers:
            one.step()
            one.zero_grad()
        assert_close_to_reference(*map(full_parameters, pair), f"weight after step {step}", rtol)
        losses.append(step_loss)
    return losses
