"""Muon for parameters of any mesh, and AdamW for the rest.

[Note: what Muon sees]
    Matrices are orthogonalized whole and logical: rows and columns that tensor parallelism, GTP and optimizer shards cut
    apart are joined, padding never exists, and the experts of a stack are matrices of their own. Matrices that one
    parameter joins along its rows (q, k and v; gate and up) are told apart by a declared layout. See [Note: homes] in
    matrices.py for where it happens. All that is elementwise (momentum, weight decay, the update) happens where the
    parameter lies, and the arithmetic is that of ``torch.optim.Muon``: results are bit for bit those of a single process
    with the same gradients.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from ..plan import clean_fqn
from ..transport.collective import group_of_ranks
from .clip import local_of
from .matrices import Matrix, Round, deal_out, matrices_of, ranks_of, rounds_of

HOME_RANK, DUPLICATED = ALGORITHMS = ("home_rank", "duplicated")
ORIGINAL, MATCH_RMS = SCALES = ("original", "match_rms_adamw")
_MOST_ELEMENTS = 64 << 20  # that a rank computes with in a round
_OUTPUT_NAMES = ("output", "lm_head")
# Their weights may have three dims too, and are no stack of experts then.
_ADAMW_MODULES = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
_COMPUTE_DTYPE = torch.bfloat16  # of Newton-Schulz, and so of what travels

RowLayout = tuple[int, ...]
"""Rows of the matrices that a parameter joins, as often as they fit: (512, 128, 128) for q, k and v of each of several
groups of heads; (rows of gate, rows of up)."""


def scale_of(scale: str, num_rows: int, num_columns: int) -> float:
    """What the learning rate of a matrix is multiplied by.

    "original": sqrt(max(1, rows / columns)) (Jordan, "Muon: An optimizer for hidden layers in neural networks");
    "match_rms_adamw": 0.2 sqrt(max(rows, columns)), so that updates have AdamW's usual root mean square (Liu et al., "Muon is
    Scalable for LLM Training", arXiv 2502.16982).
    """
    if scale == ORIGINAL:
        return math.sqrt(max(1, num_rows / num_columns))
    return 0.2 * math.sqrt(max(num_rows, num_columns))


def muon_param_groups(
    model: nn.Module, *, adamw: Iterable[str] = (), row_layouts: Mapping[str, Sequence[int]] | None = None
) -> list[dict[str, Any]]:
    """Groups for :class:`Muon` of the parameters of ``model`` that are trained.

    Muon gets matrices (parameters of two dims, and stacks of experts of three); AdamW gets the rest, embeddings,
    convolutions, and modules called ``output`` or ``lm_head``. Call it after GTPStyle.

    Args:
        adamw: FQN patterns of further parameters for AdamW.
        row_layouts: FQN pattern -> rows of the matrices that a parameter joins; see :data:`RowLayout`.

    Raises:
        ValueError: a pattern that matches no parameter, or a layout that does not fit its parameter.
    """
    patterns, layouts = list(adamw), dict(row_layouts or {})
    for_adamw, by_layout, unmatched = [], {}, {*patterns, *layouts}
    of_others = {id(p) for m in model.modules() if isinstance(m, _ADAMW_MODULES) for p in m.parameters(recurse=False)}
    for name, param in model.named_parameters():
        name = clean_fqn(name)
        matching = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        layout = next((pattern for pattern in layouts if fnmatch.fnmatchcase(name, pattern)), None)
        unmatched -= {*matching, layout}
        if not param.requires_grad:
            continue
        is_output = name.split(".")[-2:-1] and name.split(".")[-2] in _OUTPUT_NAMES
        if matching or is_output or id(param) in of_others or param.dim() not in (2, 3):
            for_adamw.append((name, param))
            continue
        rows = () if layout is None else tuple(layouts[layout])
        if rows and (min(rows) < 1 or param.shape[-2] % sum(rows)):
            raise ValueError(
                f"muon_param_groups(row_layouts=...): {rows} of pattern '{layout}' does not divide the {param.shape[-2]} rows of "
                f"{name} of shape {tuple(param.shape)}"
            )
        by_layout.setdefault(rows, []).append((name, param))
    if unmatched:
        raise ValueError(f"muon_param_groups: no parameter matches {', '.join(sorted(map(repr, unmatched)))}")
    groups = [{"params": params, "uses_muon": True, "row_layout": rows} for rows, params in by_layout.items()]
    return [*groups, *([{"params": for_adamw, "uses_muon": False}] if for_adamw else [])]


class Muon(Optimizer):
    """Muon for the groups with ``uses_muon``, AdamW for the others; see :func:`muon_param_groups`.

    Args:
        params: groups, or parameters of two or three dims (DTensors of any mesh, or plain).
        lr, weight_decay: of both; decay is decoupled.
        momentum, nesterov, ns_coefficients, eps, ns_steps: as in ``torch.optim.Muon``.
        adjust_lr_fn: how updates of Muon are scaled; see :func:`scale_of`.
        betas, adamw_eps: of AdamW.
        algorithm: "home_rank", each matrix is orthogonalized on one rank; "duplicated", on all that hold a piece: more
            computation, one all-to-all fewer, the same bits.
        row_layout: of parameters without groups; see :data:`RowLayout`.

    Raises:
        ValueError: a setting or parameter that it cannot serve.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = ORIGINAL,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        algorithm: str = HOME_RANK,
        row_layout: Sequence[int] = (),
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"Muon(algorithm={algorithm!r}): choose one of {', '.join(ALGORITHMS)}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": tuple(betas),
            "adamw_eps": adamw_eps,
            "uses_muon": True,
            "row_layout": tuple(row_layout),
        }
        self.algorithm = algorithm
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._plans: dict[tuple, list[Round]] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``.

        Raises:
            ValueError: as the constructor does; the group is not added then.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        self._plans = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "algorithm": self.algorithm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict() calls it too: communicators stay
        self._groups, self._plans = self.__dict__.get("_groups", {}), {}

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One step. Collective over the ranks of each mesh: the same parameters need a gradient on all of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not group["uses_muon"]:
                self._adamw(group, params)
                continue
            by_ranks: dict[tuple[int, ...], list[torch.Tensor]] = {}
            for param in params:
                by_ranks.setdefault(ranks_of(param), []).append(param)
            for ranks, those in by_ranks.items():
                self._muon(group, those, ranks)
        return loss

    # ---- AdamW

    def _adamw(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        states = [self.state[param] for param in params]
        # It is elementwise, and DTensors of different meshes do not go into one call.
        adamw(
            [local_of(param) for param in params],
            [_local_grad(param) for param in params],
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )

    # ---- Muon

    def _muon(self, group: dict[str, Any], params: list[torch.Tensor], ranks: tuple[int, ...]) -> None:
        lr = float(group["lr"])
        momentum, process_group = group["momentum"], self._group_of(ranks)
        grads = {param: _local_grad(param) for param in params}
        for param, grad in grads.items():
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=grad.dtype)
            local_of(self.state[param]["momentum_buffer"]).lerp_(grad, 1 - momentum)
            local_of(param).mul_(1 - lr * group["weight_decay"])

        def piece_of(matrix: Matrix) -> torch.Tensor:
            buffer = matrix.local_piece(local_of(self.state[matrix.param]["momentum_buffer"]))
            if not group["nesterov"]:
                return buffer
            return matrix.local_piece(grads[matrix.param]).lerp(buffer, momentum)

        def apply(done: Round) -> None:
            for matrix, update in done.take():
                local = matrix.local_piece(local_of(matrix.param))
                _apply(local, update, matrix, group, lr, self._row(matrix, process_group))

        rounds = self._rounds(group, params, process_group)
        before = None
        for number, current in enumerate(rounds):
            if number == 0:
                current.send(piece_of)
            if number + 1 < len(rounds):
                rounds[number + 1].send(piece_of)
            current.compute(lambda matrix, whole: _orthogonal(whole, group))
            current.give_back()
            if before is not None:
                apply(before)
            before = current
        if before is not None:
            apply(before)

    @staticmethod
    def _row(matrix: Matrix, process_group: dist.ProcessGroup | None) -> int:
        """The first row of this rank's piece."""
        return matrix.regions[0 if process_group is None else process_group.rank()].row

    def _group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if not ranks:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = group_of_ranks(ranks, "muon")
        return self._groups[ranks]

    def _rounds(
        self, group: dict[str, Any], params: list[torch.Tensor], process_group: dist.ProcessGroup | None
    ) -> list[Round]:
        # Where a parameter lies is known by its object: load_state_dict writes into it.
        key = tuple(map(id, params))
        if key not in self._plans:
            steps = group["ns_steps"]
            matrices = matrices_of(params, process_group, lambda *shape: _cost(*shape, group["row_layout"], steps))
            size = 1 if process_group is None else process_group.size()
            if self.algorithm == HOME_RANK and size > 1:
                deal_out(matrices, size)
            device = local_of(params[0]).device
            self._plans[key] = [
                Round(taken, process_group, device, _COMPUTE_DTYPE)
                for taken in rounds_of(matrices, size, _MOST_ELEMENTS)
            ]
        return self._plans[key]


def _check(group: dict[str, Any]) -> None:
    _check_numbers(group)
    if group["adjust_lr_fn"] not in SCALES:
        raise ValueError(f"Muon(adjust_lr_fn={group['adjust_lr_fn']!r}): choose one of {', '.join(SCALES)}")
    if not group["uses_muon"]:
        return
    names = group.get("param_names") or [f"parameter {number}" for number in range(len(group["params"]))]
    for name, param in zip(names, group["params"]):
        if param.dim() not in (2, 3):
            raise ValueError(
                f"Muon: {name} of shape {tuple(param.shape)} is no matrix and no stack of them: give it to AdamW "
                "(muon_param_groups(model), or a group with uses_muon=False)"
            )
        if isinstance(param, DTensor) and any(placement.is_partial() for placement in param.placements):
            raise ValueError(f"Muon: {name} has placements {param.placements}: a parameter cannot be a partial sum")
        layout = group["row_layout"]
        if layout and (min(layout) < 1 or param.shape[-2] % sum(layout)):
            raise ValueError(
                f"Muon: {name} of shape {tuple(param.shape)}: its row layout {layout} does not divide "
                f"{param.shape[-2]} rows"
            )


def _check_numbers(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps", "adamw_eps"):
        if group[name] < 0:
            raise ValueError(f"Muon({name}={group[name]}): must not be negative")
    for name, value in (("momentum", group["momentum"]), *(("betas", beta) for beta in group["betas"])):
        if not 0 <= value < 1:
            raise ValueError(f"Muon({name}={value}): must be from 0 to below 1")
    if not 1 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon(ns_steps={group['ns_steps']}): must be from 1 to 99")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"Muon(ns_coefficients={group['ns_coefficients']}): three numbers, of x, x^3 and x^5")


def _local_grad(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient, cut as ``param`` is. Tensor parallelism alone may leave a partial sum, or a whole one."""
    grad = param.grad
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_of(grad)


# ---- one matrix


def _parts(num_rows: int, layout: RowLayout) -> list[torch.Tensor]:
    """The rows of each matrix that is joined."""
    rows = torch.arange(num_rows).view(-1, sum(layout))
    return [part.reshape(-1) for part in rows.split(list(layout), 1)]


def _cost(num_rows: int, num_columns: int, layout: RowLayout, num_steps: int) -> float:
    """Multiplications and additions of Newton-Schulz."""
    shapes = [(len(rows), num_columns) for rows in _parts(num_rows, layout)] if layout else [(num_rows, num_columns)]
    total = 0.0
    for shape in shapes:
        small, large = sorted(shape)
        total += num_steps * (4.0 * small * small * large + 2.0 * small**3)
    return total


def _orthogonal(whole: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    if not group["row_layout"]:
        return newton_schulz(whole, *settings)
    result = torch.empty_like(whole)
    for rows in _parts(whole.shape[0], group["row_layout"]):
        rows = rows.to(whole.device)
        result[rows] = newton_schulz(whole[rows], *settings)
    return result


def _apply(
    local: torch.Tensor, update: torch.Tensor, matrix: Matrix, group: dict[str, Any], lr: float, first_row: int
) -> None:
    scale, layout, (num_rows, num_columns) = group["adjust_lr_fn"], group["row_layout"], matrix.shape
    if not layout:
        local.add_(update, alpha=-lr * scale_of(scale, num_rows, num_columns))
        return
    of_row = torch.empty(num_rows)
    for rows in _parts(num_rows, layout):
        of_row[rows] = -lr * scale_of(scale, len(rows), num_columns)
    of_row = of_row[first_row : first_row + len(local)].to(local.device)
    local.addcmul_(update.to(local.dtype), of_row.to(local.dtype).unsqueeze(1))
