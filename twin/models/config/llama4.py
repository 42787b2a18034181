"""Llama 4: local chunks in three layers of four, experts beside one that always runs in every n-th layer.

Source: `modeling_llama4.py` of transformers 5.24.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    CHUNKED,
    FULL,
    active_of,
    expert_count,
    hidden_of,
    layer_types,
    layered,
    layers_of,
    shape_of,
    width_of,
)
from twin.models.config.decoder import BIASED, attention_of
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import Attention
from twin.models.spec import FeedForward


def llama4(fields: Fields) -> Shape:
    """Scout and Maverick. Norms of queries and keys have no parameters."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    fields.without_effect("use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale", "for_llm_compressor")
    routes = _routing(fields, layers)
    routed = _routed(fields) if routes else None
    dense = FeedForward(intermediate=width_of(fields, "intermediate_size_mlp"))
    feeds = [routed if layer in routes else dense for layer in range(layers)]
    stack = layered(_mixers(fields, hidden, layers), feeds, hidden)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def _routed(fields: Fields) -> FeedForward:
    experts = expert_count(fields, "num_local_experts")
    width = width_of(fields)
    active = active_of(fields, experts, "num_local_experts")
    return FeedForward(intermediate=width, experts=experts, active=active, shared_intermediate=width)


def _routing(fields: Fields, layers: int) -> set[int]:
    """Layers with experts: as listed, or every so many."""
    step = fields.integer("interleave_moe_layer_step", default=1)
    if step > layers:
        raise fields.contradiction("no layer is left for its experts", "interleave_moe_layer_step", "num_hidden_layers")
    spaced = set(range(step - 1, layers, step))
    if "moe_layers" not in fields:
        return spaced
    listed = set(fields.integers("moe_layers", high=layers - 1))
    if "interleave_moe_layer_step" in fields and listed != spaced:
        raise fields.contradiction("they place experts differently", "moe_layers", "interleave_moe_layer_step")
    return listed


def _mixers(fields: Fields, hidden: int, layers: int) -> list[Attention]:
    """Chunks where positions are rotary, all tokens where there are none."""
    plain = attention_of(fields, hidden, BIASED)
    chunk = fields.integer("attention_chunk_size", default=0, low=0)
    rotary = _rotary(fields, layers)
    by_default = [CHUNKED if rotated and chunk else FULL for rotated in rotary]
    types = layer_types(fields, layers, by_default, known=(FULL, CHUNKED))
    if CHUNKED in types and not chunk:
        raise fields.contradiction("layers attend in chunks of no size", "layer_types", "attention_chunk_size")
    return [replace(plain, local_chunk=chunk) if kind == CHUNKED else plain for kind in types]


def _rotary(fields: Fields, layers: int) -> list[bool]:
    """Whether each layer has rotary positions: 1 in the list of `no_rope_layers`, or all but every so many."""
    listed = fields.integers("no_rope_layers", default=[], high=1)
    if not listed:
        period = fields.integer("no_rope_layer_interval", default=4, high=4096)
        return [bool((layer + 1) % period) for layer in range(layers)]
    if len(listed) < layers:
        raise fields.contradiction(
            f"a list of {len(listed):,} for {layers:,} layers", "no_rope_layers", "num_hidden_layers"
        )
    return [bool(each) for each in listed[:layers]]


READERS: dict[str, Reader] = {
    "Llama4ForConditionalGeneration": llama4,
    "Llama4ForCausalLM": llama4,
    "llama4_text": llama4,
}
