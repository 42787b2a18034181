"""Exact selection of the best blocks of one token in three kernels: score with a coarse histogram, pick, finish.

Scores are sums of relu, so never negative, and the bits of a non-negative float32 order like the float itself. A
score's bin is its exponent with four bits of mantissa, clamped to 256 bins around `BIN_BASE`: the clamp costs time
where scores lie outside, never exactness. `pick` writes out everything above the bin in which the k-th score lies and
appends that bin's members to a list; `finish` selects among those by the remaining bits, then by the lower index.
"""

import torch

from realkernels.jit import tl, triton
from realkernels.shape import QsaShape

BINS = 256
SHIFT = 19
"""Bits below the four leading mantissa bits of a float32."""

BIN_BASE = (127 - 8) << 4
"""Bin 0 ends at 2^-8, bin 255 begins near 2^8."""

SCORE_TILE = 128
"""Pooled keys that a thread block scores at once."""

PICK_TILE = 1024
"""Scores that a thread block of `_pick` looks at in one go; enough of them run for one go each."""

BLOCKS_PER_SM, INTERPRETED_BLOCKS = 2, 4
"""Thread blocks that score; what was fastest on an H200, and what a test needs."""

STATE = BINS + 2
"""Histogram, number picked, number of candidates."""


@triton.jit
def _bin_of(bits, SHIFT: tl.constexpr, BASE: tl.constexpr, BINS: tl.constexpr):
    coarse = (bits >> SHIFT) - BASE
    return tl.minimum(tl.maximum(coarse, 0), BINS - 1)


@triton.jit
def _score(
    query, keys, scores, state, blocks, scale,
    HEADS: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    BINS: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    heads = tl.arange(0, PAD)
    q = tl.load(query + heads[None, :] * DIM + dims[:, None], mask=heads[None, :] < HEADS, other=0.0)  # [DIM, PAD]
    if UPCAST:
        q = q.to(tl.float32)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), tl.num_programs(0)):
        rows = tile * TILE + tl.arange(0, TILE)
        live = rows < blocks
        k = tl.load(keys + rows.to(tl.int64)[:, None] * DIM + dims[None, :], mask=live[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        products = tl.dot(k, q, input_precision="ieee")  # [TILE, PAD]
        # Not tl.maximum: a NaN must become 0, and so must -0.0, whose bits order below everything.
        score = tl.sum(tl.where(products > 0.0, products, 0.0), axis=1) * scale
        tl.store(scores + rows, score, mask=live)
        bits = score.to(tl.int32, bitcast=True)
        # Rows beyond the end score 0 and fall into bin 0, below which nothing is ever counted.
        counts += tl.histogram(_bin_of(bits, SHIFT, BASE, BINS), BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(state + bins, counts, mask=counts > 0)


@triton.jit
def _cut(counts, need, BINS: tl.constexpr):
    """Bin in which the need-th largest lies, and how many lie above it."""
    bins = tl.arange(0, BINS)
    above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)  # elements in higher bins
    cut = tl.min(tl.where(above < need, bins, BINS - 1), axis=0)
    return cut, tl.sum(tl.where(bins == cut, above, 0), axis=0)


@triton.jit
def _pick(
    scores, state, selected, candidates, blocks, topk,
    TILE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    cut, _ = _cut(tl.load(state + tl.arange(0, BINS)), topk, BINS)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), tl.num_programs(0)):
        rows = tile * TILE + tl.arange(0, TILE)
        live = rows < blocks
        bits = tl.load(scores + rows, mask=live, other=0.0).to(tl.int32, bitcast=True)
        coarse = _bin_of(bits, SHIFT, BASE, BINS)
        above = (live & (coarse > cut)).to(tl.int32)
        level = (live & (coarse == cut)).to(tl.int32)
        n_above = tl.sum(above, axis=0)
        if n_above > 0:
            first = tl.atomic_add(state + BINS, n_above)
            tl.store(selected + first + tl.cumsum(above, axis=0) - 1, rows, mask=above > 0)
        n_level = tl.sum(level, axis=0)
        if n_level > 0:
            first = tl.atomic_add(state + BINS + 1, n_level)
            tl.store(candidates + first + tl.cumsum(level, axis=0) - 1, rows, mask=level > 0)


@triton.jit
def _count_digit(
    scores, candidates, count, prefix, value,
    LOW: tl.constexpr, WIDTH: tl.constexpr, BY_INDEX: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Histogram of the digit of WIDTH bits from bit LOW on, among candidates whose higher digits equal `prefix`."""
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        live = at < count
        index = tl.load(candidates + at, mask=live, other=0)
        bits = tl.load(scores + index, mask=live, other=0.0).to(tl.int32, bitcast=True)
        if BY_INDEX:
            key = 0x7FFFFFFF - index  # the lower index is the larger key
            live = live & (bits == value)
        else:
            key = bits
        live = live & ((key >> (LOW + WIDTH)) == prefix)
        digit = (key >> LOW) & ((1 << WIDTH) - 1)
        # Dead lanes are counted in bin 0 and taken out again: tl.histogram has no mask on all versions.
        dead = tl.sum((live == 0).to(tl.int32), axis=0)
        counts += tl.histogram(tl.where(live, digit, 0), BINS)
        counts -= tl.where(tl.arange(0, BINS) == 0, dead, 0)
    return counts


@triton.jit
def _limit(
    scores, candidates, count, left, value, BY_INDEX: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The left-th largest key among candidates, how many of its equals are still wanted, and how many there are.

    A key is a score's bits; BY_INDEX, of candidates whose bits are `value`, the index, the lower the larger. Its 31
    bits are digits of 7, 8, 8 and 8, the most significant first.
    """
    key = 0
    ties = 0
    for number in tl.static_range(4):
        counts = _count_digit(
            scores, candidates, count, key, value, 24 - 8 * number, 7 if number == 0 else 8, BY_INDEX, BINS, TILE
        )
        digit, above = _cut(counts, left, BINS)
        if number == 3:
            ties = tl.sum(tl.where(tl.arange(0, BINS) == digit, counts, 0), axis=0)
        key = (key << 8) | digit
        left -= above
    return key, left, ties


@triton.jit
def _finish(
    scores, state, selected, candidates, topk,
    TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One thread block: the best candidates by value, then by lower index; leaves the state zeroed for reuse."""
    _, count_above = _cut(tl.load(state + tl.arange(0, BINS)), topk, BINS)
    count = tl.load(state + BINS + 1)
    need = tl.minimum(topk - count_above, count)
    value, left, ties = _limit(scores, candidates, count, need, 0, False, BINS, TILE)
    lowest_key = 0
    if ties > left:  # the lowest index that still counts among equals: only where not all of them are wanted
        lowest_key, _, _ = _limit(scores, candidates, count, left, value, True, BINS, TILE)
    first = count_above
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        live = at < count
        index = tl.load(candidates + at, mask=live, other=0)
        bits = tl.load(scores + index, mask=live, other=0.0).to(tl.int32, bitcast=True)
        wanted = live & ((bits > value) | ((bits == value) & (0x7FFFFFFF - index >= lowest_key)))
        taken = wanted.to(tl.int32)
        tl.store(selected + first + tl.cumsum(taken, axis=0) - 1, index, mask=wanted)
        first += tl.sum(taken, axis=0)
    bins = tl.arange(0, BINS)
    tl.store(state + bins, tl.zeros([BINS], dtype=tl.int32))
    tl.store(state + BINS, 0)
    tl.store(state + BINS + 1, 0)


class Selection:
    """Exact selection for contexts of up to `most_blocks` blocks; its scratch belongs to one stream."""

    def __init__(self, shape: QsaShape, *, most_blocks: int, device: torch.device) -> None:
        thread_blocks = INTERPRETED_BLOCKS
        if device.type == "cuda":
            thread_blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self.shape, self._thread_blocks = shape, min(thread_blocks, triton.cdiv(most_blocks, SCORE_TILE))
        self._scores = torch.empty(most_blocks, dtype=torch.float32, device=device)
        self._candidates = torch.empty(most_blocks, dtype=torch.int32, device=device)
        self._state = torch.zeros(STATE, dtype=torch.int32, device=device)
        """Zero between uses."""

    def run(self, index_query: torch.Tensor, pooled_keys: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Write the indices of the best `topk` blocks into `selected` (int32 [topk], any order) -> float32 scores.

        index_query [index_heads, index_dim] and pooled_keys [blocks, index_dim], fp16 or bf16, contiguous, blocks >=
        topk. The larger score wins, among equals the lower index. A product that is NaN counts as 0, one that is
        infinite or beyond float32 wins over every finite one. Nothing synchronises: the three launches can be captured
        in a CUDA graph. ValueError for fewer blocks than are selected, or more than there is scratch for.
        """
        shape, (blocks, dim) = self.shape, pooled_keys.shape
        if blocks < shape.topk:
            raise ValueError(f"{blocks} blocks are fewer than the {shape.topk} to select: such a context is read whole")
        if blocks > self._scores.shape[0]:
            raise ValueError(f"{blocks} blocks do not fit buffers for {self._scores.shape[0]}")
        _score[(self._thread_blocks,)](
            index_query, pooled_keys, self._scores, self._state, blocks, dim**-0.5,
            HEADS=shape.index_heads, PAD=max(16, triton.next_power_of_2(shape.index_heads)), DIM=dim, TILE=SCORE_TILE,
            BINS=BINS, SHIFT=SHIFT, BASE=BIN_BASE, UPCAST=index_query.device.type == "cpu", num_warps=4, num_stages=3,
        )  # fmt: skip
        _pick[(min(triton.cdiv(blocks, PICK_TILE), 4 * self._thread_blocks),)](
            self._scores, self._state, selected, self._candidates, blocks, shape.topk,
            TILE=PICK_TILE, BINS=BINS, SHIFT=SHIFT, BASE=BIN_BASE, num_warps=4,
        )  # fmt: skip
        _finish[(1,)](
            self._scores, self._state, selected, self._candidates, shape.topk, TILE=1024, BINS=BINS, num_warps=8
        )
        return self._scores[:blocks]
