"""Rotations of a query or an output by a fixed matrix, in one small launch."""

import math
from dataclasses import dataclass

import torch

from realkernels.jit import tl, triton
from realkernels.kernels.pdl import launch_options, let_next_begin, wait_for_last

ROTATED_COLUMNS = 16
"""Of rotated rows, that a thread block works out."""


@triton.jit
def _rotate(
    rows, signs, rotated, unit, factor,
    HEADS: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Rows [HEADS, DIM] times signs [DIM, DIM] times factor, COLUMNS a thread block; rows x unit fit float16."""
    let_next_begin(FOLLOWED)
    head = tl.arange(0, PAD)
    depth = tl.arange(0, DIM)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = (head < HEADS)[:, None]
    matrix = tl.load(signs + depth[:, None] * DIM + column[None, :])
    wait_for_last(PDL)
    x = tl.load(rows + head[:, None] * DIM + depth[None, :], mask=own, other=0.0).to(tl.float32) * unit
    y = tl.dot(x.to(tl.float16), matrix) * factor
    tl.store(rotated + head[:, None] * DIM + column[None, :], y.to(rotated.dtype.element_ty), mask=own)


@dataclass(frozen=True, kw_only=True)
class SignRotation:
    """Rows times signs times a factor: a rotation whose entries are 0 or one magnitude, so that float16 holds them."""

    signs: torch.Tensor
    """float16 [head_dim, head_dim] of -1, 0 and 1."""
    unit: float
    """Power of two that brings rows to about the size that they are rotated to."""
    factor: float

    @staticmethod
    def of(matrix: torch.Tensor, order: torch.Tensor) -> "SignRotation | None":
        """Of a matrix [head_dim, head_dim] with its columns in this order; None where it rotates nothing."""
        if torch.equal(matrix, torch.eye(matrix.shape[0], device=matrix.device)):
            return None
        size = float(matrix.abs().max())
        unit = 2.0 ** round(math.log2(float(matrix[:, 0].norm())))
        signs = (matrix[:, order] / size).half().contiguous()
        return SignRotation(signs=signs, unit=unit, factor=size / unit)

    def run(self, rows: torch.Tensor, out: torch.Tensor, *, pdl: bool = False, followed: bool = False) -> None:
        """Of rows [heads, head_dim] into `out`; one launch. `pdl` and `followed` as in `kernels/pdl.py`."""
        heads, dim = rows.shape
        columns = min(ROTATED_COLUMNS, dim)
        _rotate[(dim // columns,)](
            rows, self.signs, out, self.unit, self.factor, HEADS=heads, PAD=max(16, triton.next_power_of_2(heads)),
            DIM=dim, COLUMNS=columns, PDL=pdl, FOLLOWED=followed, num_warps=4, **launch_options(pdl=pdl),
        )  # fmt: skip
