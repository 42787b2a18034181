"""What runs where there is no GPU, in plain torch: decode and sparse attention, and what lies between dense products.

Planes stay in 16 bits, what is multiplied is widened to float32 first. Loops run over tiles that fit the caches, never
over single rows.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from realkernels import reference
from realkernels.bounds import check_blocks, check_selected
from realkernels.caches.paged import PagedCache
from realkernels.codecs.codec import Codec, Planes
from realkernels.kernels.sparse_prefill import bucket_bounds, whole_bounds
from realkernels.shape import QsaShape

SCORE_ROWS = 2048
"""Pooled keys widened at once: 1 MiB of float32."""

SLAB_ROWS = 8
"""Prefill rows gathered at once."""

DEQUANTISED_TOKENS = 1024
"""Cached tokens that decode attention dequantises at once."""


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


class Selection:
    """As `select.Selection`."""

    def __init__(self, shape: QsaShape, *, most_blocks: int, device: torch.device) -> None:
        self.shape, self._scores = shape, torch.empty(most_blocks, device=device)

    def run(self, index_query: torch.Tensor, pooled_keys: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """As `select.Selection.run`."""
        scores = self._scores[: pooled_keys.shape[0]]
        score_blocks(index_query, pooled_keys, scores)
        best_blocks(scores, selected)
        return scores


class PlaneGather:
    """As `gather.PlaneGather`."""

    def __init__(self, shape: QsaShape, *, device: torch.device) -> None:
        self.shape, self.device = shape, device

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, end: int,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `gather.PlaneGather.run`; rows not selected are never read."""
        shape, chosen = self.shape, selected.long()
        blocks = shape.blocks(end)

        def gathered(plane: torch.Tensor) -> torch.Tensor:
            whole = plane[: blocks * shape.ratio].view(blocks, -1).index_select(0, chosen)
            rows = torch.cat([whole.view(-1, shape.kv_heads, shape.head_dim), plane[blocks * shape.ratio : end]])
            return rows.float().transpose(0, 1)  # [kv_heads, tokens, head_dim]

        grouped = query.float().view(shape.kv_heads, shape.group, shape.head_dim) * shape.head_dim**-0.5
        weights = torch.bmm(grouped, gathered(keys).transpose(1, 2)).softmax(dim=-1)
        output.copy_(torch.bmm(weights, gathered(values)).view(shape.query_heads, shape.head_dim))


class InterleavedGather:
    """As `gather.InterleavedGather`, for any codec."""

    def __init__(self, codec: Codec, shape: QsaShape, *, device: torch.device) -> None:
        self.codec, self.shape, self.device = codec, shape, device

    def run(
        self, query: torch.Tensor, planes: Planes, selected: torch.Tensor, end: int, output: torch.Tensor, *,
        checked: bool = True,
    ) -> None:  # fmt: skip
        """As `gather.InterleavedGather.run`; nothing but the selected rows is read."""
        shape, codec = self.shape, self.codec
        check_blocks(planes, end=end, shape=shape)
        if checked:
            check_selected(selected, blocks=shape.blocks(end))
        slots = reference.selected_tokens(selected.long(), end, shape.ratio)
        keys, values = codec.dequantise(
            planes, slots, checked=False
        )  # [tokens, kv_heads, head_dim] in the stored basis
        grouped = codec.rotate_query(query.float()).view(shape.kv_heads, shape.group, shape.head_dim)
        scores = grouped @ keys.permute(1, 2, 0) * shape.head_dim**-0.5
        attended = torch.softmax(scores, dim=-1) @ values.transpose(0, 1)
        output.copy_(codec.rotate_output(attended.reshape(shape.query_heads, shape.head_dim)))


class ChunkAttention:
    """As `sparse_prefill.ChunkAttention`. A thread makes overlapped copies: torch lets go of the interpreter meanwhile.

    What tokens carry from bucket to bucket is float32: the largest score so far and the sum of exp(score - largest)
    [q_tokens, kv_heads, group], and the weighted sum of values [q_tokens, kv_heads, group, head_dim].
    """

    def __init__(
        self, shape: QsaShape, *, q_tokens: int, bucket_tokens: int, copies: str, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.bucket_tokens = shape, bucket_tokens
        count = 0 if not bucket_tokens else 2 if copies == "overlapped" else 1
        size = (bucket_tokens, shape.kv_heads, shape.head_dim)
        self._buffers = [(torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)) for _ in range(count)]
        carried = (q_tokens, shape.kv_heads, shape.group)
        self._top, self._mass = torch.empty(carried, device=device), torch.empty(carried, device=device)
        self._accumulator = torch.empty(*carried, shape.head_dim, device=device)

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: torch.Tensor, past: int,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `sparse_prefill.ChunkAttention.run`."""
        self._top.fill_(float("-inf"))
        self._mass.zero_()
        self._accumulator.zero_()
        if self._buffers:
            self._run_staged(query, keys, values, selection, past)
        else:
            self._attend(query, keys, values, selection, whole_bounds(selection), 0, past)
        output.copy_((self._accumulator / self._mass[..., None]).view(output.shape))

    def _run_staged(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: torch.Tensor, past: int
    ) -> None:
        buckets = -(-keys.shape[0] // self.bucket_tokens)
        bounds = bucket_bounds(selection, self.bucket_tokens // self.shape.ratio, buckets)
        if len(self._buffers) == 1:
            for bucket in range(buckets):
                self._attend(query, *self._copy(keys, values, bucket), selection, bounds, bucket, past)
            return
        with ThreadPoolExecutor(max_workers=1) as copier:
            coming: Future[tuple[torch.Tensor, torch.Tensor]] = copier.submit(self._copy, keys, values, 0)
            for bucket in range(buckets):
                buffers = coming.result()
                if bucket + 1 < buckets:  # into the other buffer, whose bucket has been attended to
                    coming = copier.submit(self._copy, keys, values, bucket + 1)
                self._attend(query, *buffers, selection, bounds, bucket, past)

    def _copy(self, keys: torch.Tensor, values: torch.Tensor, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(bucket * self.bucket_tokens, min((bucket + 1) * self.bucket_tokens, keys.shape[0]))
        buffers = self._buffers[bucket % len(self._buffers)]
        for buffer, plane in zip(buffers, (keys, values), strict=True):
            buffer[: part.stop - part.start].copy_(plane[part])
        return buffers

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: torch.Tensor,
        bounds: torch.Tensor, bucket: int, past: int,
    ) -> None:  # fmt: skip
        """All tokens over what they selected in one bucket, whose first token lies at keys[0]."""
        shape = self.shape
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
            index = torch.where(live, token - bucket * self.bucket_tokens, 0).flatten()
            for head in range(shape.kv_heads):
                k = keys[:, head].index_select(0, index).view(*live.shape, shape.head_dim).float()
                v = values[:, head].index_select(0, index).view(*live.shape, shape.head_dim).float()
                q = query[part].unflatten(1, (shape.kv_heads, shape.group))[:, head].float()
                self._combine(q * shape.head_dim**-0.5, k, v, ~live, part, head)

    def _combine(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dead: torch.Tensor, part: slice, head: int
    ) -> None:
        """Combine q [slab, group, dim] over k and v [slab, lanes, dim] with what is carried."""
        v.masked_fill_(dead[:, :, None], 0.0)  # a masked lane weighs 0, and 0 times NaN is NaN
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill_(dead[:, None, :], float("-inf"))
        top, mass, accumulator = self._top[part, head], self._mass[part, head], self._accumulator[part, head]
        new_top = torch.maximum(top, scores.amax(dim=-1))
        base = torch.where(new_top == float("-inf"), 0.0, new_top)
        weights = scores.sub_(base[..., None]).exp_()
        shrink = (top - base).exp()
        mass.mul_(shrink).add_(weights.sum(dim=-1))
        accumulator.mul_(shrink[..., None]).baddbmm_(weights, v)
        top.copy_(new_top)


def add_norm(
    branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, epsilon: float
) -> None:
    """As `dense.add_norm`."""
    residual.add_(branch)
    normed.copy_(torch.nn.functional.rms_norm(residual, (residual.shape[1],), weight, epsilon))


def rotate(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: int) -> None:
    """As `dense.rotate`."""
    half = table.shape[1] // 2
    halves = qkv[:, : heads * 2 * half].unflatten(1, (heads, 2, half))
    cosine, sine = table[positions].unsqueeze(1).split(half, dim=2)
    low, high = halves[:, :, 0].clone(), halves[:, :, 1].clone()
    halves[:, :, 0] = low * cosine - high * sine
    halves[:, :, 1] = high * cosine + low * sine


def append(qkv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As `dense.append`."""
    width = keys.shape[-2] * keys.shape[-1]
    for plane, first in ((keys, qkv.shape[1] - 2 * width), (values, qkv.shape[1] - width)):
        plane.view(-1, width)[slots] = qkv[:, first : first + width]


def gate(gate_up: torch.Tensor, gated: torch.Tensor) -> None:
    """As `dense.gate`."""
    first, second = gate_up.chunk(2, dim=1)
    torch.mul(torch.nn.functional.silu(first), second, out=gated)


def attend_blocks(cache: PagedCache, sequences: range, query: torch.Tensor, output: torch.Tensor) -> None:
    """Decode attention of the newest tokens of `sequences` in the stored basis, into `output`.

    query and output float32 [batch, q_tokens, query_heads, head_dim]; query i of q sees the first tokens - q + i +
    1 tokens. Split over the tokens as the device kernels are: a block of them is dequantised once for all query heads
    and tokens of a sequence, and the splits are combined at the end.
    """
    shape, tokens, block = cache.shape, query.shape[1], DEQUANTISED_TOKENS
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
