"""What a model's shape implies for a step: experts that it hits, elements between products, tokens that it selects.

Knows nothing of hardware. The selection follows exllamav3's `modules/qsa_indexer.py` (1.4.9 to 1.6.5).
"""

from twin.models.mixers import Indexer, Recurrent, conv_elements
from twin.models.spec import FeedForward, Layer

HALF_BYTES = 2  # bytes of an fp16 or bf16 element
FULL_BYTES = 4  # bytes of an fp32 element


def expected_experts(feed_forward: FeedForward, tokens: int) -> float:
    """Distinct experts hit by `tokens` tokens that choose independently and evenly: E (1 - (1 - k/E)^tokens)."""
    experts, active = feed_forward.experts, feed_forward.active
    if experts == active:
        return experts
    return experts * (1 - (1 - active / experts) ** tokens)


def elementwise_elements(layer: Layer, hidden: int) -> int:
    """Elements that one token reads and writes between a layer's products: residual adds with norms, rotation, gating.

    A residual add with its norm reads two vectors and writes two, a rotation reads and writes its own, gating reads two
    and writes one. Experts gate their own intermediates; a recurrent layer's convolution and gates are inside its
    state's kernel.
    """
    rotated = sum(2 * mixer.rotated_elements for mixer in layer.attending)
    feed_forward, gated = layer.feed_forward, 0
    if feed_forward is not None:
        gated = 3 * (feed_forward.intermediate * feed_forward.active + feed_forward.shared_intermediate)
    blocks = (1 if layer.mixers else 0) + (1 if feed_forward else 0)
    return 4 * hidden * blocks + rotated + gated


def state_bytes(mixer: Recurrent, element_bytes: int) -> int:
    """Recurrent state and convolution tail of one sequence in one layer."""
    return mixer.state_elements * element_bytes + conv_elements(mixer) * HALF_BYTES


# What sparse attention selects


def is_sparse(indexer: Indexer | None, end_tokens: int) -> bool:
    """Whether a pass whose last token is number `end_tokens` selects; the whole pass does or none of it."""
    return indexer is not None and end_tokens > indexer.threshold_tokens


def complete_blocks(indexer: Indexer | None, end_tokens: int) -> int:
    """Pooled blocks that exist after `end_tokens` tokens."""
    return end_tokens // indexer.ratio if indexer else 0


def selected_tokens(indexer: Indexer | None, end_tokens: int) -> int:
    """Tokens that the query at position `end_tokens` reads: the best blocks and the open tail, or all if dense."""
    if indexer is None or not is_sparse(indexer, end_tokens):
        return end_tokens
    blocks = min(indexer.block_topk, complete_blocks(indexer, end_tokens))
    return blocks * indexer.ratio + end_tokens % indexer.ratio


def padded_selection(indexer: Indexer | None, alignment: int) -> int:
    """Length of one row of selected indices: budget + ratio - 1 rounded up to `alignment` (K_pad, 2080 here)."""
    if indexer is None:
        return 0
    return -(-(indexer.budget + indexer.ratio - 1) // alignment) * alignment


def block_run_bytes(indexer: Indexer | None, plane_bytes: int) -> int:
    """Contiguous bytes of K (or of V) of one selected block: ratio tokens x all kv heads, [token, head, dim]."""
    return (indexer.ratio if indexer else 1) * plane_bytes // 2
