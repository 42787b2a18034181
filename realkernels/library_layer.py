"""Whole dense layers: products, attention and what lies between, chained as a model chains them."""

import torch

from realkernels import reference
from realkernels.library import (
    Activations,
    LayerWeights,
    check_rows_of,
    flash,
    has_lower_right,
    product,
    random_weights,
    relative_error,
)
from realkernels.library_elementwise import (
    EPSILON,
    ElementwiseOps,
    elementwise_ops,
    gated_truth,
    norm_truth,
    rotated_truth,
    rotation_table,
)
from realkernels.shape import DenseShape

MATRIX_PIECE = 1024
"""Rows of a matrix that are widened to float64 at once."""


class LibraryLayers:
    """`rows` new tokens of each of `batch` sequences, `past` tokens long, through several layers."""

    def __init__(
        self, shape: DenseShape, *, layers: int, batch: int, rows: int, past: int, dtype: torch.dtype,
        device: torch.device, ops: ElementwiseOps | None = None,
    ) -> None:  # fmt: skip
        if past and rows > 1 and not has_lower_right(device):
            raise ValueError(f"no chunk of {rows} rows after {past} tokens here: flash attention cannot mask it")
        self.shape, self.batch, self.rows, self.past = shape, batch, rows, past
        self.ops = ops or elementwise_ops(device)
        self.weights = [random_weights(shape, dtype, device) for _ in range(layers)]
        self.activations = Activations.allocate(shape, batch * rows, dtype, device)
        size = (2, batch, past + rows, shape.kv_heads, shape.head_dim)
        self.caches = [torch.randn(size, dtype=dtype, device=device) for _ in range(layers)]
        self.table = rotation_table(past + rows, shape.head_dim, device)
        self.positions = torch.arange(past, past + rows, device=device).repeat(batch)
        sequence = torch.arange(batch, device=device).repeat_interleave(rows)
        self.slots = sequence * (past + rows) + self.positions

    def run_layer(self, weights: LayerWeights, cache: torch.Tensor) -> None:
        """One layer: from the branch before it to its own."""
        at, ops, shape = self.activations, self.ops, self.shape
        ops.add_norm(at.branch, at.residual, weights.norm_in, at.normed, EPSILON)
        product(at.normed, weights.qkv, at.qkv)
        ops.rotate(at.qkv, self.positions, self.table, shape.query_heads + shape.kv_heads)
        ops.append(at.qkv, self.slots, cache[0], cache[1])
        queries = at.qkv.view(self.batch, self.rows, -1)[..., : shape.query_width]
        heads = queries.unflatten(2, (shape.query_heads, shape.head_dim))
        attended = flash(heads, cache[0], cache[1], causal=self.rows > 1)
        product(attended.reshape(at.tokens, -1), weights.output, at.branch)
        ops.add_norm(at.branch, at.residual, weights.norm_mid, at.normed, EPSILON)
        product(at.normed, weights.gate_up, at.gate_up)
        ops.gate(at.gate_up, at.gated)
        product(at.gated, weights.down, at.branch)

    def run(self) -> None:
        """Every layer."""
        for weights, cache in zip(self.weights, self.caches, strict=True):
            self.run_layer(weights, cache)

    def poison(self) -> None:
        """NaN where results go, fresh numbers where they come from."""
        at = self.activations
        at.renew()
        for part in (at.normed, at.qkv, at.attended, at.gate_up, at.gated):
            part.fill_(float("nan"))
        for cache in self.caches:
            cache[:, :, self.past :] = float("nan")

    def finite(self) -> bool:
        """Whether results and slots have been written."""
        written = all(bool(cache[:, :, self.past :].isfinite().all()) for cache in self.caches)
        return written and bool(self.activations.branch.isfinite().all())

    def verify(self) -> float:
        """Run the last layer on fresh numbers; worst relative error of some tokens' branches against float64."""
        self.poison()
        at = self.activations
        rows = check_rows_of(at.tokens, at.branch.device)
        total = at.branch[rows].double() + at.residual[rows].double()
        self.run_layer(self.weights[-1], self.caches[-1])
        return relative_error(at.branch[rows], self._truth(total, rows))

    def _truth(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The layer in float64, from the sum of branch and residual on; what its keys and values must be is checked."""
        shape, weights = self.shape, self.weights[-1]
        keys, values = self.caches[-1]
        made = _wide(norm_truth(total, weights.norm_in), weights.qkv)
        heads = made.unflatten(1, (-1, shape.head_dim))
        turning = shape.query_heads + shape.kv_heads
        turned = rotated_truth(heads[:, :turning], self.positions[rows])
        own = torch.stack([turned[:, shape.query_heads :], heads[:, turning:]])
        cached = self.caches[-1].flatten(1, 2)[:, self.slots[rows]]
        if relative_error(cached, own) > 0.1:  # misplaced, not misrounded
            return torch.full_like(total, float("nan"))
        attended = []
        for index, token in enumerate(rows.tolist()):
            sequence, row = divmod(token, self.rows)
            seen = self.past + row + 1
            attended.append(
                reference.attend(turned[index, : shape.query_heads], keys[sequence, :seen], values[sequence, :seen])
            )
        total = total + _wide(torch.stack(attended).flatten(1), weights.output)
        gate_up = _wide(norm_truth(total, weights.norm_mid), weights.gate_up)
        return _wide(gated_truth(gate_up), weights.down)


def _wide(inputs: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """A product in float64, a piece of the matrix at a time."""
    return torch.cat([inputs @ piece.double().T for piece in matrix.split(MATRIX_PIECE)], dim=1)
