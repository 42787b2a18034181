"""Decoders with multi-head latent attention: DeepSeek V2 and V3, and their kin.

Sources: the modeling files of transformers 5.24, by the names of the classes; the layout of the heads that predict
several tokens is that of DeepSeek V3's checkpoint.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    FULL,
    HEADS,
    LINEAR,
    WIDTH,
    active_of,
    check_known,
    check_number,
    expert_count,
    hidden_of,
    layer_types,
    layered,
    layers_of,
    predicting,
    present,
    shape_of,
    width_of,
)
from twin.models.config.experts import by_type
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import Indexer, KimiDelta, LatentAttention, Mixer
from twin.models.spec import FeedForward

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def deepseek(fields: Fields) -> Shape:
    """DeepSeek V2, V3, R1 and V3.1, Kimi K2, GLM-4.7-Flash; corrections of the router's scores are no parameters."""
    return _latent_model(fields)


def axk1(fields: Fields) -> Shape:
    """A.X K1: as DeepSeek V3, with a norm of what experts give."""
    return _latent_model(fields, normed=True)


def deepseek_v32(fields: Fields) -> Shape:
    """DeepSeek V3.2 and GLM-5: an indexer chooses the tokens that are attended to."""
    return _latent_model(fields, indexed=True)


def minicpm3(fields: Fields) -> Shape:
    """MiniCPM3 and Youtu: latent attention and dense feed-forwards; the head is the embedding."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    feed = FeedForward(intermediate=width_of(fields))
    stack = layered([latent_attention(fields, hidden)], [feed], hidden) * layers
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=True)


def kimi_linear(fields: Fields) -> Shape:
    """Kimi Linear: Kimi Delta Attention, and latent attention without positions in a few layers."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    linear = fields.table("linear_attn_config")
    if linear is None:
        delta = _kimi_delta(fields, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        kinds = layer_types(fields, layers, None, known=(FULL, LINEAR))
    else:
        delta = _kimi_delta(linear, "num_heads", "head_dim", "short_conv_kernel_size")
        kinds = _kimi_kinds(linear, layers)
        if "layer_types" in fields and layer_types(fields, layers, None, known=(FULL, LINEAR)) != kinds:
            raise fields.contradiction("they place attention differently", "layer_types", "linear_attn_config")
    mixers: dict[str, Mixer] = {FULL: latent_attention(fields, hidden), LINEAR: delta}
    stack = layered([mixers[kind] for kind in kinds], mixed_feeds(fields, layers), hidden)
    ctx = fields.integer("model_max_length", "max_position_embeddings")
    fields.without_effect("mla_use_nope")
    if fields.raw.get("num_nextn_predict_layers") == 0:
        fields.without_effect("num_nextn_predict_layers")
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False, ctx=ctx)


def _kimi_delta(fields: Fields, heads_key: str, width_key: str, kernel_key: str) -> KimiDelta:
    """Kimi Delta Attention with a bias a channel for its decays, a decay a head, and a norm of a head's output."""
    heads, head_dim = fields.integer(heads_key, high=HEADS), fields.integer(width_key, high=WIDTH)
    kernel = fields.integer(kernel_key, low=2, high=64)
    vectors = heads * head_dim + heads + head_dim
    return KimiDelta(heads=heads, head_dim=head_dim, conv_kernel=kernel, vectors=vectors)


def _kimi_kinds(linear: Fields, layers: int) -> list[str]:
    """Kinds of all layers from lists of those of either kind, which count from 1."""
    full = linear.integers("full_attn_layers", low=1)
    delta = linear.integers("kda_layers", low=1)
    if sorted(full + delta) != list(range(1, layers + 1)):
        raise linear.contradiction(f"they do not name each of {layers} layers once", "full_attn_layers", "kda_layers")
    return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]


def latent_attention(fields: Fields, hidden: int, indexer: Indexer | None = None) -> LatentAttention:
    """Latent attention with norms of the compressed vectors, and biases where attention_bias says so."""
    query_rank = fields.integer("q_lora_rank", default=0, low=0, high=WIDTH)
    kv_rank = fields.integer("kv_lora_rank", high=WIDTH)
    rope, nope = (fields.integer(f"qk_{part}_head_dim", high=WIDTH) for part in ("rope", "nope"))
    if fields.integer("qk_head_dim", default=rope + nope) != rope + nope:
        raise fields.contradiction("a key is its two parts", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim")
    # of no effect: every head has keys and values of its own, expanded from the compressed vector
    fields.without_effect("num_key_value_heads", "head_dim", "rope_interleave", "indexer_rope_interleave")
    biases = query_rank + kv_rank + rope + hidden if fields.flag("attention_bias", default=False) else 0
    norms = query_rank + kv_rank + (2 * indexer.head_dim if indexer and not indexer.shared else 0)
    return LatentAttention(
        query_heads=fields.integer("num_attention_heads", high=HEADS),
        kv_rank=kv_rank,
        rope_dim=rope,
        nope_dim=nope,
        value_dim=fields.integer("v_head_dim", high=WIDTH),
        query_rank=query_rank,
        indexer=indexer,
        vectors=norms + biases,
    )


def _latent_model(fields: Fields, *, indexed: bool = False, normed: bool = False) -> Shape:
    hidden, layers = hidden_of(fields), layers_of(fields)
    feeds = mixed_feeds(fields, layers)
    if normed:
        feeds = [replace(feed, vectors=feed.vectors + hidden) if feed.experts > 1 else feed for feed in feeds]
    mixers = [latent_attention(fields, hidden, each) for each in _indexers(fields, layers, indexed=indexed)]
    stack = layered(mixers, feeds, hidden)
    head = layered(mixers[:1], feeds[-1:], hidden)
    towers = predicting(fields, head, hidden, "num_nextn_predict_layers", "num_mtp_layers")
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False, towers=towers)


def _indexers(fields: Fields, layers: int, *, indexed: bool) -> list[Indexer | None]:
    """One for each layer; GLM's later layers may attend to what an earlier layer chose."""
    if not indexed:
        return [None] * layers
    full, shared = (
        Indexer(
            query_heads=fields.integer("index_n_heads", high=HEADS),
            head_dim=fields.integer("index_head_dim", high=WIDTH),
            budget=fields.integer("index_topk"),
            ratio=1,
            weighted=True,
            shared=shared,
        )
        for shared in (False, True)
    )
    return [shared if kind == "shared" else full for kind in _indexer_kinds(fields, layers)]


def _indexer_kinds(fields: Fields, layers: int) -> list[str]:
    for key in ("indexer_types", "index_topk_pattern"):
        if key not in fields:
            continue
        listed = fields.texts(key) if isinstance(fields.raw[key], list) else list(fields.text(key))
        kinds = [{"F": "full", "S": "shared"}.get(each, each) for each in listed]
        check_number(fields, key, kinds, layers)
        check_known(fields, key, kinds, ("full", "shared"))
        if kinds[0] != "full":
            raise fields.wrong(key, "begins with a layer that shares, and there is none before it")
        return kinds
    period = fields.integer("index_topk_freq", default=1, high=layers)
    offset = fields.integer("index_skip_topk_offset", default=2, low=1)
    return ["full" if max(layer - offset + 1, 0) % period == 0 else "shared" for layer in range(layers)]


def mixed_feeds(fields: Fields, layers: int) -> list[FeedForward]:
    """Dense feed-forwards in the first layers and experts in the others.

    DeepSeek's own code has experts in every `moe_layer_freq`-th of the others; a list of kinds says it layer by layer.
    """
    dense = FeedForward(intermediate=width_of(fields))
    if not any(key in fields for key in _EXPERTS):
        return [dense] * layers
    each = by_type(_by_frequency)(fields, layers)
    sparse = _experts(fields)
    return [dense if alone else sparse for alone in each]


def _by_frequency(fields: Fields, layers: int) -> list[bool]:
    first = fields.integer("first_k_dense_replace", low=0)
    period = fields.integer("moe_layer_freq", default=1)
    dense = [layer < first or layer % period != 0 for layer in range(layers)]
    if all(dense):
        key = "first_k_dense_replace" if first >= layers else "moe_layer_freq"
        raise fields.contradiction("no layer is left for its experts", key, "num_hidden_layers")
    return dense


def _experts(fields: Fields) -> FeedForward:
    """Experts of `moe_intermediate_size`, and shared ones of the same size that always run."""
    count = expert_count(fields, *_EXPERTS)
    active = active_of(fields, count, *present(fields, _EXPERTS), "num_experts_per_tok", "num_experts_per_token")
    intermediate = width_of(fields, "moe_intermediate_size")
    shared = _shared(fields)
    fields.without_effect("ep_size", "moe_router_activation_func", "moe_renormalize", "use_grouped_topk")
    return FeedForward(
        intermediate=intermediate,
        experts=count,
        active=active,
        shared_intermediate=shared * intermediate,
    )


def _shared(fields: Fields) -> int:
    """Experts that always run: null says none, and a key that is missing says nothing."""
    names = ("n_shared_experts", "num_shared_experts")
    null = any(key in fields.raw and key not in fields for key in names)
    return 0 if null else fields.integer(*names, low=0, high=1024)


READERS: dict[str, Reader] = {
    "DeepseekV2ForCausalLM": deepseek,
    "deepseek_v2": deepseek,
    "Mistral4ForCausalLM": deepseek,
    "mistral4": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "SarvamMLAForCausalLM": deepseek,
    "sarvam_mla": deepseek,
    "AXK1ForCausalLM": axk1,
    "axk1": axk1,
    "YoutuForCausalLM": minicpm3,
    "youtu": minicpm3,
    "Glm4MoeLiteForCausalLM": deepseek,
    "glm4_moe_lite": deepseek,
    "DeepseekV32ForCausalLM": deepseek_v32,
    "deepseek_v32": deepseek_v32,
    "GlmMoeDsaForCausalLM": deepseek_v32,
    "glm_moe_dsa": deepseek_v32,
    "MiniCPM3ForCausalLM": minicpm3,
    "minicpm3": minicpm3,
    "KimiLinearForCausalLM": kimi_linear,
    "kimi_linear": kimi_linear,
}
