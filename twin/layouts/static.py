"""static: planes of the longest request in VRAM, taken at once and written in place."""

from twin.ask.case import Case
from twin.layouts.layout import CacheLayout, Placement
from twin.operations import tensor_cache
from twin.operations.ops import Op, OpGraph, Step


class Static(CacheLayout):
    """As where planes grow, without the copies: each pass writes its tokens and reads the planes to their end."""

    name = "static"
    summary = "the whole cache in VRAM, taken at once for the longest request"
    heads_only = True

    def placement(self, case: Case) -> Placement:
        """K and V."""
        return Placement(vram_bytes=case.plane_bytes, host_bytes=0)

    def working_bytes(self, case: Case) -> dict[str, int]:
        """Planes up to the longest request, beyond the context that is asked about."""
        longest = case.question.max_model_tokens or case.question.ctx_tokens
        layers = sum(count for mixer, count in case.model.caches.items() if not mixer.reach)
        spare = max(0, longest - case.question.ctx_tokens)
        return {"unused planes": spare * case.plane_bytes * layers * case.question.batch}

    def decode_ops(self, case: Case, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        """Write the new token, read the planes."""
        return tensor_cache.decode_ops(case, step, device, first=first, grows=False)

    def bucket_tokens(self, _case: Case) -> int:
        """None: planes are read in place."""
        return 0

    def prefill_graphs(self, case: Case, chunk: Step, device: int, *, times: int) -> tuple[OpGraph, ...]:
        """Write the chunk, attend to the planes."""
        return (tensor_cache.prefill_graph(case, chunk, device, times=times, grows=False),)


LAYOUT = Static()
