"""Pooling as a Triton kernel: raw keys are read where they lie, in VRAM or over the link."""

import torch
import triton
import triton.language as tl


@triton.jit
def _pool(
    raw_keys, pooled_keys, first, stop, scale,
    RATIO: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = first + tl.program_id(0) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIM_PAD)
    live = (block < stop)[:, None] & (dims < DIM)[None, :]
    total = tl.zeros([TILE, DIM_PAD], dtype=tl.float32)
    for index in tl.static_range(RATIO):  # in the order of the tokens, as the torch path does
        token = block.to(tl.int64) * RATIO + index
        total += tl.load(raw_keys + token[:, None] * DIM + dims[None, :], mask=live, other=0.0).to(tl.float32)
    mean = (total * scale).to(pooled_keys.dtype.element_ty)
    tl.store(pooled_keys + block.to(tl.int64)[:, None] * DIM + dims[None, :], mean, mask=live)


def pool_blocks_on_device(raw_keys: torch.Tensor, pooled_keys: torch.Tensor, blocks: range, ratio: int) -> None:
    """What `pooling.pool_blocks` does, bit for bit, in one launch."""
    if not blocks:
        return
    tile, dim = 16, raw_keys.shape[1]
    _pool[(triton.cdiv(len(blocks), tile),)](
        raw_keys, pooled_keys, blocks.start, blocks.stop, 1.0 / ratio,
        RATIO=ratio, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), TILE=tile, num_warps=4,
    )  # fmt: skip
