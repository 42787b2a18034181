"""The engine's own statistic of a staged prefill: bytes that the selections name over bytes that were staged.

exllamav3's KV-offload port prints it with EXL3_QSA_KVO_STATS=1 (`util/qsa_kvo_stats.py`): query tokens x padded
selection x bytes of K and V, over the pages copied. It counts from the moment of loading, so a probe that the loader
runs through each layer at the end of the full cache is in it (`Attention.autosplit_extra_measure`): one chunk, every
page.
"""

from msgspec import Struct

from twin.ask.case import Case
from twin.cost.prefill import chunk_at, chunk_count
from twin.errors import BadValue
from twin.operations.counts import is_sparse, padded_selection


class StagingStatistics(Struct, frozen=True, kw_only=True):
    """Sums over the staged chunks of a prompt, in one attention layer."""

    q_tokens: int
    """Tokens of the prompt's staged chunks."""
    pages: int
    """Pages copied for them; a page counts once for each chunk that reads it."""
    probe_q_tokens: int
    probe_pages: int
    selection_bytes: int
    """K and V of one token's padded selection."""
    page_bytes: int
    """K and V of one page."""

    @property
    def ratio(self) -> float:
        """Bytes named over bytes staged as the engine prints it, the probe of the loader included."""
        q_tokens, pages = self.q_tokens + self.probe_q_tokens, self.pages + self.probe_pages
        return q_tokens * self.selection_bytes / (pages * self.page_bytes)

    @property
    def ratio_without_probe(self) -> float:
        """The same of the prompt alone."""
        return self.q_tokens * self.selection_bytes / (self.pages * self.page_bytes)


def staging_statistics(case: Case, *, prompt_tokens: int, cache_tokens: int) -> StagingStatistics:
    """Count the staged chunks of a prompt in a cache loaded for `cache_tokens`; BadValue where none is staged."""
    rules = case.rules
    chunks = [chunk_at(case, prompt_tokens, index) for index in range(chunk_count(case, prompt_tokens))]
    staged = [chunk for chunk in chunks if is_sparse(case.model, chunk.end) and case.layout.buckets(case, chunk)]
    if not staged:
        raise BadValue(f"no chunk of a prompt of {prompt_tokens:,} tokens is staged under layout {case.layout.name!r}")
    return StagingStatistics(
        q_tokens=sum(chunk.q_tokens for chunk in staged),
        pages=sum(rules.pages(chunk.end) for chunk in staged),
        probe_q_tokens=case.chunk_tokens,
        probe_pages=rules.pages(cache_tokens),
        selection_bytes=padded_selection(case.model, rules.sparse.selection_alignment) * case.plane_bytes,
        page_bytes=rules.page_tokens * case.plane_bytes,
    )
