"""From layers that were read to a whole model: kinds with names, their order, and one line that sums it up."""

from itertools import chain, count

import msgspec
from msgspec.structs import replace

from twin.models.mixers import Attention, LatentAttention, Mixer, mixer_name, mixer_tag
from twin.models.spec import FeedForward, Layer, ModelSpec

Order = tuple[tuple[str, int], ...]
"""Kinds of layers, and how many in a row; begun again at the end."""


def stacked(layers: list[Layer]) -> tuple[dict[str, Layer], Order]:
    """Kinds of layers with names such as "full" or "sliding_moe", and their order."""
    both = len({_has_experts(layer.feed_forward) for layer in layers if layer.feed_forward}) > 1
    names: dict[Layer, str] = {}
    for layer in layers:
        if layer not in names:
            base, taken = _name(layer, both=both), set(names.values())
            numbered = (f"{base}_{number}" for number in count(2))
            names[layer] = next(name for name in chain((base,), numbered) if name not in taken)
    return {name: layer for layer, name in names.items()}, in_runs([names[layer] for layer in layers])


def _name(layer: Layer, *, both: bool) -> str:
    """After the mixers; after the feed-forward as well where a model has `both` kinds of it, or the layer no mixer."""
    mixers = "_and_".join(_short(mixer) for mixer in layer.mixers)
    feed = ""
    if layer.feed_forward is not None and (both or not mixers):
        feed = "moe" if _has_experts(layer.feed_forward) else "dense"
    return "_".join(part for part in (mixers, feed) if part) or "empty"


def _has_experts(feed: FeedForward | None) -> bool:
    return feed is not None and feed.experts > 1


def _short(mixer: Mixer) -> str:
    if not isinstance(mixer, Attention):
        return "latent" if isinstance(mixer, LatentAttention) else mixer_tag(mixer)
    kind = "full"
    if mixer.window:
        kind = "sliding"
    elif mixer.local_chunk:
        kind = "chunked"
    elif mixer.indexer:
        kind = "sparse"
    return f"{kind}_shared" if mixer.shares_kv else kind


def in_runs(kinds: list[str]) -> Order:
    """Kinds of layers one after the other in runs, and only the first period where they repeat."""
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    for period in range(1, len(runs)):
        repeated = [kind for kind, number in (runs[:period] * (len(runs) // period + 1)) for _ in range(number)]
        if repeated[: len(kinds)] == kinds:
            return tuple(runs[:period])
    return tuple(runs)


def completed(spec: ModelSpec) -> ModelSpec:
    """The model with its summary, every number inside the ranges of the schema. Raises ValidationError."""
    return msgspec.convert(msgspec.to_builtins(replace(spec, summary=summary_of(spec))), ModelSpec)


def summary_of(spec: ModelSpec) -> str:
    """Such as "8.03B dense, full attention" or "30.5B with 3.35B active, 128 experts, full attention"."""
    total = _size(sum(spec.parameters.values()))
    feeds = [kind.feed_forward for kind in spec.kinds.values() if kind.feed_forward]
    experts = max((feed.experts for feed in feeds), default=1)
    size = (
        f"{total} with {_size(spec.active_parameters)} active, {experts:,} experts" if experts > 1 else f"{total} dense"
    )
    names: dict[str, int] = {}
    for mixer, layers in spec.mixers.items():
        names[mixer_name(mixer)] = names.get(mixer_name(mixer), 0) + layers
    if len(names) == 1:
        return f"{size}, {next(iter(names))}"
    mixed = (f"{layers} {'layer' if layers == 1 else 'layers'} of {name}" for name, layers in names.items())
    return ", ".join([size, *mixed])


def _size(parameters: float) -> str:
    """Three digits, as sizes of models are written."""
    for unit, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{sign}"
    return f"{parameters:,.0f}"
