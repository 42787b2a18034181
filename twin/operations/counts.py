"""What a model's shape implies: parameters, bytes and operations. Knows nothing of hardware.

Sources: the parameter arithmetic follows the model's configuration; the selection follows exllamav3's
`modules/qsa_indexer.py` (1.4.9 to 1.6.5): block_topk = budget / ratio, sparse above 4 x block_topk + 3 tokens.
"""

from functools import cache

from msgspec import Struct

from twin.models.spec import ModelSpec

HALF_BYTES = 2  # bytes of an fp16 or bf16 element


class Parameters(Struct, frozen=True, kw_only=True):
    """Parameter counts of one layer of each kind, and of the two ends."""

    attention: int
    recurrent: int
    expert: int
    always_on: int  # router and shared expert: run for every token, on every layer
    head: int
    embedding: int


@cache
def parameters(model: ModelSpec) -> Parameters:
    """Parameters by part; norms and biases (below 0.1 %) are left out."""
    attention, feed_forward = model.attention, model.feed_forward
    width = attention.query_heads * attention.head_dim
    queries = model.hidden * width * (2 if attention.output_gate else 1)
    keys_values = model.hidden * attention.kv_elements
    index = model.hidden * (model.indexer.query_heads + 1) * model.indexer.head_dim if model.indexer else 0
    router = model.hidden * feed_forward.experts if feed_forward.experts > 1 else 0
    return Parameters(
        attention=queries + keys_values + width * model.hidden + index,
        recurrent=_recurrent_parameters(model),
        expert=3 * model.hidden * feed_forward.intermediate,
        always_on=router + 3 * model.hidden * feed_forward.shared_intermediate,
        head=model.hidden * model.vocab,
        embedding=model.hidden * model.vocab,
    )


def _recurrent_parameters(model: ModelSpec) -> int:
    if model.recurrent is None:
        return 0
    values = model.recurrent.value_heads * model.recurrent.head_dim
    projections = model.hidden * (model.recurrent.conv_channels + values + 2 * model.recurrent.value_heads)
    return projections + values * model.hidden + model.recurrent.conv_channels * model.recurrent.conv_kernel


def layer_parameters(model: ModelSpec, kind: str) -> int:
    """All parameters of one layer of that kind, every expert included."""
    counts = parameters(model)
    return mixer_parameters(model, kind) + counts.always_on + counts.expert * model.feed_forward.experts


def layer_active_parameters(model: ModelSpec, kind: str) -> int:
    """Parameters that one token runs through in one layer of that kind."""
    return mixer_parameters(model, kind) + feed_forward_active_parameters(model)


def mixer_parameters(model: ModelSpec, kind: str) -> int:
    """Parameters of the token mixer of one layer: attention or recurrence, with its projections."""
    counts = parameters(model)
    return counts.attention if kind == "attention" else counts.recurrent


def feed_forward_active_parameters(model: ModelSpec) -> int:
    """Parameters of one layer's feed-forward that one token runs through."""
    counts = parameters(model)
    return counts.always_on + counts.expert * model.feed_forward.active


def feed_forward_read_parameters(model: ModelSpec, tokens: int) -> float:
    """Parameters of one layer's feed-forward that a step over `tokens` tokens reads."""
    counts = parameters(model)
    return counts.always_on + counts.expert * expected_experts(model, tokens)


def expected_experts(model: ModelSpec, tokens: int) -> float:
    """Distinct experts hit by `tokens` tokens that choose independently and evenly: E (1 - (1 - k/E)^tokens)."""
    experts, active = model.feed_forward.experts, model.feed_forward.active
    if experts == active:
        return experts
    return experts * (1 - (1 - active / experts) ** tokens)


def elementwise_elements(model: ModelSpec, kind: str) -> int:
    """Elements that one token reads and writes between a layer's products: residual adds with norms, rotation, gating.

    Experts gate their own intermediates; a recurrent layer's convolution and gates are inside its state's kernel.
    """
    attention, feed_forward = model.attention, model.feed_forward
    norms = 2 * 4 * model.hidden
    rotated = 2 * (attention.query_heads + attention.kv_heads) * attention.head_dim if kind == "attention" else 0
    gated = 3 * (feed_forward.intermediate * feed_forward.active + feed_forward.shared_intermediate)
    return norms + rotated + gated


def weight_bytes(model: ModelSpec, parameter_count: float) -> float:
    """Stored bytes of that many parameters in the checkpoint's format."""
    return parameter_count * model.weights.bits / 8


def head_bytes(model: ModelSpec) -> float:
    """Stored bytes of the output head."""
    return parameters(model).head * (model.weights.head_bits or model.weights.bits) / 8


def embedding_bytes(model: ModelSpec) -> int:
    """Bytes of the token embedding."""
    return int(parameters(model).embedding * model.weights.embedding_bits / 8)


def state_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Recurrent state and convolution tail of one sequence in one recurrent layer."""
    if model.recurrent is None:
        return 0
    return model.recurrent.state_elements * element_bytes + model.recurrent.conv_elements * HALF_BYTES


def index_key_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Indexer key of one attention layer: a raw one per token, a pooled one per block."""
    return model.indexer.head_dim * element_bytes if model.indexer else 0


def sparse_threshold(model: ModelSpec) -> int:
    """Longest context that is still read whole; 4 is literal in the source, whatever the ratio."""
    return 4 * model.indexer.block_topk + 3 if model.indexer else 0


def is_sparse(model: ModelSpec, end_tokens: int) -> bool:
    """Whether a pass whose last token is number `end_tokens` selects; the whole pass does or none of it."""
    return model.indexer is not None and end_tokens > sparse_threshold(model)


def complete_blocks(model: ModelSpec, end_tokens: int) -> int:
    """Pooled blocks that exist after `end_tokens` tokens."""
    return end_tokens // model.indexer.ratio if model.indexer else 0


def selected_tokens(model: ModelSpec, end_tokens: int) -> int:
    """Tokens that the query at position `end_tokens` reads: the best blocks and the open tail, or all if dense."""
    if model.indexer is None or not is_sparse(model, end_tokens):
        return end_tokens
    blocks = min(model.indexer.block_topk, complete_blocks(model, end_tokens))
    return blocks * model.indexer.ratio + end_tokens % model.indexer.ratio


def padded_selection(model: ModelSpec, alignment: int) -> int:
    """Length of one row of selected indices: budget + ratio - 1 rounded up to `alignment` (K_pad, 2080 here)."""
    if model.indexer is None:
        return 0
    longest = model.indexer.budget + model.indexer.ratio - 1
    return -(-longest // alignment) * alignment


def block_run_bytes(model: ModelSpec, plane_bytes: int) -> int:
    """Contiguous bytes of K (or of V) of one selected block: ratio tokens x all kv heads, [token, head, dim]."""
    ratio = model.indexer.ratio if model.indexer else 1
    return ratio * plane_bytes // 2
