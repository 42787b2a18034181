"""offload: K, V and raw indexer keys in registered host memory, pooled keys in VRAM.

Decode reads the selected blocks straight over the link (zero-copy). A prefill chunk would read nearly the whole history
once per query token; staged, it copies the history bucket by bucket into a VRAM buffer, to which all query tokens
attend. Interleaved blocks (`OwnKernelRules.interleaved_formats`) are read by decode steps alone: no kernel stages them
or gathers them for many query tokens, so that a prefill over them has no rate.
Sources: `cache/qsa_offload.py` and `modules/attention_fn/qsa_triton.py` of the port cosmicnag/exllamav3@b7dcfa62.
"""

from collections.abc import Iterable

from twin.ask.case import Case
from twin.errors import MissingRate
from twin.layouts.layout import CacheLayout, Placement
from twin.operations import attention
from twin.operations.counts import block_run_bytes, is_sparse, padded_selection, selected_tokens
from twin.operations.ops import Carried, Engine, Op, OpGraph, Step


class Offload(CacheLayout):
    """K, V and raw keys on the host; `pooled` moves the pooled keys there too (a what-if)."""

    name = "offload"
    summary = "K and V in host RAM, read in place by the GPU; only pooled keys in VRAM"
    options = frozenset({"staging_bytes", "prefill", "copies", "pooled", "host_pages"})
    host_planes = True
    needs_indexer = True

    def assumptions(self, case: Case) -> tuple[str, ...]:
        """Page tables of registered memory, and unless every query token gathers its own selection how it is staged."""
        return ("A9",) if case.prefill == "naive" else ("A8", "A9", "A12")

    def placement(self, case: Case) -> Placement:
        """K, V and the raw key on the host; a pooled key every `ratio` tokens in VRAM."""
        pooled = case.index_key_bytes // (case.indexer.ratio if case.indexer else 1)
        planes = case.plane_bytes + case.index_key_bytes
        if case.pooled == "host":
            return Placement(vram_bytes=0, host_bytes=planes + pooled)
        return Placement(vram_bytes=pooled, host_bytes=planes)

    def working_bytes(self, case: Case) -> dict[str, int]:
        """Staging buffers, two if one is filled while the other is read; all else reuses the workspace (A12)."""
        if case.prefill == "naive" or case.question.batch != 1:
            return {}
        return {"staging": case.staging_bytes * (2 if case.copies == "overlapped" else 1)}

    def decode_ops(self, case: Case, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
        """Write the new token to the host, select when the context is long, gather over the link."""
        sparse = is_sparse(case.indexer, step.end)
        selection = attention.decode_selection(case, step, device, first=first) if sparse else ()
        both = case.plane_bytes * (2 if case.is_interleaved else 1)  # K and V of an interleaved block are one run
        gather = Op(
            "kv_gather",
            device,
            engine=Engine.H2D,
            kernel=case.kernel("gather_host" if case.huge_pages else "gather_host_4k"),
            link_bytes=selected_tokens(case.indexer, step.end) * case.plane_bytes * step.batch,
            run_bytes=block_run_bytes(case.indexer, both) if sparse else self._page_run_bytes(case),
            grain=step.end,
            after=(first + len(selection) - 1,),
        )
        return (*selection, gather, self._write_back(case, step, device, after=(first - 1,)))

    def prefill_graphs(self, case: Case, chunk: Step, device: int, *, times: int) -> tuple[OpGraph, ...]:
        """The chunk written to the host, then dense, staged or token-by-token attention; MissingRate if interleaved."""
        if case.is_interleaved:
            raise MissingRate(
                f"{case.rules.name} has no kernel for a prefill over {case.fmt.name} planes on the host: "
                "a decode step gathers their records, nothing stages them",
                hint="--what-if counts their bytes at the rates of another format",
            )
        write = OpGraph(ops=(self._write_back(case, chunk, device, after=()),), times=times)
        if not is_sparse(case.indexer, chunk.end):
            history_bytes = chunk.kv_tokens * case.plane_bytes * chunk.batch
            return write, attention.dense_graph(case, chunk, device, times=times, link_bytes=history_bytes)
        selection = OpGraph(ops=attention.prefill_selection(case, chunk, device, first=0), times=times)
        attend = self._staged if self.is_staged(case, chunk) else self._naive
        return write, selection, attend(case, chunk, device, times)

    def is_staged(self, case: Case, chunk: Step) -> bool:
        """The port's rule: one sequence, whose query tokens would read more than twice the pages in use."""
        if case.prefill != "auto":
            return case.prefill == "staged"
        pages = case.rules.pages(chunk.end)
        return chunk.batch == 1 and self._read_tokens(case, chunk.q_tokens) > 2 * pages * case.rules.page_tokens

    def _read_tokens(self, case: Case, q_tokens: int) -> int:
        """Selected tokens that so many query tokens may read, padding included."""
        return q_tokens * padded_selection(case.indexer, case.rules.sparse.selection_alignment)

    def breaks(self, case: Case) -> Iterable[int]:
        """The last context of a single bucket, which needs no combining, and the last that the port's rule stages."""
        page = case.rules.page_tokens
        last_staged = (-(-self._read_tokens(case, case.chunk_tokens) // (2 * page)) - 1) * page
        return self.bucket_tokens(case), last_staged

    def bucket_tokens(self, case: Case) -> int:
        """Tokens that the staging buffer holds, in whole pages."""
        page = case.rules.page_tokens
        return max(1, case.staging_bytes // (page * case.plane_bytes)) * page

    def buckets(self, case: Case, chunk: Step) -> int:
        """Buckets of a staged chunk, each a buffer full; 0 if it is not staged."""
        if not self.is_staged(case, chunk):
            return 0
        return -(-chunk.end // self.bucket_tokens(case))

    def _staged(self, case: Case, chunk: Step, device: int, times: int) -> OpGraph:
        """Copy a bucket (K, then V), attend to it, combine; all pages in use cross the link once."""
        buckets = self.buckets(case, chunk)
        history_bytes = case.rules.pages(chunk.end) * case.rules.page_tokens * case.plane_bytes
        run_bytes = 0 if case.rules.sparse.copies_whole_buckets else self._page_run_bytes(case)
        moved = history_bytes / buckets / 2
        copy = Op("kv_copy", device, engine=Engine.H2D, calls=2, link_bytes=moved, run_bytes=run_bytes)
        region = min(self.bucket_tokens(case), chunk.end)
        attend = attention.sparse_attention(
            case, chunk, device, after=(0,), buckets=buckets, region_tokens=region, vram_bytes=history_bytes / buckets
        )
        ops: tuple[Op, ...] = (copy, attend)
        if buckets > 1:
            ops += (attention.combine_partials(case, chunk, device, after=(1,)),)
        last = len(ops) - 1
        in_stream = Carried(1, last, 1)  # a kernel begins when the bucket before is combined
        buffer_read = Carried(0, 1, 2)  # the second buffer is free when its attention has ended
        carried = (in_stream, buffer_read) if case.copies == "overlapped" else (Carried(0, last, 1),)
        return OpGraph(ops=ops, iterations=buckets, times=times, carried=carried)

    def _page_run_bytes(self, case: Case) -> float:
        """Contiguous bytes of one page: of K (or of V); interleaved, of both."""
        return case.rules.page_tokens * case.plane_bytes / (1 if case.is_interleaved else 2)

    def _naive(self, case: Case, chunk: Step, device: int, times: int) -> OpGraph:
        """Every query token gathers its own selection over the link, inside the sparse kernel."""
        gather = Op(
            "kv_gather",
            device,
            engine=Engine.H2D,
            kernel=case.kernel("gather_rows_host"),
            link_bytes=naive_read_bytes(case, chunk),
            run_bytes=block_run_bytes(case.indexer, case.plane_bytes),
            flops=attention.issued_flops(case, chunk.q_tokens * chunk.batch, 1),
            dtype=case.operand_dtype,
            grain=chunk.end,
        )
        return OpGraph(ops=(gather,), times=times)

    def _write_back(self, case: Case, step: Step, device: int, *, after: tuple[int, ...]) -> Op:
        written = self.placement(case).host_bytes * step.q_tokens * step.batch
        return Op("kv_write", device, engine=Engine.D2H, link_bytes=written, after=after)


def naive_read_bytes(case: Case, chunk: Step) -> int:
    """Bytes that the query tokens of a sparse chunk read, each its own selection (see counts.selected_tokens)."""
    indexer = case.indexer
    if indexer is None:
        return 0
    short = max(0, min(chunk.end, indexer.budget) - chunk.kv_tokens)  # those that still see no more than the budget
    short_tokens = short * chunk.kv_tokens + short * (short + 1) // 2
    long = chunk.q_tokens - short
    whole, rest = divmod(long, indexer.ratio)
    tails = whole * (indexer.ratio * (indexer.ratio - 1) // 2)
    tails += sum((chunk.end - back) % indexer.ratio for back in range(rest))
    return (short_tokens + long * indexer.budget + tails) * case.plane_bytes * chunk.batch


LAYOUT = Offload()
