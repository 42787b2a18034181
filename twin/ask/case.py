"""A Case is a question with names resolved and defaults filled in. Knows nothing of hardware."""

from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from twin.ask.question import Copies, Ngram, Prefill, Question, Tier
from twin.engines import EngineRules
from twin.errors import Impossible
from twin.formats import GGML, KVFormat
from twin.layouts import CacheLayout
from twin.models import ModelSpec
from twin.models.mixers import Attending, Attention, Indexer, LatentAttention, Recurrent, mixer_tag
from twin.models.speculation import Speculation
from twin.operations.counts import FULL_BYTES, HALF_BYTES

LATENT_GROUP = 128  # elements of a compressed vector that share a scale in 8 bits


class Ends(NamedTuple):
    """Which ends of the model a stage of its layers has: the embedding before the first, the head behind the last."""

    first: bool = True
    last: bool = True


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
    mixer: Attending | None
    """Attention that cache sizes, kernels and ops are asked of: the model's that sees furthest, or as `of` says."""
    speculation: Speculation | None
    tp: int = 1  # ranks that share every layer; `model` and all that follows from it are one rank's
    ends: Ends = Ends()
    devices: int | None = None  # ranks x stages, where that was asked for; None: all that the machine has, as stages
    cached_tokens: int = 0  # prompt tokens that the engine finds in its prefix cache and does not compute again

    def of(self, mixer: Attending) -> "Case":
        """The case as the layers see it that have this attention."""
        return self if mixer == self.mixer else replace(self, mixer=mixer)

    @property
    def attention(self) -> Attention:
        """Attention with keys and values a head; Impossible where the layers have none."""
        if not isinstance(self.mixer, Attention):
            kind = "latent attention" if self.mixer else "no attention"
            raise Impossible(f"{self.model.name} has {kind}: there are no keys and values of heads to read")
        return self.mixer

    @property
    def indexer(self) -> Indexer | None:
        """Of sparse attention, where the layers have it."""
        return self.mixer.indexer if self.mixer else None

    @property
    def index_key_bytes(self) -> int:
        """One raw or pooled indexer key in one attention layer."""
        if self.indexer is None or self.indexer.shared:
            return 0
        sparse = self.rules.sparse_kernels
        element = sparse.index_element_bytes if sparse else None
        return self.indexer.key_bytes(self.fmt.element_bytes) if element is None else self.indexer.head_dim * element

    @property
    def plane_bytes(self) -> int:
        """K and V of one token in one attention layer, or its compressed vector and shared key."""
        mixer = self.mixer
        if isinstance(mixer, LatentAttention):
            return _latent_bytes(mixer, self.fmt)
        if mixer is None:
            return 0
        return self.fmt.plane_bytes(kv_heads=mixer.kv_heads, head_dim=mixer.head_dim, value_dim=mixer.value_dim)

    def state_bytes_of(self, mixer: Recurrent) -> int:
        """Bytes of an element of its state: some kinds are kept in full whatever is asked."""
        return FULL_BYTES if mixer_tag(mixer) in self.rules.full_states else self.state_element_bytes

    def stages(self, devices: int) -> int:
        """Groups of devices that layers are split over, of so many devices."""
        return max(1, devices // self.tp)

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
        return self.rules.formats[0] if self.borrows else self.fmt.rated_as or self.fmt.name

    @property
    def cpu_layers(self) -> int:
        """Layers, from the first on, that the processor runs; of those on devices the output is one."""
        asked = self.question.gpu_layers
        return 0 if asked is None else min(self.model.layers, max(0, self.model.layers + 1 - asked))

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


def _latent_bytes(mixer: LatentAttention, fmt: KVFormat) -> int:
    """The compressed vector and the shared key of one token.

    fp8 quantises both with one scale a layer; where an indexer chooses tokens, the vector by groups of 128 with fp32
    scales and the key not at all (vLLM's `fp8_ds_mla`), as exllamav3's formats do with groups of 32 (`cache/mla.py`).
    llama.cpp's quantise both together as one row of K, and keep no V.
    """
    if fmt.parts[0] in GGML:
        return fmt.key.tile_bytes(mixer.kv_elements)
    if fmt.kind == "plain" or (fmt.name == "fp8" and mixer.indexer is None):
        return mixer.kv_elements * fmt.key.bits // 8
    if fmt.name == "fp8":
        return mixer.kv_rank + FULL_BYTES * -(-mixer.kv_rank // LATENT_GROUP) + HALF_BYTES * mixer.rope_dim
    return fmt.key.tile_bytes(mixer.kv_rank) + HALF_BYTES * mixer.rope_dim
