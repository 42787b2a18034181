"""Split-KV: how a decode attention is divided over the tokens of a sequence, its plans, and its partial results.

A thread block owns one sequence, one KV head and one split. The number of splits follows from numbers that the host
knows (batch, heads, longest context), so that a launch can be captured in a CUDA graph; where a split begins and ends
follows from the length on the device, evenly, so that a short sequence uses all of its splits too.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from realkernels.jit import tl, triton

LOG2E = 1.4426950408889634
MAX_SPLITS = 256
"""More partial results than this cost more to combine than they bring."""

PROLOGUE_TILES = 3


@triton.jit
def tiles_of_split(length, split, splits, TILE: tl.constexpr):
    """First tile of `split` and the tile after its last; the first tiles % splits splits have one tile more."""
    tiles = (length + TILE - 1) // TILE
    each = tiles // splits
    more = tiles % splits
    first = split * each + tl.minimum(split, more)
    return first, first + each + tl.where(split < more, 1, 0)


@triton.jit
def read_page(table, at, ASM: tl.constexpr):
    """Page number `at` of a table, int64; as assembly, so that the load takes no stage of Triton's pipelining."""
    if ASM:
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [(table + at).to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(table + at)
    return page.to(tl.int64)


@triton.jit
def page_of_tile(table, start, lane, length, PAGE: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr = False):
    """Page number of a tile that lies in one page (a scalar), or of each of its tokens (int64 [TILE])."""
    if PAGE % TILE == 0:
        page = read_page(table, start // PAGE, ASM)
    else:
        token = start + lane
        page = tl.load(table + token // PAGE, mask=token < length, other=0).to(tl.int64)
    return page


@triton.jit
def tile_rows(
    plane, page, start, lane, PAGE_STEP: tl.constexpr, TOKEN_STEP: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Pointers to the rows of a tile's tokens, [TILE, 1] (AXIS 1) or [1, TILE] (AXIS 0); `page` as of `page_of_tile`.

    WHOLE tiles are the many: where they lie in one page, what they have in common is added up as scalars.
    """
    if PAGE % TILE == 0 and WHOLE:
        at = plane + page * PAGE_STEP + start % PAGE * TOKEN_STEP + tl.expand_dims(lane * TOKEN_STEP, AXIS)
    else:
        row = start % PAGE + lane if PAGE % TILE == 0 else (start + lane) % PAGE
        at = plane + tl.expand_dims(page * PAGE_STEP + row * TOKEN_STEP, AXIS)
    return at


@triton.jit
def load_rows(at, inside, MASKED: tl.constexpr, AXIS: tl.constexpr):
    """Rows of tokens along 1 - AXIS, or AXIS 1: [TILE, N]; where MASKED zeros for tokens that are not inside."""
    return tl.load(at, mask=tl.expand_dims(inside, AXIS), other=0) if MASKED else tl.load(at)


@triton.jit
def store_part(
    partial, statistics, o, top, mass, batch, split, kv_head, rows, column,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, splits, DIM: tl.constexpr,
):  # fmt: skip
    """Write a split's result: o [ROWS, COLUMNS] unnormalised, top and mass [ROWS]; row r is query token r // GROUP.

    rows [ROWS] are the numbers of the rows within Q_TOKENS x GROUP (others are dropped), column [COLUMNS] the elements
    of the head that o holds. top may be -inf (nothing seen): then mass must be 0 or NaN, and o is not read.
    """
    live = rows < Q_TOKENS * GROUP
    head = kv_head * GROUP + rows % GROUP
    at = ((batch * Q_TOKENS + rows // GROUP) * HEADS + head) * splits + split
    top = tl.where(mass == mass, top, mass)  # noqa: PLR0124 - a NaN among scores leaves no mark on a maximum
    tl.store(partial + at.to(tl.int64)[:, None] * DIM + column[None, :], o, mask=live[:, None])
    tl.store(statistics + at * 2, top, mask=live)
    tl.store(statistics + at * 2 + 1, mass, mask=live)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Partial results of one attention call; reusable by the next call on the same stream."""

    partial: torch.Tensor
    """float32 [batch, q_tokens, query_heads, splits, head_dim]: sum of p v, p relative to the split's maximum."""
    statistics: torch.Tensor
    """float32 [batch, q_tokens, query_heads, splits, 2]: that maximum (base 2), and the sum of p."""

    @staticmethod
    def allocate(
        *, batch: int, q_tokens: int, query_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> "Workspace":
        """Memory for `splits` parts; what is in it does not matter."""
        rows = (batch, q_tokens, query_heads, splits)
        return Workspace(
            partial=torch.empty(*rows, head_dim, dtype=torch.float32, device=device),
            statistics=torch.empty(*rows, 2, dtype=torch.float32, device=device),
        )

    @property
    def splits(self) -> int:
        """Splits of each sequence; the kernels take their number from here."""
        return self.partial.shape[3]

    def check(self, query: torch.Tensor) -> None:
        """ValueError unless it belongs to `query` [batch, q_tokens, query_heads, head_dim]."""
        expected = (*query.shape[:3], self.splits, query.shape[3])
        if tuple(self.partial.shape) != expected or tuple(self.statistics.shape) != (*expected[:4], 2):
            raise ValueError(f"workspace {tuple(self.partial.shape)} does not belong to a query {tuple(query.shape)}")


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """What a codec chooses its plan by."""

    q_rows: int
    """Query tokens x query heads of a KV head."""
    head_dim: int
    aligned: int = 16
    """`alignment` of the planes of codes."""
    per_token: bool = True
    """Scales are kept per token, not one for a whole plane."""
    tile_tokens: int = 128
    """Of a codec that quantises tokens in tiles."""
    large: bool = True
    """A multiprocessor has the registers and 228 KiB of shared memory of compute capability 9.0 and later."""
    warpgroups: bool = True
    """Four warps together multiply 64 rows from registers, as of compute capability 9."""

    @staticmethod
    def on(device: torch.device, **sizes: int) -> "PlanCase":
        """`sizes` on this device; what is no GPU plans as compute capability 9.0."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        return PlanCase(**sizes, large=capability >= (9, 0), warpgroups=capability[0] == 9)

    def tile(self, *, of_256: int) -> int:
        """Tokens of a tile with the bytes of one of `of_256` tokens at head_dim 256; at least 16, at most 128."""
        return max(16, min(of_256 * 256 // self.head_dim, 128))


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Tiles of one kernel: `tile` tokens x `sets` of `rows` query rows a thread block."""

    tile: int
    rows: int
    num_warps: int
    stages: int
    """Software pipelining of the loop over tiles, as Triton counts it."""
    per_multiprocessor: int
    """Thread blocks that fit a multiprocessor (registers and shared memory), for the number of splits."""
    wide: bool = True
    """`attend_plain` keeps the sum of p per token lane until the end: a reduction less, tile x rows registers more."""
    sets: int = 1
    """Products of `rows` rows each that share a dequantised tile; `attend_plain` takes only 1."""
    across: bool = False
    """Of 8-bit codes: query rows are the columns of products, in one set of `rows`."""
    prologue_tiles: int = PROLOGUE_TILES
    """What a thread block's beginning and end weigh, in tiles, where the number of splits is chosen."""

    def blocks(self, q_rows: int) -> int:
        """Thread blocks that share a tile's bytes because one cannot hold all rows."""
        return -(-q_rows // (self.rows * self.sets))

    def workspace(
        self, *, batch: int, q_tokens: int, query_heads: int, kv_heads: int, head_dim: int, tokens: int,
        other_splits: int = 0, device: torch.device,
    ) -> Workspace:  # fmt: skip
        """Memory for a call over caches of `tokens` tokens; `other_splits` of a sequence read other things."""
        splits = even_splits(
            pairs=batch * kv_heads * self.blocks(query_heads // kv_heads * q_tokens), tiles=-(-tokens // self.tile),
            slots=resident_blocks(device, self.per_multiprocessor), extra=other_splits, prologue=self.prologue_tiles,
        )  # fmt: skip
        return Workspace.allocate(
            batch=batch, q_tokens=q_tokens, query_heads=query_heads, head_dim=head_dim, splits=splits, device=device
        )


def resident_blocks(device: torch.device, per_multiprocessor: int) -> int:
    """Thread blocks that run at the same time on `device`; a small fixed number in the interpreter."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * per_multiprocessor


@lru_cache(maxsize=1024)
def even_splits(*, pairs: int, tiles: int, slots: int, extra: int = 0, prologue: int = PROLOGUE_TILES) -> int:
    """Splits of each of `pairs` (sequences x KV heads x row blocks) with which `slots` blocks at a time end soonest.

    Filling the device once leaves up to half of it idle where the pairs do not divide it; more, shorter splits fill
    the last round better. `prologue`: tiles' time that a round costs beside. Of equals the fewest. `extra` splits of
    each pair, which are counted too, read other things.
    """

    def rounds(splits: int) -> int:
        return -(-pairs * (splits + extra) // slots) * (-(-tiles // splits) + prologue)

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=rounds) + extra


@dataclass(frozen=True, kw_only=True)
class Call:
    """Sizes of one call, checked."""

    batch: int
    q_tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def q_rows(self) -> int:
        """Rows of the products of one KV head."""
        return self.group * self.q_tokens


def checked_call(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, width: int,
) -> Call:  # fmt: skip
    """Sizes of a call whose planes are [pages, kv_heads, page_tokens, width]; ValueError where tensors do not fit.

    query and out [batch, q_tokens, query_heads, head_dim], page_table int32 [batch, max_pages], lengths int32 [batch].
    """
    batch, q_tokens, query_heads, head_dim = query.shape
    _, kv_heads, page_tokens, columns = keys.shape
    if tuple(out.shape) != tuple(query.shape) or columns != width or tuple(values.shape) != tuple(keys.shape):
        raise ValueError(
            f"query {tuple(query.shape)}, out {tuple(out.shape)}, keys {tuple(keys.shape)}, values "
            f"{tuple(values.shape)} do not belong together: planes are [pages, kv_heads, page_tokens, {width}]"
        )
    if query_heads % kv_heads or not 1 <= q_tokens <= 32:
        raise ValueError(f"{query_heads} query heads over {kv_heads} kv heads, {q_tokens} query tokens (1 to 32)")
    for name, size in (("head_dim", head_dim), ("page_tokens", page_tokens)):
        if size < 16 or triton.next_power_of_2(size) != size:
            raise ValueError(f"{name} is {size}: the kernels take powers of two from 16")
    if page_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError(f"page_table is {page_table.dtype} and lengths {lengths.dtype}: both must be int32")
    if page_table.shape[0] != batch or tuple(lengths.shape) != (batch,) or page_table.stride(1) != 1:
        raise ValueError(f"page_table {tuple(page_table.shape)} and lengths {tuple(lengths.shape)} for {batch} rows")
    if any(part.stride(3) != 1 for part in (query, keys, values, out)):
        raise ValueError("elements of a row of query, keys, values and out must be neighbours")
    workspace.check(query)
    return Call(
        batch=batch, q_tokens=q_tokens, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim,
        page_tokens=page_tokens,
    )  # fmt: skip


def alignment(*planes: torch.Tensor) -> int:
    """Bytes, at most 16, that every row of every plane begins at a multiple of."""
    common = 16
    for plane in planes:
        for number in (plane.data_ptr(), *(step * plane.element_size() for step in plane.stride()[:-1])):
            while number % common:
                common //= 2
    return common


# Combining the splits of a decode attention: rescale each running softmax to the largest maximum, add, divide. Partial
# results of words of codes lie as the kernels have them, all first codes of the words, then all second ones: neighbours
# are stored together, and put in their places here, where they are few.

MANY_ROWS = 1024
"""From so many on a thread block combines a whole row: several per row would wait for one another on a device."""

FEW_ROWS_BLOCK = 64


@triton.jit
def element(word, number, PER_WORD: tl.constexpr, GGML: tl.constexpr):
    """Element of the head that code `number` of words (int32) stands for; GGML has elements 16 apart in one byte."""
    return word // 8 * 32 + word % 8 * 2 + number // 2 + number % 2 * 16 if GGML else word * PER_WORD + number


@triton.jit(do_not_specialize=["splits", "q_tokens", "heads"])
def _combine_splits(
    partial, statistics, out, out_batch, out_token, out_head, splits, q_tokens, heads,
    STEP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr, GGML: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, STEP)
    top = tl.full([STEP], float("-inf"), tl.float32)
    for first in range(0, splits, STEP):
        split = first + step
        part = tl.load(statistics + (row * splits + split) * 2, mask=split < splits, other=float("-inf"))
        top = tl.maximum(top, part)
    best = tl.max(top, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.zeros([STEP], tl.float32)
    sums = tl.zeros([STEP, BLOCK], tl.float32)
    for first in range(0, splits, STEP):
        split = first + step
        at = row * splits + split
        part = tl.load(statistics + at * 2, mask=split < splits, other=float("-inf"))
        seen = part != float("-inf")  # NaN counts as seen
        o = tl.load(partial + at.to(tl.int64)[:, None] * DIM + dims[None, :], mask=seen[:, None], other=0.0)
        weight = tl.where(seen, tl.exp2(part - base), 0.0)
        mass += weight * tl.load(statistics + at * 2 + 1, mask=seen, other=0.0)
        sums += weight[:, None] * o
    total = tl.sum(mass, axis=0)
    combined = tl.sum(sums, axis=0) / tl.where(best == float("-inf"), 1.0, total)  # nothing seen: zeros
    batch = row // (q_tokens * heads)
    at = batch.to(tl.int64) * out_batch + row // heads % q_tokens * out_token + row % heads * out_head
    WORDS: tl.constexpr = DIM // PER_WORD
    tl.store(out + at + element(dims % WORDS, dims // WORDS, PER_WORD, GGML), combined.to(out.dtype.element_ty))


def combine_splits(
    workspace: Workspace, out: torch.Tensor, *, per_word: int = 1, ggml: bool = False, block: int | None = None
) -> torch.Tensor:  # fmt: skip
    """Attention from the parts in `workspace`, into `out` [batch, q_tokens, query_heads, head_dim] (last stride 1).

    A query that no split has seen a token of gets zeros. With `per_word` codes a word the parts lie code by code,
    `ggml` in that order of elements. `block`: elements of a thread block, by default few where there are few rows. One
    launch, capturable in a CUDA graph.
    """
    batch, q_tokens, heads, dim = out.shape
    workspace.check(out)
    if out.stride(3) != 1:
        raise ValueError(f"the elements of an output row must be neighbours, stride is {out.stride(3)}")
    splits = workspace.splits
    if block is None:
        block = dim if batch * q_tokens * heads >= MANY_ROWS else FEW_ROWS_BLOCK
    block = min(block, dim)
    _combine_splits[(batch * q_tokens * heads, dim // block)](
        workspace.partial, workspace.statistics, out, out.stride(0), out.stride(1), out.stride(2), splits, q_tokens,
        heads, STEP=min(triton.next_power_of_2(splits), 64), DIM=dim, BLOCK=block, PER_WORD=per_word, GGML=ggml,
        num_warps=4,
    )  # fmt: skip
    return out
