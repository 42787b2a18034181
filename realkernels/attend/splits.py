"""How a paged decode attention is cut over the tokens of a sequence, and the memory its parts need.

A program owns one sequence, one KV head and one split. The number of splits follows from numbers that the host knows
(batch, heads, longest possible context), so that a launch can be captured in a CUDA graph; where a split begins and
ends follows from the length on the device, evenly, so that a short sequence uses all of its splits too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_SPLITS = 256
"""More partial results than this cost more to merge than they bring."""


@triton.jit
def tiles_of_split(length, split, splits, TILE: tl.constexpr):
    """First tile of `split` and the tile after its last; the first tiles % splits splits have one tile more."""
    tiles = (length + TILE - 1) // TILE
    each = tiles // splits
    more = tiles % splits
    first = split * each + tl.minimum(split, more)
    return first, first + each + tl.where(split < more, 1, 0)


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


def resident_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs that run at the same time on `device`; a small fixed number in the interpreter."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * per_multiprocessor


def choose_splits(*, pairs: int, max_tokens: int, tile: int, programs: int, waves: int = 1) -> int:
    """Splits a sequence, so that `pairs` (sequences x KV heads x row blocks) fill `programs` slots `waves` times.

    Never more than there are tiles in `max_tokens`, never more than MAX_SPLITS, at least 1.
    """
    if pairs < 1 or tile < 1 or programs < 1 or waves < 1 or max_tokens < 0:
        raise ValueError(f"pairs {pairs}, tile {tile}, programs {programs}, waves {waves}, max_tokens {max_tokens}")
    wanted = max(programs * waves // pairs, 1)
    return max(1, min(wanted, -(-max_tokens // tile), MAX_SPLITS))


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
        """Parts that a sequence is cut into; the kernels take their number from here."""
        return self.partial.shape[3]

    @property
    def bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(part.numel() * part.element_size() for part in (self.partial, self.statistics))

    def check(self, query: torch.Tensor) -> None:
        """ValueError unless it belongs to `query` [batch, q_tokens, query_heads, head_dim]."""
        expected = (*query.shape[:3], self.splits, query.shape[3])
        if tuple(self.partial.shape) != expected or tuple(self.statistics.shape) != (*expected[:4], 2):
            raise ValueError(f"workspace {tuple(self.partial.shape)} does not belong to a query {tuple(query.shape)}")
