"""How a decode attention kernel is launched, and what its arguments must look like."""

from dataclasses import dataclass

import torch
import triton

from realkernels.attend.splits import Workspace, choose_splits, resident_programs

PROLOGUE_TILES = 3


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Tiles of one kernel: `tile` tokens x `sets` of `rows` query rows (heads of a KV head x tokens) a program."""

    tile: int
    rows: int
    num_warps: int
    stages: int
    """Software pipelining of the loop over tiles, as Triton counts it."""
    per_multiprocessor: int
    """Programs that fit a multiprocessor (registers and shared memory), for the number of splits."""
    wide: bool
    """Keep the sum of p per token lane until the end: spares a reduction, costs tile x rows registers."""
    sets: int = 1
    """Products of `rows` rows each that share a converted tile; `attend_plain` takes only 1."""
    across: bool = False
    """Query rows are the columns of products (`attend_columns`), in one set of `rows`."""
    prologue_tiles: int = PROLOGUE_TILES
    """What a program's beginning and end weigh, in tiles, where its number of splits is chosen."""
    evict: str = ""
    """Hint for the cache's lines in L2; "evict_first" keeps what is read once from pushing other data out."""

    def blocks(self, query_rows: int) -> int:
        """Programs that share a tile's bytes because one cannot hold all rows."""
        return -(-query_rows // (self.rows * self.sets))

    def splits(self, *, batch: int, kv_heads: int, query_rows: int, max_tokens: int, device: torch.device) -> int:
        """Splits that fill the device once."""
        return choose_splits(
            pairs=batch * kv_heads * self.blocks(query_rows), max_tokens=max_tokens, tile=self.tile,
            programs=resident_programs(device, self.per_multiprocessor),
        )  # fmt: skip

    def workspace(self, query: torch.Tensor, *, kv_heads: int, max_tokens: int) -> Workspace:
        """Memory for a query [batch, q_tokens, query_heads, head_dim] over caches of up to `max_tokens` tokens."""
        batch, q_tokens, query_heads, head_dim = query.shape
        splits = self.splits(
            batch=batch, kv_heads=kv_heads, query_rows=query_heads // kv_heads * q_tokens, max_tokens=max_tokens,
            device=query.device,
        )  # fmt: skip
        return Workspace.allocate(
            batch=batch, q_tokens=q_tokens, query_heads=query_heads, head_dim=head_dim, splits=splits,
            device=query.device,
        )  # fmt: skip


def tile_tokens(head_dim: int, *, of_256: int) -> int:
    """Tokens of a tile with the bytes of one of `of_256` tokens at head_dim 256; at least 16, at most 128."""
    return max(16, min(of_256 * 256 // head_dim, 128))


def is_large(device: torch.device) -> bool:
    """Whether a multiprocessor has the registers and 228 KiB of shared memory of compute capability 9.0 and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def multiplies_registers(device: torch.device) -> bool:
    """Whether four warps together multiply 64 rows from registers, as of compute capability 9 (assumed off devices)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


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
    def query_rows(self) -> int:
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
