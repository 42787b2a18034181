"""How KVarN quantises one full tile: iterative variance normalisation, then asymmetric rounding row by row.

A tile is a matrix [rows, columns]: of K [channels, tokens], of V [tokens, channels]. Each row gets a scale and a zero,
each column a scale: x = (code x scale[row] + zero[row]) x column[column]. Source: huawei-csl/KVarN's
`sinkhorn.py`, from a description of it.

Rounding a row to codes does not change when the row is scaled, so that the rows' normalisation scales, which the
iteration needs to find the columns' ones, are already within scale[row] and zero[row]. Codes are found with the float16
values that are stored. Standard deviations are those of the population; the start, without normalisation, is one of the
states to choose from.
"""

from collections.abc import Iterator

import torch

from realkernels.formats.arithmetic import affine_codes, folded_sum, over

ITERATIONS = 8
LEAST_STD, LARGEST_STD = 1e-3, 1e3
LEAST_LOG, LARGEST_LOG = -0.3, 10.0
LARGEST_HALF = 65504.0
ROWS, COLUMNS = -1, -2
"""The axis along which a row's, a column's elements lie."""

Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes [..., rows, columns] float32; scale and zero [..., rows], column scale [..., columns], float16."""


def quantise_tile(x: torch.Tensor, bits: int) -> Quantised:
    """Tiles [..., rows, columns] of finite float32; both sizes are powers of two."""
    column = column_logs(x).exp().half()
    y = x / column.float()
    low, high = y.amin(dim=-1, keepdim=True), y.amax(dim=-1, keepdim=True)
    scale = over(high - low, 2.0**bits - 1).clamp(max=LARGEST_HALF).half()
    zero = low.clamp(-LARGEST_HALF, LARGEST_HALF).half()
    codes = affine_codes(y, scale.float(), zero.float(), bits)
    return codes, scale.squeeze(-1), zero.squeeze(-1), column.squeeze(-2)


def column_logs(x: torch.Tensor) -> torch.Tensor:
    """Logarithms [..., 1, columns] of the columns' scales in the most even of the states that 8 iterations pass."""
    (least, best), *others = states(x)
    for unevenness, column in others:
        better = unevenness < least
        least, best = torch.where(better, unevenness, least), torch.where(better, column, best)
    return best


def states(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(unevenness [..., 1, 1], logarithms of the columns' scales) as it is, then after each iteration."""
    row, column = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    yield _unevenness(x), column
    for _ in range(ITERATIONS):
        column = _step(column, _std(_scaled(x, row, column), COLUMNS))
        row = _step(row, _std(_scaled(x, row, column), ROWS))
        yield _unevenness(_scaled(x, row, column)), column


def _scaled(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return x * (-row).exp() * (-column).exp()


def _step(logs: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (logs + std.log()).clamp(LEAST_LOG, LARGEST_LOG)


def _std(x: torch.Tensor, dim: int) -> torch.Tensor:
    size = x.shape[dim]
    apart = x - folded_sum(x, dim) / size
    return (folded_sum(apart * apart, dim) / size).sqrt().clamp(LEAST_STD, LARGEST_STD)


def _unevenness(x: torch.Tensor) -> torch.Tensor:
    """Largest over least standard deviation of the columns plus that of the rows, [..., 1, 1]."""
    columns, rows = _std(x, COLUMNS), _std(x, ROWS)
    across, down = columns.amax(-1, keepdim=True) / columns.amin(-1, keepdim=True), rows.amax(-2, keepdim=True)
    return across + down / rows.amin(-2, keepdim=True)
