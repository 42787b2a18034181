"""Decoders whose layers differ in their heads, or lack one of their halves.

Sources: MiMoV2FlashForCausalLM, Step3p7ForConditionalGeneration and LagunaForCausalLM of transformers 5.24; for DeciLM
the code of its checkpoints and its published number of parameters.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    FULL,
    HEADS,
    SLIDING,
    WIDTH,
    check_number,
    heads_of,
    hidden_of,
    layer_types,
    layered,
    layers_of,
    shape_of,
)
from twin.models.config.decoder import head_norms
from twin.models.config.experts import Routing, by_type, dense_first, routed
from twin.models.config.shape import Reader, Shape
from twin.models.config.windows import of_types
from twin.models.fields import Fields
from twin.models.mixers import Attention
from twin.models.spec import FeedForward, Layer


def mimo_v2(fields: Fields) -> Shape:
    """MiMo V2 Flash: windows with KV heads of their own number and with sinks; keys and values of two widths."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    attention = heads_of(fields, hidden)
    full = replace(attention, value_dim=fields.integer("v_head_dim", default=attention.head_dim, high=WIDTH))
    pattern = fields.integers("hybrid_layer_pattern", default=[], high=1)
    if pattern:
        check_number(fields, "hybrid_layer_pattern", pattern, layers)
    by_default = [not (layer == 0 or (layer + 1) % 6 == 0) for layer in range(layers)]
    kinds = [SLIDING if each else FULL for each in pattern or by_default]
    types = layer_types(fields, layers, kinds)
    window = fields.integer("sliding_window", default=129)
    if "sliding_window_size" in fields:
        window = fields.integer("sliding_window_size") + 1  # which counts the tokens before the query
    kv_heads = fields.integer("swa_num_key_value_heads", default=2 * full.kv_heads, high=HEADS)
    for key, own in (
        ("swa_num_attention_heads", full.query_heads),
        ("swa_head_dim", full.head_dim),
        ("swa_v_head_dim", full.value_width),
    ):
        if fields.integer(key, default=own) != own:
            raise fields.wrong(key, f"is not the {own} of full attention, which is not known of this architecture")
    sliding = replace(full, kv_heads=kv_heads, window=window, vectors=full.query_heads)
    fields.only("add_full_attention_sink_bias", expected=False)
    fields.only("add_swa_attention_sink_bias", expected=True)
    fields.only("attention_bias", expected=False)
    fields.without_effect("attention_value_scale", "swa_rope_theta", "attention_chunk_size", "sliding_window")
    routing = Routing(
        experts=("n_routed_experts",),
        shared_number=("n_shared_experts",),
        dense=by_type(_by_frequency),
    )
    feeds = routed(routing)(fields, hidden, layers)
    mixers = [sliding if each == SLIDING else full for each in types]
    return _stacked(fields, hidden, mixers, feeds)


def _by_frequency(fields: Fields, layers: int) -> list[bool]:
    """A list with 0 where a layer has an MLP; without, the first has."""
    each = fields.integers("moe_layer_freq", default=[0, *[1] * (layers - 1)], high=1)
    check_number(fields, "moe_layer_freq", each, layers)
    return [not sparse for sparse in each]


def _stacked(fields: Fields, hidden: int, mixers: list[Attention], feeds: list[FeedForward | None]) -> Shape:
    return shape_of(fields, layered(mixers, feeds, hidden), hidden=hidden, vectors=hidden, tied=False)


def step3p7(fields: Fields) -> Shape:
    """Step 3.7: more query heads where attention slides, a gate a head."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    attention = heads_of(fields, hidden)
    more = fields.integer("num_nextn_predict_layers", default=0, low=0, high=64)  # whose types come last in the list
    padded = fields.texts("layer_types", default=[])
    if more and len(padded) == layers + more:
        fields.raw = fields.raw | {"layer_types": padded[:layers]}
    types = layer_types(fields, layers, [FULL] * layers)
    other = fields.table("attention_other_setting")
    wide = fields.integer("num_sliding_attention_heads", default=0, low=0, high=HEADS)
    if other is not None:
        wide = wide or other.integer("num_attention_heads", default=attention.query_heads, high=HEADS)
        other.rest_without_effect()
    full = _gated_by_head(attention, hidden)
    sliding = _gated_by_head(_with_heads(fields, attention, wide or attention.query_heads), hidden)
    windows = of_types(fields, types)
    mixers = [replace(sliding, window=window) if window else full for window in windows]
    routing = Routing(
        experts=("n_routed_experts", "moe_num_experts", "num_experts"),
        active=("num_experts_per_tok", "moe_top_k"),
        shared_width=("share_expert_dim",),
        dense=_step_dense,
    )
    fields.without_effect("n_shared_experts", "swiglu_limits", "swiglu_limits_shared", "moe_router_scaling_factor")
    return _stacked(fields, hidden, mixers, routed(routing)(fields, hidden, layers))


def _step_dense(fields: Fields, layers: int) -> list[bool]:
    """By `mlp_layer_types`, or a list of the layers with experts, or else the first few have an MLP."""
    listed = fields.raw.get("moe_layers_enum")
    if isinstance(listed, str) and all(
        each.strip().isdecimal() and len(each) < 6 for each in listed.split(",") if each.strip()
    ):
        sparse = {int(each) for each in listed.split(",") if each.strip()}
        fields.text("moe_layers_enum")
        return [layer not in sparse for layer in range(layers)]
    if listed is not None:
        sparse = set(fields.integers("moe_layers_enum", high=layers + 64))
        return [layer not in sparse for layer in range(layers)]
    return by_type(dense_first("first_k_dense_replace", default=3))(fields, layers)


def _with_heads(fields: Fields, attention: Attention, heads: int) -> Attention:
    """The same with so many query heads. Raises BadFile where they are no multiple of the KV heads."""
    if heads % attention.kv_heads:
        raise fields.wrong(
            "num_key_value_heads", f"is {attention.kv_heads}, of which {heads} query heads are no multiple"
        )
    return replace(attention, query_heads=heads)


def _gated_by_head(attention: Attention, hidden: int) -> Attention:
    """With norms of heads and one number a head by which its output counts."""
    return replace(attention, vectors=head_norms(attention), other_matrices=hidden * attention.query_heads)


def laguna(fields: Fields) -> Shape:
    """Laguna: query heads of their own number in each layer, gates a head or an element."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    attention = heads_of(fields, hidden, head_dim_default=128)
    numbers = fields.integers(
        "num_attention_heads_per_layer", default=[attention.query_heads] * layers, low=1, high=HEADS
    )
    check_number(fields, "num_attention_heads_per_layer", numbers, layers)
    by_head = fields.raw.get("gating", True) in (True, "per-head")
    fields.without_effect("gating", "moe_routed_scaling_factor", "moe_router_logit_softcapping")
    fields.only("attention_bias", expected=False)
    windows = of_types(fields, layer_types(fields, layers, [FULL] * layers), 512)
    mixers = []
    for heads, window in zip(numbers, windows, strict=True):
        own = replace(_with_heads(fields, attention, heads), window=window)
        mixers.append(
            _gated_by_head(own, hidden) if by_head else replace(own, vectors=head_norms(own), output_gate=True)
        )
    routing = Routing(
        shared_width=("shared_expert_intermediate_size",),
        router_bias=True,
        dense=by_type(lambda _, number: [layer == 0 for layer in range(number)]),
    )
    return _stacked(fields, hidden, mixers, routed(routing)(fields, hidden, layers))


def deci(fields: Fields) -> Shape:
    """DeciLM, Nemotron's Llama cut down by search: blocks one by one, of which any half may be missing."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    query = fields.integer("num_attention_heads", high=HEADS)
    blocks = fields.raw.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise fields.wrong("block_configs", f"is no list of one block for each of {layers:,} layers")
    stack = []
    for number, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise fields.wrong(f"block_configs[{number}]", "is no table")
        inner = Fields(block, fields.where, f"{fields.prefix}block_configs[{number}].")
        stack.append(_deci_layer(inner, hidden, query, fields))
    fields.without_effect("block_configs", "num_key_value_heads", "intermediate_size")
    fields.only("attention_bias", expected=False)
    fields.only("mlp_bias", expected=False)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def _deci_layer(block: Fields, hidden: int, query: int, fields: Fields) -> Layer:
    """A half that is missing has no norm either."""
    attn, ffn = block.table("attention"), block.table("ffn")
    if attn is None or ffn is None:
        raise block.missing("ffn" if attn else "attention")
    for half, key in (
        (attn, "replace_with_linear"),
        (ffn, "replace_with_linear"),
        (attn, "num_sink_tokens"),
        (attn, "sparsify"),
        (ffn, "sparsify"),
    ):
        if half.raw.get(key):
            raise half.wrong(key, "is set, which is not known of this architecture")
    mixers: tuple[Attention, ...] = ()
    if not attn.flag("no_op", default=False):
        group = attn.integer("n_heads_in_group", high=HEADS)
        if query % group or hidden % query:
            raise attn.wrong(
                "n_heads_in_group", f"is {group}, but {query} query heads or the width {hidden} do not divide so"
            )
        own = heads_of(fields, hidden, kv_heads=())
        window = attn.integer("window_length", default=0, low=0)
        mixers = (replace(own, kv_heads=query // group, window=window),)
    feed = None
    if not ffn.flag("no_op", default=False):
        intermediate = int(2 * ffn.number("ffn_mult", low=0.001, high=64) * hidden / 3)
        feed = FeedForward(intermediate=-(-intermediate // 256) * 256)
    return Layer(mixers=mixers, feed_forward=feed, vectors=hidden * (len(mixers) + (feed is not None)))


READERS: dict[str, Reader] = {
    "MiMoV2FlashForCausalLM": mimo_v2,
    "mimo_v2_flash": mimo_v2,
    "Step3p7ForConditionalGeneration": step3p7,
    "Step3p7FlashForCausalLM": step3p7,
    "step3p7": step3p7,
    "step3p7_text": step3p7,
    "LagunaForCausalLM": laguna,
    "laguna": laguna,
    "DeciLMForCausalLM": deci,
    "nemotron-nas": deci,
}
