"""Pooled keys follow the rows: whoever writes rows rebuilds the blocks that they touch and complete, no others.

A pooled key is the mean of its block's raw keys, summed in float32 in the order of the tokens and rounded once to the
planes' dtype (exllamav3 `modules/qsa_indexer.py`; its norm and rope belong to the model).
"""

import torch

from realkernels.jit import tl, triton


def touched_blocks(past: int, rows: int, ratio: int) -> range:
    """Blocks that `rows` rows written at `past` touch and that are complete with them."""
    return range(past // ratio, (past + rows) // ratio)


def pool_blocks(raw_keys: torch.Tensor, pooled_keys: torch.Tensor, blocks: range, ratio: int) -> None:
    """Rebuild these rows of pooled_keys [blocks, index_dim] from raw_keys [tokens, index_dim], with plain torch.

    NaN and infinity stay in their own block, and selection gives a block with such a key its worst or best score.
    """
    if not blocks:
        return
    part = raw_keys[blocks.start * ratio : blocks.stop * ratio].view(len(blocks), ratio, -1)
    total = part[:, 0].float()
    for index in range(1, ratio):
        total = total + part[:, index].float()
    pooled_keys[blocks.start : blocks.stop] = (total * (1.0 / ratio)).to(pooled_keys.dtype)


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
    """What `pool_blocks` does, bit for bit, in one launch; raw keys may lie in mapped host memory."""
    if not blocks:
        return
    tile, dim = 16, raw_keys.shape[1]
    _pool[(triton.cdiv(len(blocks), tile),)](
        raw_keys, pooled_keys, blocks.start, blocks.stop, 1.0 / ratio,
        RATIO=ratio, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), TILE=tile, num_warps=4,
    )  # fmt: skip
