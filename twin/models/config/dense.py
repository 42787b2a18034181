"""Dense decoders whose layer is attention and a gated feed-forward behind RMS norms: Llama and its kin.

Sources: the modeling files of transformers 5.24, by the names of the classes.
"""

from twin.models.config.blocks import (
    heads_of,
    hidden_of,
    layers_of,
    qkv_bias,
    shape_of,
    width_of,
    with_vectors,
)
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.spec import FeedForward, Layer


def llama(fields: Fields) -> Shape:
    """Llama: biases only where attention_bias and mlp_bias say so (on all four, and all three, matrices)."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    attention, intermediate = heads_of(fields, hidden), width_of(fields)
    biases = qkv_bias(attention) + hidden if fields.flag("attention_bias", default=False) else 0
    mlp = 2 * intermediate + hidden if fields.flag("mlp_bias", default=False) else 0
    feed = FeedForward(intermediate=intermediate, vectors=mlp)
    layer = Layer(mixers=(with_vectors(attention, biases),), feed_forward=feed, vectors=2 * hidden)
    return shape_of(fields, [layer] * layers, hidden=hidden, vectors=hidden, tied=False)


READERS: dict[str, Reader] = {"LlamaForCausalLM": llama, "llama": llama}
