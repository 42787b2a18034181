"""What configurations of decoders have in common: sizes, heads, positions, kinds of layers, and layers put together."""

from collections.abc import Iterable, Sized

from twin.models.assembly import stacked
from twin.models.config.shape import Shape
from twin.models.fields import Fields
from twin.models.mixers import Attention, Mixer
from twin.models.spec import FeedForward, Layer

LAYERS = 4096
HEADS = 4096
WIDTH = 2**20
EXPERTS = 65536
VOCABULARY = 2**24

ROPE_KINDS = frozenset(
    {"default", "linear", "dynamic", "ntk", "yarn", "deepseek_yarn", "longrope", "su", "llama3", "mrope", "xdrope"}
    | {"interleaved_mrope", "proportional", "ntk-aware", "ntk_mixed", "gptj", "none"}
)
"""Ways to scale rotary positions that change angles and nothing else."""

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


def hidden_of(fields: Fields, *keys: str) -> int:
    """Width of the hidden state."""
    return fields.integer(*(keys or ("hidden_size", "n_embd", "d_model")), high=WIDTH)


def layers_of(fields: Fields, *keys: str) -> int:
    """Number of layers."""
    return fields.integer(*(keys or ("num_hidden_layers", "n_layer", "num_layers")), high=LAYERS)


def width_of(fields: Fields, *keys: str, default: int | None = None) -> int:
    """A width of vectors, such as that of a feed-forward."""
    return fields.integer(*(keys or ("intermediate_size",)), default=default, high=WIDTH)


def check_rope(fields: Fields) -> None:
    """Refuses by its name a way to scale rotary positions that is not known. Raises BadFile."""
    for key in ("rope_scaling", "rope_parameters"):
        table = fields.table(key)
        if table is None:
            continue
        # by kind of layer in newer files
        for inner in [table, *(each for name in table.raw if (each := _inner(table, name)) is not None)]:
            kind = inner.text("rope_type", "type", default="default")
            if kind not in ROPE_KINDS:
                raise inner.unknown("rope_type" if "rope_type" in inner else "type", kind)
            inner.checked(*inner.raw)


def _inner(table: Fields, name: str) -> Fields | None:
    return table.table(name) if isinstance(table.raw[name], dict) else None


QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def heads_of(
    fields: Fields,
    hidden: int,
    *,
    kv_heads: tuple[str, ...] = ("num_key_value_heads",),
    head_dim: tuple[str, ...] = ("head_dim",),
    head_dim_default: int | None = None,
) -> Attention:
    """Full attention of so many heads without biases. Raises BadFile where heads, KV heads and widths disagree."""
    query = fields.integer(*QUERY_HEADS, high=HEADS)
    kv = fields.integer(*kv_heads, default=query, high=HEADS) if kv_heads else query
    if query % kv:
        raise fields.contradiction("query heads are no multiple of KV heads", *present(fields, QUERY_HEADS, kv_heads))
    if any(key in fields for key in head_dim):
        width = fields.integer(*head_dim, high=WIDTH)
    elif head_dim_default is not None:
        width = head_dim_default
    elif hidden % query:
        keys = present(fields, ("hidden_size", "n_embd", "d_model"), QUERY_HEADS)
        raise fields.contradiction("the width is no multiple of the heads, and head_dim is missing", *keys)
    else:
        width = hidden // query
    return Attention(query_heads=query, kv_heads=kv, head_dim=width)


def present(fields: Fields, *alternatives: tuple[str, ...]) -> list[str]:
    """Of each list of alternative keys the one that is there."""
    return [next((key for key in keys if key in fields), keys[0]) for keys in alternatives]


def qkv_bias(attention: Attention) -> int:
    """Elements of biases of queries, keys and values."""
    return attention.query_heads * attention.head_dim + attention.kv_elements


def layer_types(
    fields: Fields,
    layers: int,
    default: Iterable[str] | None,
    *,
    known: Iterable[str] = (FULL, SLIDING),
    keys: tuple[str, ...] = ("layer_types",),
) -> list[str]:
    """Kind of each layer's mixer, as the file names them or by default; None: it has to. Raises BadFile."""
    types = fields.texts(*keys, default=None if default is None else [])
    if not types and default is not None:
        return list(default)[:layers]
    (key,) = present(fields, keys)
    check_number(fields, key, types, layers)
    check_known(fields, key, types, known)
    return types


def check_number(
    fields: Fields, key: str, listed: Sized, layers: int, *, layers_key: str = "num_hidden_layers"
) -> None:
    """Raises BadFile where a list has not one entry for each layer."""
    if len(listed) != layers:
        raise fields.contradiction(f"a list of {len(listed):,} for {layers:,} layers", key, layers_key)


def check_known(fields: Fields, key: str, listed: Iterable[str], known: Iterable[str]) -> None:
    """Raises BadFile where a list, or a text of letters, has an entry that is not known."""
    unknown = next((each for each in listed if each not in set(known)), None)
    if unknown is not None:
        raise fields.unknown(key, unknown, verb="has")


def expert_count(fields: Fields, *keys: str, default: int | None = None) -> int:
    """Number of routed experts."""
    return fields.integer(*(keys or ("num_experts", "num_local_experts")), default=default, high=EXPERTS)


def active_of(fields: Fields, experts: int, expert_key: str, *keys: str, default: int | None = None) -> int:
    """Experts that a token is sent to. Raises BadFile where there are not so many."""
    names = keys or ("num_experts_per_tok",)
    active = fields.integer(*names, default=default, high=EXPERTS)
    if active > experts:
        raise fields.contradiction(
            "a token is sent to more experts than there are", *present(fields, names), expert_key
        )
    return active


def vocabulary_of(fields: Fields, *keys: str) -> int:
    """Rows of the token embedding."""
    return fields.integer(*(keys or ("vocab_size",)), high=VOCABULARY)


def layered(mixers: Iterable[Mixer], feeds: Iterable[FeedForward | None], hidden: int) -> list[Layer]:
    """Layers of one mixer and one feed-forward each, with an RMS norm before both."""
    return [
        Layer(mixers=(mixer,), feed_forward=feed, vectors=2 * hidden) for mixer, feed in zip(mixers, feeds, strict=True)
    ]


def predicting(fields: Fields, layers: Iterable[Layer], hidden: int, *keys: str) -> dict[str, int]:
    """Parameters of heads for further tokens: these layers, what joins two states, and three norms, in each head.

    So far as they are none of the model's: an embedding and a head that the checkpoint holds once more are left out.
    Published totals of GLM-4.7, MiMo-7B and DeepSeek V3 come out to the unit.
    """
    number = fields.integer(*(keys or ("num_nextn_predict_layers",)), default=0, low=0, high=64)
    return {"mtp": number * (parameters_of(layers, hidden) + joining(hidden))} if number else {}


def parameters_of(layers: Iterable[Layer], hidden: int) -> int:
    """Parameters of layers, all experts included."""
    return int(sum(sum(layer.parameters(hidden).values()) for layer in layers))


def joining(hidden: int) -> int:
    """Parameters of the matrix by which a head for a further token joins two states, and of three norms."""
    return 2 * hidden**2 + 3 * hidden


CTX = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len", "n_ctx"),
    "model_max_length",
)
"""Keys of the context that a model was trained for, tokens."""


def shape_of(
    fields: Fields,
    layers: list[Layer],
    *,
    hidden: int,
    vectors: int,
    tied: bool,
    tables: int = 0,
    ctx: int | None = None,
    vocab: int | None = None,
    towers: dict[str, int] | None = None,
) -> Shape:
    """A model of these layers from the first to the last; `vectors` are the elements of norms outside of them.

    tied: whether the head is the embedding where the file does not say so.
    """
    check_rope(fields)
    kinds, order = stacked(layers)
    return Shape(
        hidden=hidden,
        vocab=vocabulary_of(fields) if vocab is None else vocab,
        layers=len(layers),
        kinds=kinds,
        order=order,
        native_ctx_tokens=fields.integer(*CTX) if ctx is None else ctx,
        tied=fields.flag("tie_word_embeddings", default=tied),
        vectors=vectors,
        tables=tables,
        towers=towers or {},
    )
