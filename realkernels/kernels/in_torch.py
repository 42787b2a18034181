"""The kernels in plain torch on the CPU: planes stay in 16 bits, whatever is multiplied is widened to float32 first.

Loops run over tiles that fit the caches, never over single rows.
"""

from dataclasses import dataclass

import torch

from realkernels.shape import QsaShape

SCORE_ROWS = 2048
"""Pooled keys widened at once: 1 MiB of float32."""

SLAB_ROWS = 8
"""Prefill rows gathered at once."""


def score_blocks(index_query: torch.Tensor, pooled_keys: torch.Tensor, scores: torch.Tensor) -> None:
    """Sum over heads of relu(q . k) / sqrt(dim) into float32 [blocks]; a NaN product counts as 0."""
    dim = index_query.shape[-1]
    query = index_query.float().T.contiguous()
    zero = torch.zeros(())
    for keys, out in zip(pooled_keys.split(SCORE_ROWS), scores.split(SCORE_ROWS), strict=True):
        products = keys.float() @ query
        torch.sum(torch.fmax(products, zero, out=products), dim=1, out=out)
    scores *= dim**-0.5


def best_blocks(scores: torch.Tensor, selected: torch.Tensor) -> None:
    """Indices of the len(selected) largest scores; among equals the lower index wins. Order is free."""
    count = selected.shape[0]
    limit = scores.topk(count, sorted=False).values.min()
    above = (scores > limit).nonzero().flatten()
    level = (scores == limit).nonzero().flatten()  # ascending
    selected[: above.shape[0]] = above
    selected[above.shape[0] :] = level[: count - above.shape[0]]


def gather_attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, end: int,
    output: torch.Tensor, shape: QsaShape,
) -> None:  # fmt: skip
    """Attention of the token at `end` - 1 over whole selected blocks and the open tail.

    query and output [query_heads, head_dim], keys and values [tokens, kv_heads, head_dim], selected int32 [topk]. A NaN
    in a selected row reaches the heads that share its KV head and nobody else; rows not selected are never read.
    """
    blocks = shape.blocks(end)
    tail = slice(blocks * shape.ratio, end)
    chosen = selected.long()

    def gathered(plane: torch.Tensor) -> torch.Tensor:
        whole = plane[: blocks * shape.ratio].view(blocks, -1).index_select(0, chosen)
        rows = torch.cat([whole.view(-1, shape.kv_heads, shape.head_dim), plane[tail]])
        return rows.float().transpose(0, 1)  # [kv_heads, tokens, head_dim]

    grouped = query.float().view(shape.kv_heads, shape.group, shape.head_dim) * shape.head_dim**-0.5
    weights = torch.bmm(grouped, gathered(keys).transpose(1, 2)).softmax(dim=-1)
    output.copy_(torch.bmm(weights, gathered(values)).view(shape.query_heads, shape.head_dim))


@dataclass(frozen=True, kw_only=True)
class RunningSoftmax:
    """What prefill rows carry from bucket to bucket, all float32."""

    top: torch.Tensor
    """[rows, kv_heads, group]: largest score so far."""
    mass: torch.Tensor
    """[rows, kv_heads, group]: sum of exp(score - top)."""
    accumulator: torch.Tensor
    """[rows, kv_heads, group, head_dim]."""

    @staticmethod
    def allocate(rows: int, shape: QsaShape) -> "RunningSoftmax":
        """Room for `rows` rows; `reset` before use."""
        size = (rows, shape.kv_heads, shape.group)
        return RunningSoftmax(
            top=torch.empty(size), mass=torch.empty(size), accumulator=torch.empty(*size, shape.head_dim)
        )

    def reset(self) -> None:
        """Nothing seen yet."""
        self.top.fill_(float("-inf"))
        self.mass.zero_()
        self.accumulator.zero_()

    def write(self, output: torch.Tensor) -> None:
        """Divide into output [rows, query_heads, head_dim]."""
        output.copy_((self.accumulator / self.mass[..., None]).view(output.shape))


def attend_bucket(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: torch.Tensor, bounds: torch.Tensor,
    carried: RunningSoftmax, *, bucket: int, bucket_start: int, past: int, shape: QsaShape,
) -> None:  # fmt: skip
    """All rows over what they selected in one bucket, whose first token is `bucket_start` and lies at keys[0].

    query [rows, query_heads, head_dim], selection ascending int32 [rows, topk + 1], bounds int32 [rows, buckets + 1].
    """
    for first in range(0, query.shape[0], SLAB_ROWS):
        part = slice(first, min(first + SLAB_ROWS, query.shape[0]))
        low, high = bounds[part, bucket, None], bounds[part, bucket + 1, None]
        width = int((high - low).max())
        if width == 0:
            continue
        slot = low + torch.arange(width)
        block = selection[part].gather(1, slot.clamp(max=selection.shape[1] - 1).long()).long()
        token = (block[:, :, None] * shape.ratio + torch.arange(shape.ratio)).flatten(1)  # [slab, lanes]
        ends = torch.arange(past + part.start + 1, past + part.stop + 1)[:, None]
        live = (slot < high).repeat_interleave(shape.ratio, dim=1) & (token < ends)
        index = torch.where(live, token - bucket_start, 0).flatten()
        dead = ~live
        for head in range(shape.kv_heads):
            k = keys[:, head].index_select(0, index).view(*live.shape, shape.head_dim).float()
            v = values[:, head].index_select(0, index).view(*live.shape, shape.head_dim).float()
            v.masked_fill_(dead[:, :, None], 0.0)  # a masked lane weighs 0, and 0 times NaN is NaN
            q = query[part].unflatten(1, (shape.kv_heads, shape.group))[:, head].float()
            _fold(q * shape.head_dim**-0.5, k, v, dead, carried, part, head)


def _fold(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dead: torch.Tensor,
    carried: RunningSoftmax,
    part: slice,
    head: int,
) -> None:
    """Fold q [slab, group, dim] over k and v [slab, lanes, dim] into the running softmax."""
    scores = torch.bmm(q, k.transpose(1, 2)).masked_fill_(dead[:, None, :], float("-inf"))
    top, mass, accumulator = carried.top[part, head], carried.mass[part, head], carried.accumulator[part, head]
    new_top = torch.maximum(top, scores.amax(dim=-1))
    base = torch.where(new_top == float("-inf"), 0.0, new_top)
    weights = scores.sub_(base[..., None]).exp_()
    shrink = (top - base).exp()
    mass.mul_(shrink).add_(weights.sum(dim=-1))
    accumulator.mul_(shrink[..., None]).baddbmm_(weights, v)
    top.copy_(new_top)
