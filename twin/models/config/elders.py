"""Decoders of before Llama, and those that kept their own names for things: mostly LayerNorms, biases, two matrices.

Sources: the modeling files of transformers 5.24 by the names of the classes, and of the checkpoints where it has none.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    HEADS,
    check_number,
    heads_of,
    hidden_of,
    layers_of,
    qkv_bias,
    shape_of,
    vocabulary_of,
    width_of,
)
from twin.models.config.decoder import Style, decoder, dense_feeds, head_norms, mlp_bias
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import Attention
from twin.models.spec import FeedForward, Layer

_GPT_CTX = ("n_positions", "max_position_embeddings", "n_ctx", "seq_length")


def _uniform(
    fields: Fields,
    attention: Attention,
    feed: FeedForward,
    norms: int,
    *,
    hidden: int,
    last: int,
    tied: bool,
    ctx: int,
    tables: int = 0,
    vocab: int | None = None,
) -> Shape:
    """Equal layers with so many norm elements each, and `last` outside."""
    layer = Layer(mixers=(attention,), feed_forward=feed, vectors=norms)
    stack = [layer] * layers_of(fields, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return shape_of(fields, stack, hidden=hidden, vectors=last, tied=tied, ctx=ctx, tables=tables, vocab=vocab)


def _two_matrices(hidden: int, intermediate: int, *, biased: bool = True) -> FeedForward:
    """An MLP without a gate."""
    biases = mlp_bias(hidden, intermediate, gated=False) if biased else 0
    return FeedForward(intermediate=intermediate, gated=False, vectors=biases)


def gpt2(fields: Fields) -> Shape:
    """GPT-2 and GPT-BigCode: learned positions, biases everywhere, one KV head where multi_query says so."""
    hidden = hidden_of(fields, "n_embd", "hidden_size")
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=())
    if fields.raw.get("model_type") == "gpt_bigcode":
        default = 1 if fields.flag("multi_query", default=True) else attention.query_heads
        attention = replace(attention, kv_heads=fields.integer("num_key_value_heads", default=default, high=HEADS))
    attention = replace(attention, vectors=qkv_bias(attention) + hidden)
    feed = _two_matrices(hidden, width_of(fields, "n_inner", default=4 * hidden))
    ctx = fields.integer(*_GPT_CTX)
    return _uniform(
        fields, attention, feed, 4 * hidden, hidden=hidden, last=2 * hidden, tied=True, ctx=ctx, tables=ctx * hidden
    )


def gptj(fields: Fields) -> Shape:
    """GPT-J and CodeGen: attention without biases beside the MLP, behind one norm; the head has a bias."""
    hidden = hidden_of(fields, "n_embd", "hidden_size")
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=())
    feed = _two_matrices(hidden, width_of(fields, "n_inner", default=4 * hidden))
    ctx = fields.integer(*_GPT_CTX)
    shape = _uniform(fields, attention, feed, 2 * hidden, hidden=hidden, last=2 * hidden, tied=False, ctx=ctx)
    return replace(shape, vectors=shape.vectors + shape.vocab)


def opt(fields: Fields) -> Shape:
    """OPT: learned positions, of which two are padding; the embedding may be narrower than the layers."""
    hidden = hidden_of(fields)
    narrow = width_of(fields, "word_embed_proj_dim", default=hidden)
    if narrow != hidden:
        why = "an embedding of another width than the layers is not described here"
        raise fields.contradiction(why, "word_embed_proj_dim", "hidden_size")
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=())
    intermediate = width_of(fields, "ffn_dim")
    biased = fields.flag("enable_bias", default=True)
    norms = 2 * hidden if fields.flag("layer_norm_elementwise_affine", default=True) else 0
    final = fields.flag("do_layer_norm_before", default=True) and not fields.flag(
        "_remove_final_layer_norm", default=False
    )
    attention = replace(attention, vectors=qkv_bias(attention) + hidden if biased else 0)
    feed = _two_matrices(hidden, intermediate, biased=biased)
    ctx = fields.integer("max_position_embeddings")
    tables = (ctx + 2) * hidden
    last = norms if final else 0
    return _uniform(fields, attention, feed, 2 * norms, hidden=hidden, last=last, tied=True, ctx=ctx, tables=tables)


def bloom(fields: Fields) -> Shape:
    """BLOOM: biases everywhere, a norm behind the embedding; positions are a slope, so that no length is written."""
    hidden = hidden_of(fields, "hidden_size", "n_embed")
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=())
    attention = replace(attention, vectors=qkv_bias(attention) + hidden)
    fields.without_effect("apply_residual_connection_post_layernorm", "skip_bias_add", "skip_bias_add_qkv")
    fields.without_effect("attn_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "unk_token_id")
    ctx = fields.integer("seq_length", default=2048)
    feed = _two_matrices(hidden, 4 * hidden)
    return _uniform(fields, attention, feed, 4 * hidden, hidden=hidden, last=4 * hidden, tied=True, ctx=ctx)


def falcon(fields: Fields) -> Shape:
    """Falcon: one KV head, or groups in the new architecture; attention beside the MLP behind one norm or two."""
    hidden = hidden_of(fields)
    new = fields.flag("new_decoder_architecture", default=False)
    attention = heads_of(fields, hidden, kv_heads=("num_kv_heads", "n_head_kv") if new else (), head_dim=())
    if not new and fields.flag("multi_query", default=True):
        attention = replace(attention, kv_heads=1)
    fields.without_effect("num_kv_heads", "n_head_kv", "multi_query", "alibi")
    parallel = fields.flag("parallel_attn", default=True)
    norms = fields.integer("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
    intermediate = width_of(fields, "ffn_hidden_size", default=4 * hidden)
    biased = fields.flag("bias", default=False)
    attention = replace(attention, vectors=qkv_bias(attention) + hidden if biased else 0)
    feed = _two_matrices(hidden, intermediate, biased=biased)
    ctx = fields.integer("max_position_embeddings", default=2048)
    return _uniform(fields, attention, feed, 2 * norms * hidden, hidden=hidden, last=2 * hidden, tied=True, ctx=ctx)


def mpt(fields: Fields) -> Shape:
    """MPT: no biases at all, not in norms either; positions are a slope."""
    hidden = hidden_of(fields, "d_model")
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=())
    inner = fields.table("attn_config")
    if inner is not None:
        attention = replace(attention, kv_heads=inner.integer("kv_n_heads", default=attention.kv_heads, high=HEADS))
        inner.only("qk_ln", expected=False)
        inner.rest_without_effect()
    fields.only("no_bias", expected=True)
    fields.without_effect("learned_pos_emb", "embedding_fraction", "norm_type", "verbose")
    feed = FeedForward(intermediate=hidden * fields.integer("expansion_ratio", default=4, high=64), gated=False)
    ctx = fields.integer("max_seq_len")
    return _uniform(fields, attention, feed, 2 * hidden, hidden=hidden, last=hidden, tied=True, ctx=ctx)


def gpt_neo(fields: Fields) -> Shape:
    """GPT-Neo: learned positions, a bias on the output alone, and local attention in the layers that are named so."""
    hidden, layers = hidden_of(fields), layers_of(fields, "num_layers", "num_hidden_layers")
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=())
    kinds = fields.texts("attention_layers", default=[])
    check_number(fields, "attention_layers", kinds, layers, layers_key="num_layers")
    fields.without_effect("attention_types")
    window = fields.integer("window_size", default=256)
    feed = _two_matrices(hidden, width_of(fields, "intermediate_size", default=4 * hidden))
    mixer = replace(attention, vectors=hidden)
    local = replace(mixer, window=window)
    stack = [
        Layer(mixers=(local if kind == "local" else mixer,), feed_forward=feed, vectors=4 * hidden) for kind in kinds
    ]
    ctx = fields.integer("max_position_embeddings")
    return shape_of(fields, stack, hidden=hidden, vectors=2 * hidden, tied=True, ctx=ctx, tables=ctx * hidden)


def qwen(fields: Fields) -> Shape:
    """Qwen of the first generation: `intermediate_size` is that of the gate and the other together."""
    hidden = hidden_of(fields)
    attention = heads_of(fields, hidden, kv_heads=(), head_dim=("kv_channels",))
    attention = replace(attention, vectors=qkv_bias(attention))
    fields.only("no_bias", expected=True)
    intermediate = width_of(fields)
    if intermediate % 2:
        raise fields.wrong("intermediate_size", f"is {intermediate}, of which each of two matrices has half")
    feed = FeedForward(intermediate=intermediate // 2)
    ctx = fields.integer("seq_length", "max_position_embeddings")
    fields.without_effect("max_position_embeddings", "use_dynamic_ntk", "use_logn_attn", "bf16", "fp16", "fp32")
    fields.without_effect("softmax_in_fp32", "use_cache_quantization", "use_cache_kernel", "onnx_safe")
    return _uniform(fields, attention, feed, 2 * hidden, hidden=hidden, last=hidden, tied=False, ctx=ctx)


def chatglm(fields: Fields) -> Shape:
    """ChatGLM 2 and 3, and GLM-4 by its own code: RMS norms, a bias of queries, keys and values, grouped KV heads."""
    hidden = hidden_of(fields)
    grouped = fields.flag("multi_query_attention", default=False)
    kv = ("multi_query_group_num",) if grouped else ()
    attention = heads_of(fields, hidden, kv_heads=kv, head_dim=("kv_channels",))
    biased = fields.flag("add_qkv_bias", default=False)
    everywhere = fields.flag("add_bias_linear", default=False)
    norms = 1 if fields.flag("rmsnorm", default=True) else 2
    intermediate = width_of(fields, "ffn_hidden_size")
    vectors = (qkv_bias(attention) if biased or everywhere else 0) + (hidden if everywhere else 0)
    feed = FeedForward(intermediate=intermediate, vectors=mlp_bias(hidden, intermediate) if everywhere else 0)
    last = norms * hidden if fields.flag("post_layer_norm", default=True) else 0
    fields.without_effect("multi_query_group_num", "original_rope", "rope_ratio", "apply_query_key_layer_scaling")
    fields.without_effect("apply_residual_connection_post_layernorm", "bias_dropout_fusion", "fp32_residual_connection")
    return _uniform(
        fields,
        replace(attention, vectors=vectors),
        feed,
        2 * norms * hidden,
        hidden=hidden,
        last=last,
        tied=False,
        ctx=fields.integer("seq_length"),
        vocab=vocabulary_of(fields, "padded_vocab_size", "vocab_size"),
    )


_PHI = Style(
    qkv_bias=True,
    out_bias=True,
    head_bias=True,
    qk_norms=lambda attention: 2 * head_norms(attention),
    qk_norms_if=("qk_layernorm", False),
    norms=2,
    last_norms=2,
    feeds=dense_feeds(gated=False, bias=True),
)
_PERSIMMON = replace(_PHI, head_bias=False, qk_norms_if=("qk_layernorm", True), norms=4)
_NEOX = Style(
    qkv_bias=("attention_bias", True),
    out_bias=("attention_bias", True),
    norms=4,
    last_norms=2,
    feeds=dense_feeds(gated=False, bias=True),
)

READERS: dict[str, Reader] = {
    "GPT2LMHeadModel": gpt2,
    "gpt2": gpt2,
    "GPTBigCodeForCausalLM": gpt2,
    "gpt_bigcode": gpt2,
    "GPTJForCausalLM": gptj,
    "gptj": gptj,
    "CodeGenForCausalLM": gptj,
    "codegen": gptj,
    "OPTForCausalLM": opt,
    "opt": opt,
    "BloomForCausalLM": bloom,
    "bloom": bloom,
    "FalconForCausalLM": falcon,
    "RWForCausalLM": falcon,
    "falcon": falcon,
    "MptForCausalLM": mpt,
    "MPTForCausalLM": mpt,
    "mpt": mpt,
    "GPTNeoForCausalLM": gpt_neo,
    "gpt_neo": gpt_neo,
    "QWenLMHeadModel": qwen,
    "qwen": qwen,
    "ChatGLMModel": chatglm,
    "ChatGLMForConditionalGeneration": chatglm,
    "chatglm": chatglm,
    "PhiForCausalLM": (_phi := decoder(_PHI)),
    "phi": _phi,
    "PersimmonForCausalLM": (_persimmon := decoder(_PERSIMMON)),
    "persimmon": _persimmon,
    "GPTNeoXForCausalLM": (_neox := decoder(_NEOX)),
    "gpt_neox": _neox,
}
