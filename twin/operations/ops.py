"""The vocabulary of work: a Step is asked for, an Op holds one engine and carries counts, an OpGraph repeats ops."""

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from twin.operations.occupancy import FlashGrid, SplitKV


class Step(Struct, frozen=True, kw_only=True):
    """One forward pass over `q_tokens` new tokens of each of `batch` sequences that have `kv_tokens` in the cache."""

    kv_tokens: int
    q_tokens: int
    batch: int = 1
    seen_pairs: float | None = None  # pairs of one sequence where less than the whole past is seen

    @property
    def end(self) -> int:
        """Tokens of one sequence after the step."""
        return self.kv_tokens + self.q_tokens

    @property
    def pairs(self) -> float:
        """Pairs of a new token and a token that it sees under a causal mask, of one sequence."""
        if self.seen_pairs is not None:
            return self.seen_pairs
        return self.q_tokens * self.kv_tokens + self.q_tokens * (self.q_tokens + 1) / 2

    def within_window(self, window: int) -> "Step":
        """The step as attention sees it that looks `window` tokens back, the query's own included."""
        kv_tokens = min(self.kv_tokens, window - 1)
        growing = min(self.q_tokens, window - kv_tokens)  # query tokens before which there is less than a window
        pairs = growing * kv_tokens + growing * (growing + 1) / 2 + (self.q_tokens - growing) * window
        return replace(self, kv_tokens=kv_tokens, seen_pairs=pairs)

    def within_chunk(self, chunk: int) -> "Step":
        """The step as attention sees it that looks back to the last multiple of `chunk` tokens."""

        def triangles(tokens: int) -> float:  # pairs of the first so many tokens, each with those of its chunk
            whole, rest = divmod(tokens, chunk)
            return whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2

        kv_tokens = self.kv_tokens % chunk
        return replace(
            self, kv_tokens=kv_tokens, seen_pairs=triangles(kv_tokens + self.q_tokens) - triangles(kv_tokens)
        )


class Engine(StrEnum):
    """What an op occupies while it runs. Each is a first-in-first-out server, one per device (or per host)."""

    SM = "SM"
    H2D = "H2D"
    D2H = "D2H"
    HOST = "HOST"
    DISK = "DISK"
    PEER = "PEER"


PEER = "peer"
"""What a collective's kernel works over, as long as nobody has said of what kind the link between devices is."""
HOST_DEVICE = -1  # device index of HOST and DISK, which all devices share


class Op(Struct, frozen=True, gc=False):
    """A piece of work: bytes by tier, operations, and the kernel whose rates apply. Counts are per call."""

    part: str  # what it is called in a prediction: weights, kv_gather, pooled_scan, ..
    device: int
    engine: Engine = Engine.SM
    kernel: str = ""  # key of the kernel's rates: operation/implementation/format; empty for a plain copy
    calls: float = 1  # back-to-back calls, each of which pays the latency
    hops: int = 0  # further ones of a message that goes around a ring, each of which adds to its latency
    vram_bytes: float = 0
    link_bytes: float = 0
    """Bytes over the device's link to host or other devices, in the engine's direction (SM ops read from the host)."""
    host_bytes: float = 0  # bytes read from host memory or disk by HOST or DISK itself
    run_bytes: float = 0  # length of one contiguous run of link, host or disk bytes; 0 for one long run
    flops: float = 0
    dequantised_elements: float = 0  # stored elements that the kernel dequantises; 0 for plain formats
    dtype: str = "fp16"
    grain: float = 1  # the quantity that the kernel's efficiency depends on (tokens in the batch, ...)
    row_tile: int = 0  # of products with the same weights whatever `grain` is: tokens fill whole tiles of so many
    split_kv: SplitKV | None = None  # how a decode attention is split into thread blocks, where that is known
    flash_grid: FlashGrid | None = None
    """Thread blocks of a call, where the kernel's efficiency depends on how they fill a device in waves."""
    or_plain: bool = False
    """Whether a machine without the kernel's rates is charged plain reads of `run_bytes`. Its efficiency is a share of
    the link's whole rate: what short runs cost is in it."""
    after: tuple[int, ...] = ()  # ops of the same iteration, by index in the graph, that must have ended


class Carried(NamedTuple):
    """Op `op` also waits for op `earlier` of the iteration `distance` before."""

    op: int
    earlier: int
    distance: int


class OpGraph(Struct, frozen=True, kw_only=True):
    """Ops that run `iterations` times in a pipeline; the whole is done `times` times, each after the last has ended."""

    ops: tuple[Op, ...]
    iterations: int = 1
    times: int = 1
    carried: tuple[Carried, ...] = ()


Program = tuple[OpGraph, ...]  # graphs one after the other: each begins when the one before has ended on every engine
