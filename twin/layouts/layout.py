"""What every placement must answer. A placement is one file: only rulebooks of engines name it elsewhere."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from twin.operations.ops import Op, OpGraph, Step

if TYPE_CHECKING:
    from twin.ask.case import Case


class Placement(Struct, frozen=True, kw_only=True):
    """Bytes of cache per token of context, in each memory tier."""

    vram_bytes: int
    host_bytes: int


class CacheLayout(Protocol):
    """One placement. Everything is per attention layer; `device` is where that layer runs.

    What one does not say of itself is as where all planes lie in VRAM and are read in place.
    """

    name: str
    summary: str
    options: frozenset[str] = frozenset()  # fields of a Question that only mean something under this placement
    host_planes: bool = False  # whether K and V lie in host memory
    heads_only: bool = False  # whether only caches of keys and values of heads can be asked for
    needs_indexer: bool = False  # whether only models with sparse attention can be asked for it

    def assumptions(self, _case: "Case") -> tuple[str, ...]:
        """Keys of the assumptions that a case leans on because of this placement."""
        return ()

    def placement(self, case: "Case") -> Placement:
        """Bytes per token of one attention layer."""
        ...

    def working_bytes(self, case: "Case") -> dict[str, int]:
        """Buffers on each device that runs attention layers, by name."""
        ...

    def decode_ops(self, case: "Case", step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        """Ops of one decode step, a chain; `first` is the index in the graph of the first of them."""
        ...

    def breaks(self, _case: "Case") -> Iterable[int]:
        """Contexts after which a prefill chunk is read in another way, beside the engine's sparse threshold."""
        return ()

    def bucket_tokens(self, case: "Case") -> int:
        """Tokens after which a chunk's history takes one more bucket; 0 where there are none."""
        ...

    def buckets(self, _case: "Case", _chunk: Step) -> int:
        """Parts in which a sparse chunk's history crosses the link; 0 where it is read in place."""
        return 0

    def prefill_graphs(self, case: "Case", chunk: Step, device: int, *, times: int) -> tuple[OpGraph, ...]:
        """Op graphs of one prefill chunk, for `times` equal layers."""
        ...
