"""Lists of what is known: machines with every rate, models with their shape, layouts and formats with their engines."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from hwprofiles import HardwareProfile, load_profile, profile_names
from hwprofiles.rates import Curve, Provenance, Rate
from twin.cost.roofline import Roofs
from twin.engines import engine_names, load_engine
from twin.layouts import layout_names, load_layout
from twin.models import ModelSpec, load_model, model_names
from twin.operations.counts import layer_active_parameters, layer_parameters, parameters
from twin.render.formats import format_json, format_text
from twin.render.text import table
from twin.units import GB, format_rate


def listed(kind: str, name: str | None, *, as_json: bool, hw: str | None = None) -> str:
    """All of a kind (`profile`, `model`, `layout` or `format`), or one by its name; UnknownName where there is none.

    `hw`: formats on that machine, and from where on each is faster than 16 bits.
    """
    if hw is not None:
        return _crossover(name, hw, as_json=as_json)
    shown: dict[str, tuple[Callable[[str | None], str], Callable[[str | None], str]]] = {
        "profile": (_profile_text, _profile_json),
        "model": (_model_text, _model_json),
        "layout": (_layout_text, _layout_json),
        "format": (format_text, lambda named: _dump(format_json(named))),
    }
    return shown[kind][as_json](name)


def _crossover(name: str | None, hw: str, *, as_json: bool) -> str:
    from twin.answers.crossover import crossover, kept  # noqa: PLC0415
    from twin.render.crossover import crossover_json, crossover_text  # noqa: PLC0415

    found = crossover(hw, formats=kept(name))
    return _dump(crossover_json(found)) if as_json else crossover_text(found)


def _profile_text(name: str | None) -> str:
    """All machines in a line each, or one with its rates."""
    if name is None:
        return table(("machine", "what it is"), [(each, load_profile(each).summary) for each in profile_names()])
    profile = load_profile(name)
    rows = [
        (key, _value(rate), f"{100 * rate.spread:.0f} %", str(rate.n), rate.source, rate.date, rate.note)
        for key, rate in _all_rates(profile).items()
    ]
    heads = ("rate", "value", "spread", "n", "source", "date", "note")
    return f"{profile.name}: {profile.summary}\n\n{table(heads, rows)}"


def _profile_json(name: str | None) -> str:
    """The same as JSON: a list of names and summaries, or the whole profile."""
    if name is None:
        return _dump([{"name": each, "summary": load_profile(each).summary} for each in profile_names()])
    return _dump(msgspec.to_builtins(load_profile(name)))


def _all_rates(profile: HardwareProfile) -> dict[str, Provenance]:
    capacities: dict[str, Provenance] = {
        "vram bytes": profile.gpu.vram,
        "host bytes": profile.host.memory,
        "host bytes reserved": profile.host.reserved,
    }
    return capacities | Roofs(profile).rates


def _value(rate: Provenance) -> str:
    if isinstance(rate, Curve):
        points = zip(rate.at, rate.efficiency, strict=True)
        return ", ".join(f"{efficiency:.3g} at {at:g}" for at, efficiency in points) + f" {rate.over}"
    return format_rate(rate.value, rate.unit) if isinstance(rate, Rate) else ""


def _model_text(name: str | None) -> str:
    """All models in a line each, or the shape of one."""
    if name is None:
        return table(("model", "what it is"), [(each, load_model(each).summary) for each in model_names()])
    model = load_model(name)
    shape = [(key, str(value)) for key, value in _facts(model).items()]
    return f"{model.name}: {model.summary}\n\n{table(('what', 'value'), shape)}"


def _facts(model: ModelSpec) -> dict[str, Any]:
    counts = parameters(model)
    ends = counts.head + counts.embedding
    total = ends + sum(layer_parameters(model, kind) for kind in model.layer_kinds)
    active = counts.head + sum(layer_active_parameters(model, kind) for kind in model.layer_kinds)
    attention = model.attention
    return {
        "parameters": f"{total / GB:.1f}e9, {active / GB:.2f}e9 active",
        "layers": f"{model.layers}, of which {model.attention_layers} keep a KV cache",
        "attention": f"{attention.query_heads} query heads, {attention.kv_heads} KV heads x {attention.head_dim}",
        "weights": f"{model.weights.format} at {model.weights.bits:g} bits",
        "native context": f"{model.native_ctx_tokens:,} tokens",
        "source": model.source,
    }


def _model_json(name: str | None) -> str:
    """The same as JSON: a list of names and summaries, or the whole description."""
    if name is None:
        return _dump([{"name": each, "summary": load_model(each).summary} for each in model_names()])
    return _dump(msgspec.to_builtins(load_model(name)))


def _layout_text(_: str | None) -> str:
    """All layouts with the engines that have them."""
    rows = [(row["name"], row["summary"], ", ".join(row["engines"])) for row in _layouts()]
    return table(("layout", "what it is", "engines"), rows)


def _layout_json(_: str | None) -> str:
    """The same as JSON."""
    return _dump(_layouts())


def _layouts() -> list[dict[str, Any]]:
    engines = [load_engine(name) for name in engine_names()]
    return [
        {
            "name": name,
            "summary": load_layout(name).summary,
            "engines": [engine.name for engine in engines if name in engine.layouts],
        }
        for name in layout_names()
    ]


def _dump(document: Any) -> str:
    return json.dumps(document, indent=2) + "\n"
