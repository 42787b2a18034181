"""Sparse attention of a prefill chunk: every token over its own selection, in place or bucket by bucket.

Selections are lists of blocks, made by plain torch on any device.
Staged, the history is divided into buckets; each is copied into a buffer in device memory once, all tokens attend to
what they selected in it, and a running softmax carries over to the next bucket. With two buffers the copy of one bucket
runs on a second stream beside the kernel of the one before.
"""

import torch

from realkernels.jit import tl, triton
from realkernels.kernels.split_kv import LOG2E
from realkernels.shape import QsaShape

TILE_TOKENS, WARPS = 32, 4
"""What was fastest on an H200."""


NO_BLOCK = 2**31 - 1
"""Fills a row's selection where the row has fewer blocks than the budget."""

SLAB_ROWS = 1024
"""Rows scored at once."""

SLAB_ELEMENTS = 2**25
"""Products held at once on the CPU: 128 MiB of float32."""


def select_rows(index_queries: torch.Tensor, pooled_keys: torch.Tensor, past: int, shape: QsaShape) -> torch.Tensor:
    """Each row's selection: its best complete blocks ascending, then its open block; int32 [rows, topk + 1].

    index_queries [rows, index_heads, index_dim], pooled_keys [>= (past + rows) // ratio, index_dim]. A row with fewer
    blocks than the budget is filled with NO_BLOCK at its end. Products are rounded to the planes' precision on a GPU,
    as the published engine does, and kept in float32 on the CPU; among equal scores any block may win. A product that
    is NaN counts as 0.
    """
    rows, heads, dim = index_queries.shape
    blocks = shape.blocks(past + rows)
    keys = pooled_keys[:blocks]
    device = index_queries.device
    slab_rows = SLAB_ROWS
    if device.type == "cpu":
        index_queries, keys = index_queries.float(), keys.float()
        slab_rows = max(1, min(slab_rows, SLAB_ELEMENTS // max(1, heads * blocks)))
    zero = keys.new_zeros(())
    out = torch.full((rows, shape.topk + 1), NO_BLOCK, dtype=torch.int32, device=device)
    ends = torch.arange(past + 1, past + rows + 1, device=device)
    for first in range(0, rows, slab_rows):
        slab = index_queries[first : first + slab_rows]
        products = (slab.reshape(-1, dim) @ keys.T).view(slab.shape[0], heads, blocks)
        scores = torch.fmax(products, zero, out=products).sum(dim=1, dtype=torch.float32)
        complete = (ends[first : first + slab_rows] // shape.ratio)[:, None]
        scores.masked_fill_(torch.arange(blocks, device=device)[None, :] >= complete, -1.0)
        best = scores.topk(min(shape.topk, blocks), dim=1, sorted=False)
        chosen = torch.where(best.values >= 0, best.indices, NO_BLOCK).to(torch.int32)
        out[first : first + slab.shape[0], : chosen.shape[1]] = chosen
    out[:, -1] = (ends // shape.ratio).to(torch.int32)
    return out.sort(dim=1).values


def bucket_bounds(selection: torch.Tensor, bucket_blocks: int, buckets: int) -> torch.Tensor:
    """Where each bucket begins and ends in each row's ascending selection; int32 [rows, buckets + 1]."""
    edges = torch.arange(buckets + 1, device=selection.device, dtype=torch.int32) * bucket_blocks
    return torch.searchsorted(selection, edges.expand(selection.shape[0], -1).contiguous(), out_int32=True)


def whole_bounds(selection: torch.Tensor) -> torch.Tensor:
    """The bounds of one bucket that holds everything: from 0 to the first NO_BLOCK; int32 [rows, 2]."""
    bounds = torch.zeros(selection.shape[0], 2, dtype=torch.int32, device=selection.device)
    bounds[:, 1] = (selection != NO_BLOCK).sum(dim=1)
    return bounds


@triton.jit
def _attend_rows(
    query, keys, values, selection, bounds, accumulator, statistics, output, past, bucket, bucket_start, scale,
    LIST: tl.constexpr, BUCKETS: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    end = past + row + 1
    lane = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    rows = tl.arange(0, PAD)
    own = rows < GROUP
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + rows
    q = tl.load(query + head[:, None] * DIM + dims[None, :], mask=own[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    if FIRST:
        top = tl.full([PAD], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([PAD], dtype=tl.float32)
        acc = tl.zeros([PAD, DIM], dtype=tl.float32)
    else:
        top = tl.load(statistics + head * 2, mask=own, other=float("-inf"))
        mass = tl.load(statistics + head * 2 + 1, mask=own, other=0.0)
        acc = tl.load(accumulator + head[:, None] * DIM + dims[None, :], mask=own[:, None], other=0.0)
    low = tl.load(bounds + row * (BUCKETS + 1) + bucket)
    high = tl.load(bounds + row * (BUCKETS + 1) + bucket + 1)
    for first in range(low, high, TILE // RATIO):
        slot = first + lane // RATIO
        block = tl.load(selection + row * LIST + slot, mask=slot < high, other=0).to(tl.int64)
        token = block * RATIO + lane % RATIO
        live = (slot < high) & (token < end)
        at = (token - bucket_start)[:, None] * (KV_HEADS * DIM) + kv_head * DIM + dims[None, :]
        k = tl.load(keys + at, mask=live[:, None], other=0.0)
        v = tl.load(values + at, mask=live[:, None], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(live[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    if LAST:
        out = acc / tl.where(own, mass, 1.0)[:, None]
        tl.store(output + head[:, None] * DIM + dims[None, :], out.to(output.dtype.element_ty), mask=own[:, None])
    else:
        tl.store(statistics + head * 2, top, mask=own)
        tl.store(statistics + head * 2 + 1, mass, mask=own)
        tl.store(accumulator + head[:, None] * DIM + dims[None, :], acc, mask=own[:, None])


class ChunkAttention:
    """Attention of chunks of `q_tokens` tokens, in place or through buckets of `bucket_tokens` (0: in place).

    `copies`: "serial" copies and computes on one stream through one buffer, as the published engine does; "overlapped"
    copies on a stream of its own into the buffer that is not being read. In place, every token gathers its own
    selection from the planes, wherever they lie: VRAM, or host memory token by token.
    """

    def __init__(
        self, shape: QsaShape, *, q_tokens: int, bucket_tokens: int, copies: str, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.bucket_tokens, self.device = shape, bucket_tokens, device
        count = 0 if not bucket_tokens else 2 if copies == "overlapped" else 1
        size = (bucket_tokens, shape.kv_heads, shape.head_dim)
        self._buffers = [tuple(torch.empty(size, dtype=dtype, device=device) for _ in "kv") for _ in range(count)]
        overlapped = count == 2 and device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(device) if overlapped else None
        rows = q_tokens * shape.query_heads if bucket_tokens else 1
        self._accumulator = torch.empty(rows, shape.head_dim, dtype=torch.float32, device=device)
        self._statistics = torch.empty(rows, 2, dtype=torch.float32, device=device)

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: torch.Tensor, past: int,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Attention of the tokens from position `past` on, into `output`.

        query and output [q_tokens, query_heads, head_dim]; keys and values [tokens, kv_heads, head_dim], of which a
        staged chunk copies all; selection ascending int32 [q_tokens, topk + 1], trusted: see `bounds.check_rows`. The
        lanes of tokens that a row did not select weigh nothing whatever lies there, NaN included.
        """
        if not self._buffers:
            self._attend(query, keys, values, selection, whole_bounds(selection), 0, past, output)
            return
        buckets = -(-keys.shape[0] // self.bucket_tokens)
        bounds = bucket_bounds(selection, self.bucket_tokens // self.shape.ratio, buckets)
        stream = self._copy_stream
        events = range(len(self._buffers) if stream is not None else 0)
        copied, read = [torch.cuda.Event() for _ in events], [torch.cuda.Event() for _ in events]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for bucket in range(buckets):
            which = bucket % len(self._buffers)
            part = slice(bucket * self.bucket_tokens, min((bucket + 1) * self.bucket_tokens, keys.shape[0]))
            with torch.cuda.stream(stream):  # no effect where there is none
                if stream is not None and bucket >= len(self._buffers):
                    stream.wait_event(read[which])
                for buffer, plane in zip(self._buffers[which], (keys, values), strict=True):
                    buffer[: part.stop - part.start].copy_(plane[part], non_blocking=True)
                if stream is not None:
                    copied[which].record()
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_event(copied[which])
            self._attend(query, *self._buffers[which], selection, bounds, bucket, past, output)
            if stream is not None:
                read[which].record()

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: torch.Tensor,
        bounds: torch.Tensor, bucket: int, past: int, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """All tokens over what they selected in one bucket, whose first token lies at keys[0]; the last writes."""
        shape, last = self.shape, bounds.shape[1] - 2
        _attend_rows[(shape.kv_heads, query.shape[0])](
            query, keys, values, selection, bounds, self._accumulator, self._statistics, output, past, bucket,
            bucket * self.bucket_tokens, LOG2E * shape.head_dim**-0.5,
            LIST=selection.shape[1], BUCKETS=last + 1, RATIO=shape.ratio, GROUP=shape.group,
            PAD=max(16, triton.next_power_of_2(shape.group)), KV_HEADS=shape.kv_heads, DIM=shape.head_dim,
            TILE=TILE_TOKENS, FIRST=bucket == 0, LAST=bucket == last, UPCAST=query.device.type == "cpu",
            num_warps=WARPS, num_stages=2,
        )  # fmt: skip
