"""Decode attention over a quantised cache in plain torch, for any codec: what a computer without a GPU runs.

Split over the tokens as the device kernels are: a block is dequantised once for all query heads and tokens of a
sequence, each split keeps its own maximum, sum and weighted values, and the splits are combined at the end.
"""

import torch

from realkernels.caches.paged import PagedCache

BLOCK_TOKENS = 1024


def attend_blocks(
    cache: PagedCache, sequences: range, query: torch.Tensor, output: torch.Tensor, *, block: int = BLOCK_TOKENS
) -> None:
    """Attention of the newest tokens of `sequences` in the stored basis, into `output`.

    query and output float32 [batch, q_tokens, query_heads, head_dim]; query i of q sees the first tokens - q + i +
    1 tokens.
    """
    shape, tokens = cache.shape, query.shape[1]
    for row, sequence in enumerate(sequences):
        wanted = query[row].unflatten(1, (shape.kv_heads, shape.group)).permute(1, 0, 2, 3)  # [H, q, group, D]
        wanted = wanted.flatten(1, 2) * shape.head_dim**-0.5
        sees = (cache.tokens - tokens + 1 + torch.arange(tokens)).repeat_interleave(shape.group)
        parts = [
            _split(cache, wanted, sequence, first, sees, min(first + block, cache.tokens))
            for first in range(0, cache.tokens, block)
        ]
        top, mass, total = (torch.stack(each) for each in zip(*parts, strict=True))  # [splits, H, rows, 1 or D]
        weight = (top - top.amax(dim=0)).exp()
        combined = (weight * total).sum(dim=0) / (weight * mass).sum(dim=0)
        output[row] = combined.unflatten(1, (tokens, shape.group)).permute(1, 0, 2, 3).flatten(1, 2)


def _split(
    cache: PagedCache, wanted: torch.Tensor, sequence: int, first: int, sees: torch.Tensor, last: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, sum of weights [H, rows, 1], weighted values [H, rows, D]) of the tokens `first` to `last` - 1."""
    keys, values = cache.codec.dequantise(cache.planes, cache.slots(sequence, first, last), checked=False)
    scores = wanted @ keys.permute(1, 2, 0)
    if last > int(sees[0]):
        scores = scores.masked_fill(torch.arange(first, last) >= sees[:, None], float("-inf"))
    top = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)  # a split that a row sees nothing of weighs nothing
    weights = (scores - top).exp()
    return top, weights.sum(dim=-1, keepdim=True), weights @ values.transpose(0, 1)
