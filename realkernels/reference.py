"""What every kernel must agree with: the algorithm in float64, as plain as it can be written.

Sources: exllamav3 `modules/qsa_indexer.py` for pooling, scoring and selection (rope and norms of the projections belong
to the model, not to the cache, and are left to the caller).
"""

import torch

from realkernels.shape import QsaShape


def block_scores(index_query: torch.Tensor, pooled_keys: torch.Tensor) -> torch.Tensor:
    """Sum over heads of relu(q . k) / sqrt(dim). [heads, dim], [blocks, dim] -> [blocks]; a NaN product counts as 0."""
    products = index_query.double() @ pooled_keys.double().T  # [heads, blocks]
    positive: torch.Tensor = torch.where(products > 0, products, 0.0)
    return positive.sum(dim=0) / index_query.shape[-1] ** 0.5


def select_blocks(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Indices of the `topk` largest scores, ascending; among equals the lower index wins. [blocks] -> [topk]."""
    count = min(topk, scores.shape[0])
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    return order.sort().values


def selected_tokens(blocks: torch.Tensor, end: int, ratio: int) -> torch.Tensor:
    """Tokens of the selected blocks and of the open tail of a context of `end` tokens. [blocks] -> [tokens]."""
    offsets = torch.arange(ratio, device=blocks.device)
    chosen = (blocks[:, None] * ratio + offsets).flatten()
    tail = torch.arange(end // ratio * ratio, end, device=blocks.device)
    return torch.cat([chosen, tail])


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention of one token. query [heads, dim], K and V [tokens, kv_heads, dim] -> [heads, dim]."""
    heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.double().reshape(kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("hgd,thd->hgt", grouped, keys.double()) / dim**0.5
    weights = scores.softmax(dim=-1)
    return torch.einsum("hgt,thd->hgd", weights, values.double()).reshape(heads, dim)


def sparse_attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, end: int, shape: QsaShape
) -> torch.Tensor:
    """Attention of the token at position `end` - 1 over the selected blocks and the tail -> [heads, dim]."""
    tokens = selected_tokens(blocks, end, shape.ratio)
    return attend(query, keys[tokens], values[tokens])
