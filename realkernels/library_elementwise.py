"""What lies between the products of a dense layer: residual adds with norms, rotation, writing to the cache, gating.

On CUDA these are the fused kernels of `library_kernels.py`, as in a serving engine; elsewhere plain torch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from realkernels.library import Activations, check_rows_of, relative_error
from realkernels.shape import DenseShape

EPSILON = 1e-5
ROPE_BASE = 500_000.0


class ElementwiseOps(NamedTuple):
    """The four kernels; see `library_kernels.py` for what each does."""

    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
    append: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    gate: Callable[[torch.Tensor, torch.Tensor], None]


def _add_norm(
    branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, epsilon: float
) -> None:
    residual.add_(branch)
    normed.copy_(torch.nn.functional.rms_norm(residual, (residual.shape[1],), weight, epsilon))


def _rotate(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: int) -> None:
    half = table.shape[1] // 2
    turned = qkv[:, : heads * 2 * half].unflatten(1, (heads, 2, half))
    cosine, sine = table[positions].unsqueeze(1).split(half, dim=2)
    low, high = turned[:, :, 0].clone(), turned[:, :, 1].clone()
    turned[:, :, 0] = low * cosine - high * sine
    turned[:, :, 1] = high * cosine + low * sine


def _append(qkv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    width = keys.shape[-2] * keys.shape[-1]
    for plane, first in ((keys, qkv.shape[1] - 2 * width), (values, qkv.shape[1] - width)):
        plane.view(-1, width)[slots] = qkv[:, first : first + width]


def _gate(gate_up: torch.Tensor, gated: torch.Tensor) -> None:
    first, second = gate_up.chunk(2, dim=1)
    torch.mul(torch.nn.functional.silu(first), second, out=gated)


TORCH_OPS = ElementwiseOps(_add_norm, _rotate, _append, _gate)


def elementwise_ops(device: torch.device) -> ElementwiseOps:
    """The kernels for a device."""
    if device.type != "cuda":
        return TORCH_OPS
    from realkernels import library_kernels as fused  # noqa: PLC0415

    return ElementwiseOps(fused.add_norm, fused.rotate, fused.append, fused.gate)


def rotation_table(positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines, then sines."""
    turns = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * turns
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


# The same in float64, of a few tokens


def norm_truth(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of [tokens, hidden]."""
    scale = (total.double().square().mean(dim=1, keepdim=True) + EPSILON).rsqrt()
    return total.double() * scale * weight.double()


def rotated_truth(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] turned by their positions."""
    dim = heads.shape[2]
    turns = ROPE_BASE ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=heads.device) / dim)
    angles = (positions.double()[:, None] * turns)[:, None, :]
    low, high = heads.double().chunk(2, dim=2)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=2)


def gated_truth(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) x second half of [tokens, 2 x width]."""
    first, second = gate_up.double().chunk(2, dim=1)
    return torch.nn.functional.silu(first) * second


class LibraryElementwise:
    """All of it but the write to the cache, of several layers one after the other, on one set of activations."""

    def __init__(
        self, shape: DenseShape, *, tokens: int, layers: int, dtype: torch.dtype, device: torch.device,
        ops: ElementwiseOps | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.layers = shape, layers
        self.ops = ops or elementwise_ops(device)
        self.activations = Activations.allocate(shape, tokens, dtype, device)
        self.norms = [1 + 0.1 * torch.randn(shape.hidden, dtype=dtype, device=device) for _ in range(2 * layers)]
        self.positions = torch.arange(tokens, device=device)
        self.table = rotation_table(tokens, shape.head_dim, device)

    def run_layer(self, layer: int) -> None:
        """In a layer's order, as if its products lay between."""
        at, shape = self.activations, self.shape
        self.ops.add_norm(at.branch, at.residual, self.norms[2 * layer], at.normed, EPSILON)
        self.ops.rotate(at.qkv, self.positions, self.table, shape.query_heads + shape.kv_heads)
        self.ops.add_norm(at.branch, at.residual, self.norms[2 * layer + 1], at.normed, EPSILON)
        self.ops.gate(at.gate_up, at.gated)

    def run(self) -> None:
        """Every layer."""
        for layer in range(self.layers):
            self.run_layer(layer)

    def poison(self) -> None:
        """NaN where results go, fresh numbers where they come from."""
        self.activations.renew()
        self.activations.normed.fill_(float("nan"))
        self.activations.gated.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether every result has been written."""
        at = self.activations
        return all(bool(part.isfinite().all()) for part in (at.normed, at.gated, at.residual, at.qkv))

    def verify(self) -> float:
        """Run one layer on fresh numbers; worst relative error of some tokens against float64."""
        self.poison()
        at, shape = self.activations, self.shape
        rows = check_rows_of(at.tokens, at.qkv.device)
        turned = (shape.query_heads + shape.kv_heads) * shape.head_dim
        before = {name: getattr(at, name)[rows].clone() for name in ("branch", "residual", "qkv", "gate_up")}
        self.run_layer(0)
        total = before["residual"].double() + 2 * before["branch"].double()
        heads = before["qkv"][:, :turned].unflatten(1, (-1, shape.head_dim))
        rotated = rotated_truth(heads, self.positions[rows]).flatten(1)
        kept = before["qkv"][:, turned:]
        return max(
            relative_error(at.residual[rows], total),
            relative_error(at.normed[rows], norm_truth(total, self.norms[1])),
            relative_error(at.qkv[rows], torch.cat([rotated, kept.double()], dim=1)),
            relative_error(at.gated[rows], gated_truth(before["gate_up"])),
        )


class LibraryAppend:
    """K and V of new tokens written to the planes of several layers, each token to a slot of its own."""

    def __init__(
        self, shape: DenseShape, *, tokens: int, layers: int, dtype: torch.dtype, device: torch.device,
        ops: ElementwiseOps | None = None,
    ) -> None:  # fmt: skip
        self.layers = layers
        self.ops = ops or elementwise_ops(device)
        self.qkv = torch.randn(tokens, shape.qkv_width, dtype=dtype, device=device)
        self.slots = torch.randperm(tokens, device=device)
        size = (tokens, shape.kv_heads, shape.head_dim)
        self.planes = [torch.empty(2, *size, dtype=dtype, device=device) for _ in range(layers)]

    def run(self) -> None:
        """Every layer."""
        for keys, values in self.planes:
            self.ops.append(self.qkv, self.slots, keys, values)

    def poison(self) -> None:
        """NaN in every plane, fresh keys and values."""
        self.qkv.normal_()
        for plane in self.planes:
            plane.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether every slot has been written."""
        return all(bool(plane.isfinite().all()) for plane in self.planes)

    def verify(self) -> float:
        """Run on fresh numbers; a copy is exact, so the error is 0 or infinite."""
        self.poison()
        self.run()
        width = self.planes[0].shape[2] * self.planes[0].shape[3]
        wanted = self.qkv[:, -2 * width :].unflatten(1, (2, width)).transpose(0, 1)
        right = all(torch.equal(plane.flatten(2)[:, self.slots], wanted) for plane in self.planes)
        return 0.0 if right else float("inf")
