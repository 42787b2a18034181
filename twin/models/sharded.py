"""A model as one rank of tensor parallelism has it: heads, widths and the vocabulary divided, the rest whole.

What formulas count of it is a rank's, so that none of them needs the number of ranks. Whole on every rank: norms,
routers, indexers, compressed latent vectors with their projections, and matrices that a shape does not imply. A KV head
that there are fewer of than ranks is kept by several. Sources: vLLM 0.28 `model_executor/layers/linear.py`
(`QKVParallelLinear`), `vocab_parallel_embedding.py`, `mamba/mamba_utils.py` (groups), `config/model.py`
(`get_num_kv_heads`: at least one a rank).
"""

from msgspec.structs import replace

from twin.models.mixers import Attention, Mamba2, Mixer, mixer_tag
from twin.models.spec import Drafter, FeedForward, Layer, ModelSpec, Stored

_DIVIDED = {
    "latent_attention": ("query_heads",),
    "gated_delta_net": ("key_heads", "value_heads"),
    "kimi_delta": ("heads",),
    "mamba": ("inner",),
    "mamba2": ("heads",),
    "lightning_attention": ("heads",),
    "short_convolution": ("channels",),
}
"""Fields of each kind of mixer that ranks divide among themselves."""


def sharded(model: ModelSpec, ranks: int) -> ModelSpec:
    """What one of so many ranks has of the model. ValueError, in one line, where they cannot share it evenly."""
    if ranks == 1:
        return model
    exact = {
        part: Stored(format=model.weights.stored(part).format, bits=bits) for part, bits in model.part_bits.items()
    }
    weights = replace(model.weights, parts=model.weights.parts | exact, part_bytes={})
    return replace(
        model,
        vocab=_share(model.vocab, ranks),
        tables=_share(model.tables, ranks),
        towers={name: _share(size, ranks) for name, size in model.towers.items()},
        kinds={kind: _layer(layer, ranks) for kind, layer in model.kinds.items()},
        weights=weights,
        drafters=tuple(_drafter(drafter, ranks) for drafter in model.drafters),
    )


def staged(model: ModelSpec, first: int, layers: int) -> ModelSpec:
    """The model with so many of its layers from number `first` on; the norm behind the last is a part of it alone."""
    own = model.layer_kinds[first : first + layers]
    return replace(
        model,
        layers=len(own),
        kinds={kind: layer for kind, layer in model.kinds.items() if kind in own},
        order=tuple((kind, 1) for kind in own),
        vectors=model.vectors if first + layers == model.layers else 0,
        ngram=None,
    )


def _share(whole: int, ranks: int) -> int:
    """Of rows that are padded until ranks share them evenly."""
    return -(-whole // ranks)


def _even(whole: int, ranks: int, what: str) -> int:
    if whole % ranks:
        raise ValueError(f"{ranks} ranks do not share {whole:,} {what}")
    return whole // ranks


def _kept(whole: int, ranks: int, what: str) -> int:
    """Of what several ranks keep each where there are fewer than ranks."""
    if whole >= ranks:
        return _even(whole, ranks, what)
    if ranks % whole:
        raise ValueError(f"{ranks} ranks cannot keep {whole} {what} equally often")
    return 1


def _layer(layer: Layer, ranks: int) -> Layer:
    feed = layer.feed_forward
    return replace(
        layer,
        mixers=tuple(_mixer(mixer, ranks) for mixer in layer.mixers),
        feed_forward=_feed_forward(feed, ranks) if feed is not None else None,
    )


def _mixer(mixer: Mixer, ranks: int) -> Mixer:
    if isinstance(mixer, Attention):
        heads = _even(mixer.query_heads, ranks, "query heads")
        return replace(mixer, query_heads=heads, kv_heads=_kept(mixer.kv_heads, ranks, "KV heads"))
    names = _DIVIDED[mixer_tag(mixer)]
    own = {name: _even(getattr(mixer, name), ranks, name.replace("_", " ")) for name in names}
    if isinstance(mixer, Mamba2):
        own["groups"] = _kept(mixer.groups, ranks, "groups")
    return replace(mixer, **own)


def _feed_forward(feed: FeedForward, ranks: int) -> FeedForward:
    """Every expert is divided, and chosen as often; its width is padded where kernels pad it."""
    shared = _share(feed.shared_intermediate, ranks)
    width = _share(feed.intermediate, ranks) if feed.experts > 1 else _even(feed.intermediate, ranks, "intermediates")
    return replace(feed, intermediate=width, shared_intermediate=shared)


def _drafter(drafter: Drafter, ranks: int) -> Drafter:
    return replace(
        drafter,
        query_heads=_even(drafter.query_heads, ranks, "query heads of a drafter"),
        kv_heads=_kept(drafter.kv_heads, ranks, "KV heads of a drafter"),
        **{name: _share(getattr(drafter, name), ranks) for name in ("parameters", "weight_bytes", "head_bytes")},
    )
