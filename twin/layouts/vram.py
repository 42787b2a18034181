"""vram: every plane of the cache in device memory, read in place."""

from twin.ask.case import Case
from twin.layouts.layout import CacheLayout, Placement
from twin.operations import attention, tensor_cache
from twin.operations.counts import block_run_bytes, is_sparse, selected_tokens
from twin.operations.ops import Op, OpGraph, Step


class Vram(CacheLayout):
    """K, V, raw and pooled indexer keys in VRAM."""

    name = "vram"
    summary = "the whole cache in VRAM"

    def placement(self, case: Case) -> Placement:
        """K, V, the raw key, and a pooled key every `ratio` tokens."""
        ratio = case.indexer.ratio if case.indexer else 1
        pooled = case.index_key_bytes // ratio if ratio > 1 else 0
        per_token = case.plane_bytes + case.index_key_bytes + pooled
        return Placement(vram_bytes=per_token, host_bytes=0)

    def working_bytes(self, case: Case) -> dict[str, int]:
        """What a chunk's history is dequantised into, where it is; else nothing beyond the engine's workspace."""
        if case.rules.tensor_cache is not None:
            return tensor_cache.working_bytes(case)
        return {"prefill scratch": attention.prefill_scratch_bytes(case)} if attention.dequantises_history(case) else {}

    def decode_ops(self, case: Case, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        """Append, select when the context is long, read what was selected; without an indexer read everything."""
        if case.rules.tensor_cache is not None:
            return tensor_cache.decode_ops(case, step, device, first=first)
        if case.indexer is None and case.backend:
            return (attention.decode_attention(case, step, device, after=(first - 1,)),)
        sparse = is_sparse(case.indexer, step.end)
        selection = attention.decode_selection(case, step, device, first=first) if sparse else ()
        read = Op(
            "kv_gather",
            device,
            kernel=case.kernel("gather_vram"),
            vram_bytes=selected_tokens(case.indexer, step.end) * case.plane_bytes * step.batch,
            run_bytes=block_run_bytes(case.indexer, case.plane_bytes) if sparse else 0,
            grain=step.end,
            after=(first + len(selection) - 1,),
        )
        return (*selection, read)

    def bucket_tokens(self, case: Case) -> int:
        """Tokens of a history that are dequantised at a time; none where the planes are read in place."""
        return case.rules.own_kernels.kv_chunk_tokens if attention.dequantises_history(case) else 0

    def prefill_graphs(self, case: Case, chunk: Step, device: int, *, times: int) -> tuple[OpGraph, ...]:
        """Dense attention below the threshold; above it selection and one call of the sparse kernel."""
        if case.rules.tensor_cache is not None:
            return (tensor_cache.prefill_graph(case, chunk, device, times=times),)
        if attention.dequantises_history(case):
            ops = attention.dequantised_ops(case, chunk, device, first=1)
            return (OpGraph(ops=(attention.append(case, chunk, device), *ops), times=times),)
        if not is_sparse(case.indexer, chunk.end):
            return (attention.dense_graph(case, chunk, device, times=times, link_bytes=0),)
        selection = attention.prefill_selection(case, chunk, device, first=0)
        end = chunk.end
        read = min(chunk.q_tokens * selected_tokens(case.indexer, end), end) * case.plane_bytes * chunk.batch
        attend = attention.sparse_attention(
            case, chunk, device, after=(1,), buckets=1, region_tokens=end, vram_bytes=read
        )
        return (OpGraph(ops=(*selection, attend), times=times),)


LAYOUT = Vram()
