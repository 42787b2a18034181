"""Decoders that alternate attention with a recurrent mixer other than Mamba: Qwen3-Next, Qwen3.5, MiniMax-01, LFM2.

Sources: the modeling files of transformers 5.24, by the names of the classes; the head of Qwen's models for a further
token is that of their checkpoints.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    EXPERTS,
    FULL,
    HEADS,
    LINEAR,
    WIDTH,
    active_of,
    check_number,
    expert_count,
    heads_of,
    hidden_of,
    joining,
    layer_types,
    layered,
    layers_of,
    parameters_of,
    qkv_bias,
    shape_of,
    vocabulary_of,
    width_of,
)
from twin.models.config.decoder import head_norms
from twin.models.config.experts import qwen_dense
from twin.models.config.latent import latent_attention, mixed_feeds
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import (
    Attention,
    GatedDeltaNet,
    KimiDelta,
    LightningAttention,
    Mixer,
    ShortConvolution,
)
from twin.models.spec import FeedForward, Layer

CONVOLUTION = "conv"


def qwen3_next(fields: Fields) -> Shape:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet, and gated attention in every fourth layer; dense or with experts."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    fields.only("use_sliding_window", expected=False)
    fields.without_effect("output_gate_type")
    mixers: dict[str, Mixer] = {FULL: gated_attention(fields, hidden), LINEAR: gated_delta_net(fields)}
    kinds = qwen_kinds(fields, layers)
    feeds = qwen_feeds(fields, hidden, layers)
    stack = layered([mixers[kind] for kind in kinds], feeds, hidden)
    towers = _qwen_mtp(fields, hidden, layered([mixers[FULL]], feeds[-1:], hidden))
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False, towers=towers)


def _qwen_mtp(fields: Fields, hidden: int, layer: list[Layer]) -> dict[str, int]:
    """Layers with full attention for a further token, joined to the embedding once."""
    count = fields.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, low=0, high=64)
    own = fields.flag("mtp_use_dedicated_embeddings", default=False)
    if not count:
        return {}
    embedding = vocabulary_of(fields) * hidden if own else 0
    return {"mtp": count * parameters_of(layer, hidden) + joining(hidden) + embedding}


def qwen_kinds(fields: Fields, layers: int) -> list[str]:
    """By a list, or full attention in every so many layers; both have to agree."""
    period = fields.integer("full_attention_interval", default=4, high=4096)
    spaced = [LINEAR if (layer + 1) % period else FULL for layer in range(layers)]
    kinds = layer_types(fields, layers, spaced, known=(FULL, LINEAR))
    if "full_attention_interval" in fields and kinds != spaced:
        raise fields.contradiction("they place full attention differently", "layer_types", "full_attention_interval")
    return kinds


def gated_attention(fields: Fields, hidden: int) -> Attention:
    """Attention with an output gate, norms of queries and keys, and biases where attention_bias says so."""
    fields.only("attn_output_gate", expected=True)
    plain = replace(heads_of(fields, hidden), output_gate=True)
    gates = plain.query_heads * plain.head_dim
    biases = qkv_bias(plain) + gates + hidden if fields.flag("attention_bias", default=False) else 0
    return replace(plain, vectors=head_norms(plain) + biases)


def gated_delta_net(fields: Fields) -> GatedDeltaNet:
    """Gated DeltaNet with a decay and a bias of the time step a head, and a norm of a head's output."""
    head_dim = fields.integer("linear_key_head_dim", high=WIDTH)
    if fields.integer("linear_value_head_dim", high=WIDTH) != head_dim:
        raise fields.wrong(
            "linear_value_head_dim", f"is not linear_key_head_dim {head_dim}, which is not known of this architecture"
        )
    keys = fields.integer("linear_num_key_heads", high=HEADS)
    values = fields.integer("linear_num_value_heads", high=HEADS)
    if values % keys:
        raise fields.contradiction(
            "value heads are no multiple of key heads", "linear_num_value_heads", "linear_num_key_heads"
        )
    return GatedDeltaNet(
        key_heads=keys,
        value_heads=values,
        head_dim=head_dim,
        conv_kernel=fields.integer("linear_conv_kernel_dim", low=2, high=64),
        vectors=2 * values + head_dim,
    )


def qwen_feeds(fields: Fields, hidden: int, layers: int) -> list[FeedForward]:
    """Experts beside a gated one that always runs, in every so many layers; or dense."""
    experts = fields.integer("num_experts", default=0, low=0, high=EXPERTS)
    if not experts:
        fields.without_effect("mlp_only_layers", "decoder_sparse_step")
        return [FeedForward(intermediate=width_of(fields))] * layers
    routed = FeedForward(
        intermediate=width_of(fields, "moe_intermediate_size"),
        experts=experts,
        active=active_of(fields, experts, "num_experts"),
        shared_intermediate=width_of(fields, "shared_expert_intermediate_size"),
        vectors=hidden,  # the shared expert's gate
    )
    dense = qwen_dense(fields, layers)
    if not any(dense):
        fields.without_effect("intermediate_size")
        return [routed] * layers
    plain = FeedForward(intermediate=width_of(fields))
    return [plain if alone else routed for alone in dense]


_SCALED = ("full_attention", "linear_attention", "mlp")


def minimax_01(fields: Fields) -> Shape:
    """MiniMax-Text-01 and M1: lightning attention with a norm of its output, and full attention in some layers."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    if fields.integer("shared_intermediate_size", default=0, low=0):
        raise fields.wrong("shared_intermediate_size", "is not 0, which is not known of this architecture")
    fields.without_effect(*(f"layernorm_{part}_{factor}" for part in _SCALED for factor in ("alpha", "beta")))
    fields.without_effect("postnorm", "shared_moe_mode", "block_size")
    full = heads_of(fields, hidden)
    width = full.query_heads * full.head_dim
    mixers: dict[str, Mixer] = {
        FULL: full,
        LINEAR: LightningAttention(heads=full.query_heads, head_dim=full.head_dim, vectors=width),
    }
    experts = expert_count(fields, "num_local_experts")
    active = active_of(fields, experts, "num_local_experts")
    feed = FeedForward(intermediate=width_of(fields), experts=experts, active=active)
    stack = layered([mixers[kind] for kind in _minimax_kinds(fields, layers)], [feed] * layers, hidden)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def _minimax_kinds(fields: Fields, layers: int) -> list[str]:
    if "attn_type_list" not in fields:
        return layer_types(fields, layers, None, known=(FULL, LINEAR))
    listed = fields.integers("attn_type_list", high=1)
    check_number(fields, "attn_type_list", listed, layers)
    return [FULL if each else LINEAR for each in listed]


def lfm2(fields: Fields) -> Shape:
    """LFM2: gated short convolutions, and attention with norms of queries and keys in some layers."""
    layers = layers_of(fields)
    return _lfm2(fields, [FeedForward(intermediate=_lfm2_width(fields))] * layers)


def lfm2_moe(fields: Fields) -> Shape:
    """LFM2 with experts in all but the first layers."""
    layers = layers_of(fields)
    experts = expert_count(fields, "num_experts")
    routed = FeedForward(
        intermediate=width_of(fields, "moe_intermediate_size"),
        experts=experts,
        active=active_of(fields, experts, "num_experts"),
    )
    dense = fields.integer("num_dense_layers", low=0, high=layers)
    plain = FeedForward(intermediate=width_of(fields)) if dense else routed
    return _lfm2(fields, [plain] * dense + [routed] * (layers - dense))


def _lfm2(fields: Fields, feeds: list[FeedForward]) -> Shape:
    hidden = hidden_of(fields)
    kinds = _lfm2_kinds(fields, len(feeds))
    attention = heads_of(fields, hidden)
    bias = fields.flag("conv_bias", default=False)
    for key in ("conv_dim", "conv_dim_out"):
        if fields.integer(key, default=hidden) != hidden:
            raise fields.wrong(key, f"is not hidden_size {hidden}, which is not known of this architecture")
    mixers: dict[str, Mixer] = {
        FULL: replace(attention, vectors=head_norms(attention)),
        CONVOLUTION: ShortConvolution(
            channels=hidden,
            conv_kernel=fields.integer("conv_L_cache", low=2, high=64),
            vectors=5 * hidden if bias else 0,
        ),
    }
    stack = layered([mixers[kind] for kind in kinds], feeds, hidden)
    tied = fields.flag("tie_embedding", default=True)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=tied)


def _lfm2_kinds(fields: Fields, layers: int) -> list[str]:
    listed = set(fields.integers("full_attn_idxs", default=[], high=layers - 1))
    indexed = [FULL if layer in listed else CONVOLUTION for layer in range(layers)]
    if "layer_types" not in fields:
        fields.integers("full_attn_idxs")
        return indexed
    kinds = layer_types(fields, layers, None, known=(FULL, CONVOLUTION))
    if listed and kinds != indexed:
        raise fields.contradiction("they place attention differently", "layer_types", "full_attn_idxs")
    return kinds


def _lfm2_width(fields: Fields) -> int:
    """Two thirds of what is said, times a factor, up to a multiple; as said where `block_auto_adjust_ff_dim` is not."""
    fields.without_effect("block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
    fields.without_effect("block_norm_eps", "conv_use_xavier_init", "use_pos_enc", "num_heads", "intermediate_size")
    said = width_of(fields, "block_ff_dim", "intermediate_size")
    fields.only("block_use_swiglu", expected=True)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return said
    multiple = fields.integer("block_multiple_of", default=256, high=WIDTH)
    width = int(fields.number("block_ffn_dim_multiplier", default=1.0, high=64) * (2 * said // 3))
    return -(-width // multiple) * multiple


def bailing_hybrid(fields: Fields) -> Shape:
    """Ling's hybrid: Kimi Delta Attention with gates of full rank, and gated latent attention in some layers."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    heads, head_dim = fields.integer("num_attention_heads", high=HEADS), fields.integer("head_dim", high=WIDTH)
    kernel = fields.integer("short_conv_kernel_size", low=2, high=64)
    plain = KimiDelta(heads=heads, head_dim=head_dim, conv_kernel=kernel)
    width = heads * head_dim
    wider = 2 * hidden * width - 2 * head_dim * (hidden + width)  # gates of full rank instead of rank head_dim
    if wider < 0:
        raise fields.contradiction("gates of full rank are smaller than a head", "hidden_size", "head_dim")
    latent = latent_attention(fields, hidden)
    mixers: dict[str, Mixer] = {
        FULL: replace(latent, other_matrices=heads * hidden),
        LINEAR: replace(plain, vectors=heads + width + head_dim, other_matrices=wider),
    }
    feeds = mixed_feeds(fields, layers)
    kinds = _bailing_kinds(fields, layers)
    stack = layered([mixers[kind] for kind in kinds], feeds, hidden)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def _bailing_kinds(fields: Fields, layers: int) -> list[str]:
    if "layer_types" in fields:
        return layer_types(fields, layers, None, known=(FULL, LINEAR))
    period = fields.integer("layer_group_size", high=4096)
    return [LINEAR if (layer + 1) % period else FULL for layer in range(layers)]


READERS: dict[str, Reader] = {
    "Qwen3NextForCausalLM": qwen3_next,
    "qwen3_next": qwen3_next,
    "Qwen3_5ForConditionalGeneration": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "Qwen3_5MoeForConditionalGeneration": qwen3_next,
    "Qwen3_5MoeForCausalLM": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "MiniMaxForCausalLM": minimax_01,
    "minimax": minimax_01,
    "MiniMaxText01ForCausalLM": minimax_01,
    "MiniMaxM1ForCausalLM": minimax_01,
    "Lfm2ForCausalLM": lfm2,
    "lfm2": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "lfm2_moe": lfm2_moe,
    "BailingHybridForCausalLM": bailing_hybrid,
    "bailing_hybrid": bailing_hybrid,
}
