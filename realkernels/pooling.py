"""Pooled keys follow the rows: whoever writes rows rebuilds the blocks that they touch and complete, no others.

A pooled key is the mean of its block's raw keys, summed in float32 in the order of the tokens and rounded once to the
planes' dtype (exllamav3 `modules/qsa_indexer.py`; its norm and rope belong to the model).
"""

import torch


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
