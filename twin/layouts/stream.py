"""stream: planes on the host, brought over the link a layer ahead of the layer that reads them.

While one layer computes, the planes of the next come; what a layer has read goes back whole, in the order of its own
kernels. So a layer lasts as long as the longer of the two: its planes' way to the device, or its kernels and their way
back. Windows are read where they lie, in VRAM. Source: transformers 5.24, `cache_utils.py` (`Cache.update`, `prefetch`,
`offload`, `CacheLayerMixin.offload`).
"""

from twin.ask.case import Case
from twin.layouts.layout import CacheLayout, Placement
from twin.models.mixers import Attention
from twin.operations import tensor_cache
from twin.operations.ops import Engine, Op, OpGraph, Step

RESIDENT = 2  # layers whose planes are on the device beside those that are being joined: the one read, the next


class Stream(CacheLayout):
    """Planes of all layers without a window on the host."""

    name = "stream"
    summary = "K and V in host RAM, brought to the GPU a layer ahead"
    options = frozenset({"host_pages"})
    host_planes = True
    heads_only = True

    def assumptions(self, _case: Case) -> tuple[str, ...]:
        """Page tables of registered memory."""
        return ("A9",)

    def placement(self, case: Case) -> Placement:
        """K and V on the host."""
        return Placement(vram_bytes=0, host_bytes=case.plane_bytes)

    def working_bytes(self, case: Case) -> dict[str, int]:
        """The planes of the layer that is read and of the next, and what joining takes."""
        planes = RESIDENT * case.plane_bytes * case.question.ctx_tokens * case.question.batch
        return {"planes in use": planes} | tensor_cache.working_bytes(case)

    def decode_ops(self, case: Case, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        """Join, read and send back in a row; the next layer's planes come beside all of it."""
        kernels = tensor_cache.decode_ops(case, step, device, first=first)
        if _stays(case):
            return kernels
        back = self._back(case, step, device, after=first + len(kernels) - 1)
        return (*kernels, back, *self._ahead(case, step, device))

    def bucket_tokens(self, _case: Case) -> int:
        """None: a layer's planes come whole."""
        return 0

    def prefill_graphs(self, case: Case, chunk: Step, device: int, *, times: int) -> tuple[OpGraph, ...]:
        """The same for a chunk; before the first there is nothing to bring."""
        graph = tensor_cache.prefill_graph(case, chunk, device, times=times)
        if _stays(case):
            return (graph,)
        back = self._back(case, chunk, device, after=len(graph.ops) - 1)
        return (OpGraph(ops=(*graph.ops, back, *self._ahead(case, chunk, device)), times=times),)

    def _back(self, case: Case, step: Step, device: int, *, after: int) -> Op:
        moved = step.end * case.plane_bytes * step.batch
        return Op("kv_write", device, engine=Engine.D2H, link_bytes=moved, after=(after,))

    def _ahead(self, case: Case, step: Step, device: int) -> tuple[Op, ...]:
        moved = step.kv_tokens * case.plane_bytes * step.batch
        return (Op("kv_copy", device, engine=Engine.H2D, link_bytes=moved),) if moved else ()


def _stays(case: Case) -> bool:
    """Whether these layers' planes stay on the device."""
    return isinstance(case.mixer, Attention) and bool(case.mixer.reach)


LAYOUT = Stream()
