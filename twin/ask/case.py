"""A Case is a question with names resolved and defaults filled in. Knows nothing of hardware."""

from msgspec import Struct

from twin.ask.question import Copies, Ngram, Prefill, Question, Tier
from twin.engines import EngineRules
from twin.formats import KVFormat
from twin.layouts import CacheLayout
from twin.models import ModelSpec
from twin.models.speculation import Speculation
from twin.operations.counts import index_key_bytes


class Case(Struct, frozen=True, kw_only=True):
    """A question with its parts."""

    question: Question
    model: ModelSpec
    rules: EngineRules
    fmt: KVFormat
    layout: CacheLayout
    backend: str  # attention backend of single-token steps and prefill; empty: the engine's own kernels only
    verify_backend: str  # attention backend of a step of several query tokens
    chunk_tokens: int
    staging_bytes: int
    prefill: Prefill
    copies: Copies
    pooled: Tier
    ngram: Ngram
    huge_pages: bool
    state_element_bytes: int
    speculation: Speculation | None
    cached_tokens: int = 0  # prompt tokens that the engine finds in its prefix cache and does not compute again

    @property
    def index_key_bytes(self) -> int:
        """One raw or pooled indexer key in one attention layer."""
        if self.model.indexer is None:
            return 0
        element = self.rules.sparse.index_element_bytes
        return index_key_bytes(self.model, self.fmt.element_bytes if element is None else element)

    @property
    def plane_bytes(self) -> int:
        """K and V of one token in one attention layer."""
        attention = self.model.attention
        return self.fmt.plane_bytes(kv_heads=attention.kv_heads, head_dim=attention.head_dim)

    @property
    def hw(self) -> str:
        """The machine that the question is about."""
        return self.rules.machine if self.question.hw is None else self.question.hw

    @property
    def operand_dtype(self) -> str:
        """Operand type of attention's products: the format's own if it is plain, else what it is dequantised to."""
        return self.fmt.name if self.fmt.kind == "plain" else self.rules.compute_dtype

    @property
    def borrows(self) -> bool:
        """Whether a what-if stands in for the format's own rates: those of the engine's default format (A14)."""
        return self.question.what_if and self.fmt.kind != "plain"

    @property
    def is_interleaved(self) -> bool:
        """Whether a block's K and V lie interleaved on the host; what is borrowed is read in the lender's way."""
        return (
            self.layout.host_planes and self.fmt.name in self.rules.own_kernels.interleaved_formats and not self.borrows
        )

    @property
    def rated_format(self) -> str:
        """The format whose kernels' rates apply."""
        return self.rules.formats[0] if self.borrows else self.fmt.name

    def kernel(self, operation: str) -> str:
        """Key of the engine's kernel that runs `operation` on this cache."""
        return self.rules.kernel(operation, self.rated_format)

    def index_kernel(self, operation: str) -> str:
        """Key of the kernel that works on the indexer's keys: these are never quantised, whatever K and V are."""
        plain = self.fmt.kind == "plain"
        return self.rules.kernel(operation, self.fmt.name if plain else self.rules.formats[0])

    def attention_kernel(self, operation: str, query_tokens: int = 1) -> str:
        """Key of the attention backend's kernel; passes of several query tokens may have a backend of their own."""
        backend = self.verify_backend if query_tokens > 1 else self.backend
        return f"{operation}/{backend}/{self.rated_format}" if backend else self.kernel(operation)
