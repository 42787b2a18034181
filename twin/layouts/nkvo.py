"""nkvo: the cache in host memory, where the processor attends to it (`--no-kv-offload`); weights stay on devices."""

from twin.ask.case import Case
from twin.layouts.layout import CacheLayout, Placement
from twin.layouts.vram import LAYOUT as VRAM
from twin.operations.counts import FULL_BYTES
from twin.operations.ops import Op, OpGraph, Step
from twin.operations.processor import chained, on_processor, visited


class NoKvOffload(CacheLayout):
    """K and V on the host; queries go there, what attention makes of them comes back."""

    name = "nkvo"
    summary = "the cache in host memory, where the processor attends to it"
    host_planes = True

    def placement(self, case: Case) -> Placement:
        """As in VRAM, on the host."""
        placed = VRAM.placement(case)
        return Placement(vram_bytes=placed.host_bytes, host_bytes=placed.vram_bytes)

    def working_bytes(self, case: Case) -> dict[str, int]:
        """None on devices."""
        del case
        return {}

    def decode_ops(self, case: Case, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        """Queries down, attention by the processor, outputs up."""
        return self._visiting(case, VRAM.decode_ops(case, step, device, first=first), step, device, first=first)

    def bucket_tokens(self, case: Case) -> int:
        """The history is read in place."""
        return VRAM.bucket_tokens(case)

    def prefill_graphs(self, case: Case, chunk: Step, device: int, *, times: int) -> tuple[OpGraph, ...]:
        """The same for all tokens of a chunk."""
        graphs = VRAM.prefill_graphs(case, chunk, device, times=times)
        visiting = (self._visiting(case, graph.ops, chunk, device, first=0) for graph in graphs)
        return tuple(OpGraph(ops=ops, times=times) for ops in visiting)

    def _visiting(self, case: Case, ops: tuple[Op, ...], step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        row = step.q_tokens * step.batch * case.attention.query_heads * FULL_BYTES
        down, up = row * case.attention.head_dim, row * case.attention.value_width
        processed = tuple(on_processor(case, op) for op in ops)
        return chained(visited(processed, device, down_bytes=down, up_bytes=up), first=first)


LAYOUT = NoKvOffload()
