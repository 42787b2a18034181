"""A model as it was understood: its layers, parameters, weights and cache, and from which keys they follow."""

from typing import Any

import msgspec
from msgspec.structs import replace

from twin.cli.delivery import dump
from twin.errors import BadValue
from twin.models.fields import Understood
from twin.models.mixers import Attention, LatentAttention, mixer_name
from twin.models.rewritten import in_weights
from twin.models.spec import FeedForward, Layer, ModelSpec
from twin.models.store import model_summaries, understand
from twin.operations.counts import HALF_BYTES, state_bytes
from twin.render.catalogue import summaries
from twin.render.text import table
from twin.units import GB, GIB, KIB, MIB, format_bytes

SUMMARY_SCHEMA = "twin.model_summary/1"
CONTEXTS = (8192, 32768, 131072)


def listed(what: str | None, *, weights: str | None, as_json: bool, saves: bool) -> str:
    """All shipped models in a line each, or what is understood of one. Raises BadValue where options mean nothing."""
    if what is None:
        if weights is not None or saves:
            raise BadValue("--weights and --save need the name of a model", hint="twin models WHAT --save FILE")
        return summaries("model", model_summaries(), as_json=as_json)
    understood = _understood(what, weights)
    return dump(summary_json(understood)) if as_json else summary_text(understood)


def saved(what: str, *, weights: str | None) -> str:
    """The model in the project's own format: JSON of schema twin.model/2."""
    return msgspec.json.format(msgspec.json.encode(_understood(what, weights).spec), indent=1).decode() + "\n"


def _understood(what: str, weights: str | None) -> Understood:
    understood = understand(what)
    return understood if weights is None else replace(understood, spec=in_weights(understood.spec, weights))


def feed_forward_name(feed_forward: FeedForward | None) -> str:
    """What people call it, such as "8 of 128 experts of 768"."""
    if feed_forward is None:
        return "none"
    gated = "" if feed_forward.gated else ", not gated"
    if feed_forward.experts == 1:
        return f"dense {feed_forward.intermediate:,}{gated}"
    shared = f" and {feed_forward.shared_intermediate:,} shared" if feed_forward.shared_intermediate else ""
    return f"{feed_forward.active} of {feed_forward.experts} experts of {feed_forward.intermediate:,}{shared}{gated}"


def _mixers_name(layer: Layer) -> str:
    return " beside ".join(map(mixer_name, layer.mixers)) or "none"


def cache_bytes(model: ModelSpec, ctx_tokens: int) -> int:
    """Cache of one sequence of that many tokens in 16 bits, its states included; windows keep no more than they see."""
    growing = sum(
        count * mixer.cached_bytes(HALF_BYTES) * min(ctx_tokens, mixer.reach or ctx_tokens)
        for mixer, count in model.caches.items()
    )
    return growing + sum(count * state_bytes(mixer, HALF_BYTES) for mixer, count in model.states.items())


def summary_json(understood: Understood) -> dict[str, Any]:
    """The document of schema twin.model_summary/1."""
    model = understood.spec
    sizes = {part: round(size) for part, size in model.weight_bytes.items()}
    return {
        "schema": SUMMARY_SCHEMA,
        "name": model.name,
        "summary": model.summary,
        "layers": [
            {"mixer": _mixers_name(layer), "feed_forward": feed_forward_name(layer.feed_forward), "count": count}
            for layer, count in _layers(model)
        ],
        "parameters": {
            "total": int(sum(model.parameters.values())),
            "active": model.active_parameters,
            "parts": {part: int(count) for part, count in model.parameters.items() if count},
            "towers": model.towers,
        },
        "weight_bytes": {"total": sum(sizes.values()), "parts": sizes},
        "weights": {part: msgspec.to_builtins(model.weights.stored(part)) for part in sizes},
        "cache": {
            "bytes_per_token": cache_bytes(model, 1) - cache_bytes(model, 0),
            "fixed_bytes": cache_bytes(model, 0),
            "bytes_at": {str(tokens): cache_bytes(model, tokens) for tokens in CONTEXTS},
        },
        "native_ctx_tokens": model.native_ctx_tokens,
        "source": model.source,
        "origins": understood.origins,
        "ignored_fields": list(understood.ignored),
    }


def summary_text(understood: Understood) -> str:
    """The same as tables."""
    model = understood.spec
    total = int(sum(model.parameters.values()))
    facts = [
        ("parameters", f"{total:,} ({total / GB:.2f}e9), {model.active_parameters / GB:.2f}e9 active"),
        *((name, f"{count:,} parameters beside them") for name, count in model.towers.items()),
        ("weights", format_bytes(sum(model.weight_bytes.values()))),
        *_cache_facts(model),
        ("native context", f"{model.native_ctx_tokens:,} tokens"),
        ("source", model.source),
    ]
    layers = [
        (str(count), _mixers_name(layer), _heads(layer), feed_forward_name(layer.feed_forward))
        for layer, count in _layers(model)
    ]
    parts = [
        (
            part.replace("_", " "),
            f"{int(model.parameters[part]):,}",
            model.weights.stored(part).format,
            f"{model.part_bits[part]:.4g}",
            format_bytes(size),
        )
        for part, size in model.weight_bytes.items()
    ]
    blocks = [
        f"{model.name}: {model.summary}\n",
        table(("what", "value"), facts),
        table(("layers", "mixer", "heads", "feed-forward"), layers),
        table(("part", "parameters", "stored as", "bits", "size"), parts),
        table(("follows from", "value"), list(understood.origins.items())),
    ]
    if understood.ignored:
        blocks.append(f"ignored, since they change nothing: {', '.join(understood.ignored)}\n")
    return "\n".join(blocks)


def _layers(model: ModelSpec) -> list[tuple[Layer, int]]:
    return [(model.kinds[kind], count) for kind, count in model.kind_counts.items()]


def _heads(layer: Layer) -> str:
    """Heads of attention, and the size of states."""
    said: list[str] = []
    for mixer in layer.mixers:
        if isinstance(mixer, LatentAttention):
            said.append(f"{mixer.query_heads} over a latent of {mixer.kv_rank} + {mixer.rope_dim}")
        elif isinstance(mixer, Attention):
            value = f" and {mixer.value_width}" if mixer.value_width != mixer.head_dim else ""
            said.append(f"{mixer.query_heads} on {mixer.kv_heads} x {mixer.head_dim}{value}")
        else:
            said.append(f"state of {format_bytes(state_bytes(mixer, HALF_BYTES))}")
    return " beside ".join(said)


def _cache_facts(model: ModelSpec) -> list[tuple[str, str]]:
    rows = [
        (
            f"cache of {count} layers",
            f"{mixer_name(mixer)}: {count * mixer.cached_bytes(HALF_BYTES) / KIB:.2f} KiB a token in 16 bits",
        )
        for mixer, count in model.caches.items()
    ]
    if model.states:
        rows.append(("states", f"{cache_bytes(model, 0) / MIB:.2f} MiB of one sequence in 16 bits"))
    sizes = ", ".join(f"{cache_bytes(model, tokens) / GIB:.3g} GiB at {tokens:,}" for tokens in CONTEXTS)
    return [*rows, ("one sequence", sizes)]
