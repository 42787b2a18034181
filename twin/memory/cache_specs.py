"""What each layer of a case keeps of a request, under an engine with one pool of blocks.

Sources: vLLM 0.26 and 0.28: `get_kv_cache_spec` of the layers in `model_executor/layers/attention/`, state shapes and
types of `model_executor/layers/mamba/mamba_utils.py`, `platforms/interface.py` (blocks where formats differ by layer).
"""

from collections.abc import Iterator

from twin.ask.case import Case
from twin.memory.blocks import CacheSpec
from twin.models.mixers import Attending, Attention, LatentAttention
from twin.operations.counts import HALF_BYTES
from twin.operations.lower import draft_token_bytes

LATENT_BLOCK = 64  # tokens of a block of FlashMLA and of an indexer's keys (`v1/attention/backends/mla/`)
TURBOQUANT_ENDS = 2  # layers at either end that stay in 16 bits (`get_boundary_skip_layers`), in models without states
TURBOQUANT_BLOCK = 32  # tokens: a page of 8-bit elements must cover one of 16 tokens in 16 bits


def cache_specs(case: Case) -> list[CacheSpec]:
    """Types of layers that take blocks: attention and its indexers, windows, recurrent states, a drafter's windows.

    Local chunks are kept whole, as they are unless VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE asks otherwise;
    layers that read another layer's cache keep none.
    """
    model, speculation = case.model, case.speculation
    drafter = speculation.drafter if speculation else None
    follows = drafter.layers if drafter and not drafter.window else 0
    specs: list[CacheSpec] = []
    for mixer, layers in model.caches.items():
        followers, follows = (0, follows) if _window(mixer) else (follows, 0)
        specs += _attending(case.of(mixer), mixer, layers + followers)
    drafted = speculation.tokens if speculation else 0
    for state, layers in model.states.items():
        tail = state.conv_channels * (state.conv_kernel - 1 + drafted) * HALF_BYTES
        size = state.state_elements * case.state_bytes_of(state) + tail
        specs.append(CacheSpec(kind="recurrent", layers=layers, state_bytes=size))
    if drafter and drafter.window:
        specs.append(
            CacheSpec(
                kind="sliding",
                layers=drafter.layers,
                token_bytes=draft_token_bytes(case, drafter),
                window=drafter.window,
                kernel_block=_kernel_block(case),
            )
        )
    return specs


def _attending(case: Case, mixer: Attending, layers: int) -> Iterator[CacheSpec]:
    """Layers of one attention, as the case sees them; with an indexer's keys in pages of their own."""
    window, block, tiles = _window(mixer), _kernel_block(case), case.fmt.tile_tokens
    ends = _whole_layers(case, layers)
    if ends:
        block = max(block, TURBOQUANT_BLOCK)
        whole = mixer.kv_elements * HALF_BYTES
        yield CacheSpec(kind="attention", layers=ends, token_bytes=whole, kernel_block=block)
    if layers > ends:
        yield CacheSpec(
            kind="sliding" if window else "attention",
            layers=layers - ends,
            token_bytes=case.plane_bytes,
            window=window,
            kernel_block=block,
            takes_padding=tiles == 1,  # a page of tiles leaves no gap
        )
    if isinstance(mixer, LatentAttention) and case.index_key_bytes:
        yield CacheSpec(kind="attention", layers=layers, token_bytes=case.index_key_bytes, kernel_block=block)


def _window(mixer: Attending) -> int:
    return mixer.window if isinstance(mixer, Attention) else 0


def _whole_layers(case: Case, layers: int) -> int:
    """Layers that stay in 16 bits though the others are quantised."""
    alone = len(case.model.caches) == 1 and not case.model.states
    return 2 * min(TURBOQUANT_ENDS, layers // 2) if case.backend == "turboquant" and alone else 0


def _kernel_block(case: Case) -> int:
    """Tokens of the shortest block that the kernels take; those of compressed caches in 8 bits take longer ones."""
    latents = (mixer for mixer in case.model.caches if isinstance(mixer, LatentAttention))
    longer = any(mixer.indexer or case.fmt.kind != "plain" for mixer in latents)
    return max(case.rules.page_tokens, case.fmt.tile_tokens, LATENT_BLOCK if longer else 0)
