"""Sparse attention of a whole prefill chunk: every row over its own selection, in place or bucket by bucket.

Staged, the history is cut into buckets; each is copied into a buffer in device memory once, all rows attend to what
they selected in it, and a running softmax carries over to the next bucket. With two buffers the copy of one bucket runs
on a second stream beside the kernel of the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from realkernels.kernels.gather import LOG2E
from realkernels.rows import bucket_bounds, select_rows, whole_bounds
from realkernels.shape import QsaShape

__all__ = ["PrefillBuffers", "Staging", "attend_bucket", "attend_in_place", "bucket_bounds", "select_rows"]


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


@dataclass(frozen=True, kw_only=True)
class PrefillBuffers:
    """What the rows of a chunk carry from bucket to bucket."""

    accumulator: torch.Tensor
    """float32 [rows, query_heads, head_dim]."""
    statistics: torch.Tensor
    """float32 [rows, query_heads, 2]."""

    @staticmethod
    def allocate(rows: int, shape: QsaShape, device: torch.device) -> "PrefillBuffers":
        """Buffers on `device`."""
        return PrefillBuffers(
            accumulator=torch.empty(rows, shape.query_heads, shape.head_dim, dtype=torch.float32, device=device),
            statistics=torch.empty(rows, shape.query_heads, 2, dtype=torch.float32, device=device),
        )


def attend_bucket(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selection: torch.Tensor,
    bounds: torch.Tensor,
    bucket: int,
    bucket_start: int,
    past: int,
    output: torch.Tensor,
    buffers: PrefillBuffers | None,
    shape: QsaShape,
    *,
    tile: int = 32,
    num_warps: int = 4,
) -> None:
    """All rows over what they selected in one bucket, whose first token is `bucket_start` and lies at keys[0].

    query and output [rows, query_heads, head_dim]; keys and values [bucket tokens, kv_heads, head_dim]. The first
    bucket starts the running softmax, the last one writes `output`; `buffers` may be None where there is only one. The
    lanes of tokens that a row did not select weigh nothing whatever lies there, NaN included. Indices are trusted: see
    `bounds.check_rows`.
    """
    rows, buckets = query.shape[0], bounds.shape[1] - 1
    if buffers is None and buckets > 1:
        raise ValueError(f"{buckets} buckets need buffers for the running softmax")
    accumulator = output if buffers is None else buffers.accumulator
    statistics = output if buffers is None else buffers.statistics
    _attend_rows[(shape.kv_heads, rows)](
        query, keys, values, selection, bounds, accumulator, statistics, output, past, bucket, bucket_start,
        LOG2E * shape.head_dim**-0.5,
        LIST=selection.shape[1], BUCKETS=buckets, RATIO=shape.ratio, GROUP=shape.group,
        PAD=max(16, triton.next_power_of_2(shape.group)), KV_HEADS=shape.kv_heads, DIM=shape.head_dim, TILE=tile,
        FIRST=bucket == 0, LAST=bucket == buckets - 1, UPCAST=query.device.type == "cpu",
        num_warps=num_warps, num_stages=2,
    )  # fmt: skip


def attend_in_place(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selection: torch.Tensor,
    past: int,
    output: torch.Tensor,
    shape: QsaShape,
    *,
    tile: int = 32,
    num_warps: int = 4,
) -> None:
    """Every row gathers its own selection from the planes, wherever they lie: VRAM, or host memory token by token."""
    attend_bucket(
        query, keys, values, selection, whole_bounds(selection), 0, 0, past, output, None, shape,
        tile=tile, num_warps=num_warps,
    )  # fmt: skip


class Staging:
    """Buffers in device memory through which host planes are read, bucket by bucket.

    `copies`: "serial" copies and computes on one stream through one buffer, as the published engine does; "overlapped"
    copies on a stream of its own into the buffer that is not being read.
    """

    def __init__(
        self, *, bucket_tokens: int, shape: QsaShape, dtype: torch.dtype, device: torch.device,
        copies: Literal["serial", "overlapped"], tile: int = 32, num_warps: int = 4,
    ) -> None:  # fmt: skip
        if bucket_tokens % shape.ratio:
            raise ValueError(f"bucket of {bucket_tokens} tokens is not a multiple of {shape.ratio}")
        self.bucket_tokens, self.shape, self.device = bucket_tokens, shape, device
        self.tile, self.num_warps = tile, num_warps
        self.overlapped = copies == "overlapped" and device.type == "cuda"
        size = (bucket_tokens, shape.kv_heads, shape.head_dim)
        self.buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = [
            (torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device))
            for _ in range(2 if copies == "overlapped" else 1)
        ]
        self.copy_stream = torch.cuda.Stream(device) if self.overlapped else None

    def buckets(self, tokens: int) -> int:
        """Buckets that so many tokens take."""
        return -(-tokens // self.bucket_tokens)

    def attend(
        self, query: torch.Tensor, host_keys: torch.Tensor, host_values: torch.Tensor, selection: torch.Tensor,
        past: int, output: torch.Tensor, buffers: PrefillBuffers,
    ) -> int:  # fmt: skip
        """Staged attention of a chunk -> bytes copied. host planes [>= past + rows, kv_heads, head_dim] on the host.

        Whole pages of the caller are copied if the planes are cut to whole pages.
        """
        tokens = host_keys.shape[0]
        buckets = self.buckets(tokens)
        bounds = bucket_bounds(selection, self.bucket_tokens // self.shape.ratio, buckets)
        copied: list[torch.cuda.Event] = [torch.cuda.Event() for _ in self.buffers] if self.overlapped else []
        read: list[torch.cuda.Event] = [torch.cuda.Event() for _ in self.buffers] if self.overlapped else []
        if self.copy_stream is not None:
            self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        moved = 0
        for bucket in range(buckets):
            which = bucket % len(self.buffers)
            keys, values = self.buffers[which]
            first = bucket * self.bucket_tokens
            part = slice(first, min(first + self.bucket_tokens, tokens))
            count = part.stop - part.start
            with torch.cuda.stream(self.copy_stream):  # no effect where there is none
                if self.copy_stream is not None and bucket >= len(self.buffers):
                    self.copy_stream.wait_event(read[which])
                keys[:count].copy_(host_keys[part], non_blocking=True)
                values[:count].copy_(host_values[part], non_blocking=True)
                if self.copy_stream is not None:
                    copied[which].record()
            if self.copy_stream is not None:
                torch.cuda.current_stream(self.device).wait_event(copied[which])
            attend_bucket(
                query, keys, values, selection, bounds, bucket, first, past, output, buffers, self.shape,
                tile=self.tile, num_warps=self.num_warps,
            )  # fmt: skip
            if self.copy_stream is not None:
                read[which].record()
            moved += 2 * count * keys[0].numel() * keys.element_size()
        return moved
