"""Qwen4-Exp (Qwen3.8-Flash-Next): sparse attention, several residual streams, and a table of hashed n-grams.

Source: `modeling_qwen4_exp.py` of transformers 5.24.
"""

from itertools import count, islice

from msgspec.structs import replace

from twin.models.config.blocks import FULL, HEADS, LINEAR, WIDTH, hidden_of, layers_of, shape_of
from twin.models.config.hybrid import gated_attention, gated_delta_net, qwen_feeds, qwen_kinds
from twin.models.config.shape import Ngram, Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import Attention, Indexer, Mixer
from twin.models.spec import FeedForward, Layer


def qwen4_exp(fields: Fields) -> Shape:
    """Gated DeltaNet, and in every fourth layer attention to what an indexer chooses; experts everywhere.

    Streams are mixed before and after each half of a layer; what mixes them at the end is counted in the last layer.
    """
    hidden, layers = hidden_of(fields), layers_of(fields)
    fields.without_effect("output_gate_type", "seed", "split_ngram_parts", "mlp_only_layers")
    streams = fields.integer("hc_count", low=2, high=64)
    rank = fields.integer("hc_lowrank", high=WIDTH)
    mixers: dict[str, Mixer] = {FULL: _sparse_attention(fields, hidden), LINEAR: gated_delta_net(fields)}
    packed = streams * hidden
    mixing = 2 * packed * rank
    feeds = qwen_feeds(fields, hidden, layers)
    feeds = [_with_matrices(feed, 2 * (mixing + packed * streams)) for feed in feeds]
    feeds[-1] = _with_matrices(feeds[-1], mixing)
    norms = [2 * packed] * layers
    ngram = _ngram(fields, layers)
    if ngram is not None:
        width = ngram.rows_per_token * ngram.row_elements
        taps = fields.integer("ple_conv_kernel_size", default=4, low=1, high=64)
        feeds[ngram.before_layer] = _with_matrices(feeds[ngram.before_layer], width * (packed + hidden) + packed * taps)
        norms[ngram.before_layer] += 3 * packed
    stack = [
        Layer(mixers=(mixers[kind],), feed_forward=feed, vectors=vectors)
        for kind, feed, vectors in zip(qwen_kinds(fields, layers), feeds, norms, strict=True)
    ]
    shape = shape_of(fields, stack, hidden=hidden, vectors=packed, tied=False)
    return replace(shape, residual_streams=streams, ngram=ngram)


def _with_matrices(feed: FeedForward, matrices: int) -> FeedForward:
    return replace(feed, other_matrices=feed.other_matrices + matrices)


def _sparse_attention(fields: Fields, hidden: int) -> Attention:
    """Gated attention with an indexer, whose queries and keys are normed."""
    if fields.integer("indexer_kv_heads", default=1) != 1:
        raise fields.wrong("indexer_kv_heads", "is not 1, which is not known of this architecture")
    budget, ratio = fields.integer("indexer_budget"), fields.integer("indexer_compress_ratio", high=65536)
    if budget % ratio:
        raise fields.contradiction("the budget is no multiple of the ratio", "indexer_budget", "indexer_compress_ratio")
    indexer = Indexer(
        query_heads=fields.integer("indexer_n_heads", high=HEADS),
        head_dim=fields.integer("indexer_head_dim", high=WIDTH),
        budget=budget,
        ratio=ratio,
    )
    attention = gated_attention(fields, hidden)
    return replace(attention, indexer=indexer, vectors=attention.vectors + 2 * indexer.head_dim)


def _ngram(fields: Fields, layers: int) -> Ngram | None:
    """The table before the one layer that `ple_layer_ids` names, from 1 on: each head has a prime number of rows."""
    named = fields.integers("ple_layer_ids", default=[], low=1, high=layers)
    if not named:
        return None
    if len(named) > 1:
        raise fields.wrong("ple_layer_ids", "names several layers, which is not known of this architecture")
    heads = (fields.integer("ngram_size", low=2, high=16) - 1) * fields.integer("heads_per_ngram", high=HEADS)
    width = fields.integer("ple_embed_dim", high=WIDTH)
    if width % heads:
        raise fields.contradiction(f"{heads} heads do not share the width", "ple_embed_dim", "heads_per_ngram")
    base = fields.integer("ngram_vocab_size_base", low=2)
    multiple = fields.integer("make_ngram_vocab_size_divisible_by", default=1)
    rows = sum(islice(filter(_is_prime, count(base)), heads))
    padded = -(-rows // multiple) * multiple
    elements = width // heads
    return Ngram(parameters=padded * elements, row_elements=elements, rows_per_token=heads, before_layer=named[0] - 1)


def _is_prime(number: int) -> bool:
    return number == 2 or (number % 2 > 0 and all(number % odd for odd in range(3, int(number**0.5) + 1, 2)))


READERS: dict[str, Reader] = {
    "Qwen4ExpForConditionalGeneration": qwen4_exp,
    "Qwen4ExpForCausalLM": qwen4_exp,
    "qwen4_exp_text": qwen4_exp,
}
