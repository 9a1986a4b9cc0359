"""How a weight's shard travels in few bits.

A format turns this rank's float32 rows into *parts*, tensors of bytes that are gathered row by row, and gathered parts
back into a weight. It is told what only the whole weight knows (the largest absolute values) and never sees a mesh.
Codes and scales of gathered parts are, bit for bit, those of quantizing the whole logical weight.

[Note: matrices]
    A format sees a weight as (..., rows, columns): a linear's (out, in), a stack of experts as (experts, out, in), any
    other as (dim 0, the product of the rest). Blocks lie along columns, in the view for the backward along rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

import torch
import torch.nn as nn

from ..schedule import Kind

Parts = tuple[torch.Tensor, ...]  # uint8, contiguous, each as many dims as the matrices


class Amax(Enum):
    """Over what the largest absolute value is taken."""

    MATRIX = "matrix"  # one for each matrix
    COLUMN = "column"  # one for each column of each matrix
    ROW = "row"  # one for each row of each matrix
    # Not such values but what a format makes of them for all ranks alike, one for each matrix; see WireFormat.complete.
    SCALE = "scale"
    INVERSE = "inverse"


class View(Enum):
    """Which of a format's quantizations of a weight."""

    ROWS = "rows"  # for the forward GEMM, and for whoever dequantizes
    COLUMNS = "columns"  # for the GEMM of the input gradient, where it needs one of its own


class WireFormat(ABC):
    """One weight's format.

    Attributes:
        name: what users call it.
        column_block: a block's length along columns; columns of a matrix have to be a multiple of it.
        row_block: compute shards are cut at multiples of so many rows.
        fills_rows: whether the last of these blocks may be filled up with zeros; else they have to divide the rows.
        amaxes: what :meth:`quantize` is told, in this order; MATRIX is always among them, and finds values that are
            not finite.
        has_columns: whether View.COLUMNS is made and travels.
        spans_tp: whether MATRIX is of the logical matrix; else of this rank's tensor-parallel slice of it.
    """

    name: str
    column_block = 1
    row_block = 1
    fills_rows = True
    has_columns = False
    spans_tp = True
    amaxes: tuple[Amax, ...] = (Amax.MATRIX,)

    def view_of(self, kind: Kind) -> View:
        """Which view a use of this kind reads."""
        return View.COLUMNS if self.has_columns and kind is Kind.BACKWARD else View.ROWS

    @property
    def views(self) -> tuple[View, ...]:
        return (View.ROWS, View.COLUMNS) if self.has_columns else (View.ROWS,)

    @abstractmethod
    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        """Of matrices of ``shape``, whose rows are a multiple of ``row_block``."""

    def complete(
        self, amax: dict[Amax, torch.Tensor], before: dict[Amax, torch.Tensor], owner: nn.Module
    ) -> dict[Amax, torch.Tensor]:
        """What the other methods are told of the whole weight: ``amax``, with what the format adds. Called once for each
        quantization, on every rank.

        Args:
            amax: of the whole weight.
            before: what this returned last, if the weight was not written since; else empty.
            owner: the module whose weight it is.
        """
        return amax

    @property
    def scales_like(self) -> tuple | None:
        """Equal for formats whose :meth:`scales` are; None: there are none. With scales, :meth:`quantize` is told them as
        Amax.SCALE, there is one view of one part, :meth:`quantize_many` makes it, and MATRIX is all that it asks for."""
        return None

    def scales(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Of each of a tensor of largest absolute values, float32, by itself: that is how all weights' are made at once."""
        raise NotImplementedError

    def quantize_many(self, rows: list[torch.Tensor], scales: list[torch.Tensor], codes: list[torch.Tensor]) -> None:
        """:meth:`quantize` for several weights, each into its part of ``codes``."""
        raise NotImplementedError

    @abstractmethod
    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        """Parts of all views.

        Args:
            rows: float32 (..., rows, columns), contiguous, at least one row.
            amax: float32, each (..., 1, 1), (..., 1, columns) or (..., rows, 1): of the whole weight.
        """

    @abstractmethod
    def dequantize(
        self, view: View, parts: Parts, shape: torch.Size, amax: dict[Amax, torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """The matrices, of ``shape``, in ``dtype``, that ``parts`` stand for."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``'s memory as uint8, the last dim longer where its elements are: process groups know no 8-bit floats."""
    return tensor.contiguous().view(torch.uint8)


def resized(shape: torch.Size, *last: int) -> torch.Size:
    """``shape`` with other last dims."""
    return torch.Size((*shape[: len(shape) - len(last)], *last))
