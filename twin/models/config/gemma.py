"""Gemma 1 to 4: windows in between full attention, norms on both sides of a layer's halves, embeddings of each layer.

Sources: the modeling files of transformers 5.24, by the names of the classes.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    FULL,
    SLIDING,
    WIDTH,
    active_of,
    check_number,
    expert_count,
    hidden_of,
    layer_types,
    layered,
    layers_of,
    shape_of,
    vocabulary_of,
    width_of,
)
from twin.models.config.decoder import BIASED, attention_of, head_norms
from twin.models.config.shape import Reader, Shape
from twin.models.config.windows import of_types
from twin.models.fields import Fields
from twin.models.mixers import Attention
from twin.models.spec import FeedForward, Layer

_GEMMA3_UNSAID = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Published files of Gemma 3 leave out what `Gemma3TextConfig` has by default."""


def gemma(fields: Fields) -> Shape:
    """Gemma 1: full attention."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    stack = layered([_biased(fields, hidden)], [_feed(fields)], hidden) * layers
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=True)


def gemma2(fields: Fields) -> Shape:
    """Gemma 2: every second layer, from the first on, has a window."""
    if "sliding_window_size" in fields and fields.integer("sliding_window_size") != fields.integer("sliding_window"):
        raise fields.contradiction("both are the window", "sliding_window_size", "sliding_window")
    return _windowed(fields, period=2)


def gemma3(fields: Fields) -> Shape:
    """Gemma 3: five layers with a window to one without, norms of queries and keys."""
    fields.raw = _GEMMA3_UNSAID | fields.raw
    fields.without_effect("_sliding_window_pattern")
    period = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _windowed(fields, period=period, head_normed=True)


def _windowed(fields: Fields, *, period: int, head_normed: bool = False) -> Shape:
    hidden, layers = hidden_of(fields), layers_of(fields)
    plain = _biased(fields, hidden)
    if head_normed:
        plain = _head_normed(plain)
    spaced = every(layers, period)
    types = layer_types(fields, layers, spaced)
    if "sliding_window_pattern" in fields and types != spaced:
        raise fields.contradiction("they place windows differently", "layer_types", "sliding_window_pattern")
    stack = [
        Layer(mixers=(each,), feed_forward=_feed(fields), vectors=4 * hidden)
        for each in _with_windows(fields, plain, types)
    ]
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=True)


def every(layers: int, period: int) -> list[str]:
    """Windows, and full attention in every `period`-th layer."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]


def _with_windows(fields: Fields, attention: Attention, types: list[str]) -> list[Attention]:
    return [replace(attention, window=window) for window in of_types(fields, types)]


def _biased(fields: Fields, hidden: int) -> Attention:
    """Attention with biases where attention_bias says so; attention to both sides is refused."""
    if fields.raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise fields.wrong("use_bidirectional_attention", "is set: a model that attends to both sides decodes nothing")
    fields.without_effect("use_bidirectional_attention")
    return attention_of(fields, hidden, BIASED)


def _feed(fields: Fields) -> FeedForward:
    return FeedForward(intermediate=width_of(fields))


def gemma3n(fields: Fields) -> Shape:
    """Gemma 3n: AltUp's residual streams, Laurel, embeddings of each layer, caches that later layers share.

    The matrices that make the streams before the first layer and join them after the last are counted in those layers.
    """
    hidden, layers = hidden_of(fields), layers_of(fields)
    streams = fields.integer("altup_num_inputs", high=64)
    laurel = fields.integer("laurel_rank", high=WIDTH)
    own = fields.integer("hidden_size_per_layer_input", high=WIDTH)
    fields.without_effect("altup_active_idx", "altup_coef_clip", "activation_sparsity_pattern")
    scale = hidden if fields.flag("altup_correct_scale", default=True) else 0
    matrices = streams * hidden + streams**3 + streams**2 + 2 * hidden * laurel + _own_matrices(hidden, own)
    types = layer_types(fields, layers, every(layers, 5))
    plain = _biased(fields, hidden)
    mixers = _sharing(fields, types, [_head_normed(each) for each in _with_windows(fields, plain, types)])
    ends = (streams - 1) * hidden**2
    stack = [
        Layer(
            mixers=(mixer,),
            feed_forward=FeedForward(
                intermediate=width,
                other_matrices=matrices + ends * ((number == 0) + (number == layers - 1)),
            ),
            # around both halves, of Laurel, of the router and of what the layer's embedding adds
            vectors=4 * hidden + hidden + hidden + hidden + scale,
        )
        for number, (mixer, width) in enumerate(zip(mixers, _widths(fields, layers), strict=True))
    ]
    tables = _own_vocabulary(fields) * layers * own
    shape = shape_of(fields, stack, hidden=hidden, vectors=hidden + own, tied=True, tables=tables)
    return replace(shape, residual_streams=streams)


def _own_matrices(hidden: int, own: int) -> int:
    """Of one layer's embedding: its part of the projection from the token's, its gate, and the way back."""
    return 3 * hidden * own


def _own_vocabulary(fields: Fields) -> int:
    return vocabulary_of(fields, "vocab_size_per_layer_input")


def _widths(fields: Fields, layers: int) -> list[int]:
    """Widths of feed-forwards, one for all or one for each layer."""
    if not isinstance(fields.raw.get("intermediate_size"), list):
        return [width_of(fields)] * layers
    widths = fields.integers("intermediate_size", low=1, high=WIDTH)
    check_number(fields, "intermediate_size", widths, layers)
    return widths


def _head_normed(attention: Attention) -> Attention:
    return replace(attention, vectors=attention.vectors + head_norms(attention))


def _sharing(fields: Fields, types: list[str], mixers: list[Attention]) -> list[Attention]:
    """The last layers read the cache of the last layer of their kind that has one, and have no keys and values."""
    shared = fields.integer("num_kv_shared_layers", default=0, low=0)
    own = len(mixers) - shared
    if own < 1 or not set(types[own:]) <= set(types[:own]):
        raise fields.contradiction(
            "a layer that shares has none of its kind to share with", "num_kv_shared_layers", "num_hidden_layers"
        )
    if shared and any(mixer.vectors != head_norms(mixer) for mixer in mixers):
        raise fields.wrong(
            "attention_bias", "is true where layers share keys and values, which is not known of this architecture"
        )
    return mixers[:own] + [
        replace(mixer, shares_kv=True, values_from_keys=False, vectors=mixer.head_dim) for mixer in mixers[own:]
    ]


def gemma4(fields: Fields) -> Shape:
    """Gemma 4: wider heads where attention is full, there perhaps values of keys' matrix, and perhaps experts."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    types = layer_types(fields, layers, every(layers, 6))
    if types[-1] != FULL:
        raise fields.wrong("layer_types", "ends without full_attention, which is not known of this architecture")
    own = fields.integer("hidden_size_per_layer_input", default=256, low=0, high=WIDTH)
    mixers = _sharing(fields, types, _gemma4_mixers(fields, hidden, types))
    double = fields.flag("use_double_wide_mlp", default=False)
    stack = [
        Layer(
            mixers=(mixer,),
            feed_forward=_gemma4_feed(fields, hidden, own, wider=double and mixer.shares_kv),
            vectors=4 * hidden + (hidden if own else 0),
        )
        for mixer in mixers
    ]
    tables = _own_vocabulary(fields) * layers * own if own else 0
    fields.without_effect("vocab_size_per_layer_input", "expert_intermediate_size")
    return shape_of(fields, stack, hidden=hidden, vectors=hidden + own, tied=True, tables=tables)


def _gemma4_mixers(fields: Fields, hidden: int, types: list[str]) -> list[Attention]:
    near = _biased(fields, hidden)
    alike = fields.flag("attention_k_eq_v", default=False)
    width = fields.integer("global_head_dim", default=512, high=WIDTH)
    # whose number of KV heads is their own where one matrix makes keys and values
    heads = fields.integer("num_global_key_value_heads", default=near.kv_heads) if alike else near.kv_heads
    fields.without_effect("num_global_key_value_heads")
    if near.query_heads % heads:
        raise fields.contradiction(
            "query heads are no multiple of KV heads", "num_attention_heads", "num_global_key_value_heads"
        )
    far = replace(near, head_dim=width, kv_heads=heads, values_from_keys=alike)
    return [_head_normed(replace(near, window=window) if window else far) for window in of_types(fields, types)]


def _gemma4_feed(fields: Fields, hidden: int, own: int, *, wider: bool) -> FeedForward:
    """Dense; or experts beside it, with norms of both, a scale a channel of the router, and a scale an expert."""
    width = width_of(fields) * (2 if wider else 1)
    matrices = _own_matrices(hidden, own)
    if not fields.flag("enable_moe_block", default=False):
        fields.without_effect("num_experts", "top_k_experts", "moe_intermediate_size")
        return FeedForward(intermediate=width, other_matrices=matrices)
    experts = expert_count(fields, "num_experts")
    return FeedForward(
        intermediate=width_of(fields, "moe_intermediate_size"),
        experts=experts,
        active=active_of(fields, experts, "num_experts", "top_k_experts"),
        shared_intermediate=width,
        vectors=4 * hidden + experts,
        other_matrices=matrices,
    )


READERS: dict[str, Reader] = {
    "GemmaForCausalLM": gemma,
    "gemma": gemma,
    "Gemma2ForCausalLM": gemma2,
    "gemma2": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "gemma3_text": gemma3,
    "Gemma3nForCausalLM": gemma3n,
    "Gemma3nForConditionalGeneration": gemma3n,
    "gemma3n_text": gemma3n,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
    "gemma4_text": gemma4,
}
