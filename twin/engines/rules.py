"""What a rulebook must say: page sizes, chunking, padding, memory that is no cache, and which kernels run."""

from msgspec import Struct

from hwprofiles.rates import Rate


class EngineRules(Struct, frozen=True, kw_only=True):
    """The rules of one inference engine. Sizes in tokens or bytes; every one has its source in the engine's file."""

    name: str
    summary: str
    page_tokens: int
    layouts: tuple[str, ...]
    formats: tuple[str, ...]
    """The first is the default."""
    chunk_tokens: int
    """Prompt tokens of one prefill pass."""
    prefilled_short_of: int
    """Prompt tokens left for the first decode step."""
    state_element_bytes: int
    hop_element_bytes: int
    """Bytes of one element of the residual streams that cross from device to device."""
    ngram: str
    """Where the n-gram table is read from unless asked otherwise."""
    workspace: Rate
    """Bytes of a device that hold neither weights, state nor cache: context, buffers, the largest transient."""
    selection_alignment: int
    """Rows of selected indices are padded to a multiple of this."""
    index_element_bytes: int | None
    """Bytes of an element of raw and pooled indexer keys; None: as the cache's format."""
    score_bytes: int
    """Bytes of one block score between scoring and top-k."""
    head_tile: int
    """Query heads that the sparse kernel computes at once: a smaller group is padded up to it."""
    splits_selection: bool
    """Whether a staged prefill issues only the products that fall into the bucket, or all of them, masked."""
    compute_dtype: str
    """Operand type of the weights' matrix products."""
    score_rows: int
    """Query rows scored against all pooled keys in one go."""
    staging_bytes: int
    """Buffer through which a prefill pulls host planes."""
    copies_whole_buckets: bool
    """Whether a bucket crosses the link in one piece a plane, or page by page."""
    overlaps_copies: bool
    """Whether staged copies run beside the kernels unless asked otherwise."""

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def kernel(self, operation: str, variant: str) -> str:
        """Key of this engine's own kernel in a machine's profile."""
        return f"{operation}/{self.name}/{variant}"
