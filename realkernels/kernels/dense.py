"""Triton kernels of a dense layer between its matrix products, fused and launched as serving engines do it.

An engine adds and normalises in one kernel, rotates queries and keys in place in a second, writes K and V to the cache
in a third and gates in a fourth. Each reads its operands once; `DenseShape` counts the same elements.
"""

import torch

from realkernels.jit import tl, triton

GATE_TILE = 1024


@triton.jit
def _add_norm(
    branch, residual, weight, normed, epsilon, WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, PAD)
    live = lane < WIDTH
    total = tl.load(residual + row + lane, mask=live, other=0.0).to(tl.float32)
    total += tl.load(branch + row + lane, mask=live, other=0.0).to(tl.float32)
    tl.store(residual + row + lane, total.to(residual.dtype.element_ty), mask=live)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / WIDTH + epsilon)
    scaled = total * scale * tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
    tl.store(normed + row + lane, scaled.to(normed.dtype.element_ty), mask=live)


@triton.jit
def _rotate(
    qkv, positions, table, STRIDE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = table + tl.load(positions + token) * 2 * HALF + tl.arange(0, HALF)
    cosine, sine = tl.load(angle)[None, :], tl.load(angle + HALF)[None, :]
    head = tl.arange(0, HEADS_PAD)[:, None]
    live = head < HEADS
    at = qkv + token * STRIDE + head * 2 * HALF + tl.arange(0, HALF)[None, :]
    low = tl.load(at, mask=live, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    tl.store(at, (low * cosine - high * sine).to(qkv.dtype.element_ty), mask=live)
    tl.store(at + HALF, (high * cosine + low * sine).to(qkv.dtype.element_ty), mask=live)


@triton.jit
def _append(
    qkv, slots, keys, values, STRIDE: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token) * WIDTH
    lane = tl.arange(0, PAD)
    live = lane < WIDTH
    source = qkv + token * STRIDE + FIRST + lane
    tl.store(keys + slot + lane, tl.load(source, mask=live), mask=live)
    tl.store(values + slot + lane, tl.load(source + WIDTH, mask=live), mask=live)


@triton.jit
def _gate(gate_up, gated, WIDTH: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = lane < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + lane, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + lane, mask=live, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(gated + token * WIDTH + lane, made.to(gated.dtype.element_ty), mask=live)


def add_norm(
    branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, epsilon: float
) -> None:
    """Add `branch` to `residual` [tokens, hidden] in place, and write the sum's RMS norm to `normed`."""
    tokens, width = residual.shape
    _add_norm[(tokens,)](
        branch, residual, weight, normed, epsilon, WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=8
    )


def rotate(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of qkv [tokens, width] in place; table [positions, head_dim] is cos, then sin."""
    half = table.shape[1] // 2
    _rotate[(qkv.shape[0],)](
        qkv, positions, table, STRIDE=qkv.shape[1], HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), HALF=half,
        num_warps=4,
    )  # fmt: skip


def append(qkv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Copy each token's K and V, the last columns of qkv, to its slot of the planes [.., kv_heads, head_dim]."""
    width = keys.shape[-2] * keys.shape[-1]
    stride = qkv.shape[1]
    _append[(qkv.shape[0],)](
        qkv, slots, keys, values, STRIDE=stride, FIRST=stride - 2 * width, WIDTH=width,
        PAD=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def gate(gate_up: torch.Tensor, gated: torch.Tensor) -> None:
    """silu(first half of the columns) x second half."""
    tokens, width = gated.shape
    _gate[(tokens, triton.cdiv(width, GATE_TILE))](gate_up, gated, WIDTH=width, TILE=GATE_TILE, num_warps=4)
