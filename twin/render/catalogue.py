"""Lists of what is known: machines with every rate, layouts and formats with their engines."""

from collections.abc import Mapping
from typing import Any

import msgspec

from hwprofiles import load_profile, profile_names
from hwprofiles.ladder import Ladder, shipped_ladder
from hwprofiles.rates import Curve, Provenance, Rate
from twin.cli.delivery import dump
from twin.cost.mixed import roofs_of
from twin.engines import engine_names, load_engine
from twin.formats import KVFormat, Plane, format_names, is_exl3, kv_format
from twin.layouts import layout_names, load_layout
from twin.render.text import table
from twin.units import format_rate

HEADS, HEAD_DIM = 4, 256  # shape for which a format's bytes are listed
_BYTES_OF = f"of a token in a layer of {HEADS} KV heads x {HEAD_DIM}, K and V with their scales"

_KINDS = {"plain": "as they are", "scaled": "by a scale", "rotated": "rotated, then by a scale"}


def listed(kind: str, name: str | None, *, as_json: bool, hw: str | None = None) -> str:
    """All of a kind (`profile`, `layout`, `format`) or one; with `hw`, from where on formats are faster."""
    if hw is not None:
        from twin.answers.crossover import crossover, kept  # noqa: PLC0415
        from twin.render.comparison import crossover_json, crossover_text  # noqa: PLC0415

        found = crossover(hw, formats=kept(name))
        return dump(crossover_json(found)) if as_json else crossover_text(found)
    if kind == "format":
        return dump(format_json(name)) if as_json else format_text(name)
    return {"profile": _profile, "layout": _layout}[kind](name, as_json=as_json)


def summaries(head: str, lines: Mapping[str, str], *, as_json: bool) -> str:
    """All of a kind in a line each."""
    rows = [{"name": name, "summary": line} for name, line in lines.items()]
    return dump(rows) if as_json else table((head, "what it is"), [tuple(row.values()) for row in rows])


def _profile(name: str | None, *, as_json: bool) -> str:
    """All machines, or one with its rates."""
    if name is None:
        lines = {each: load_profile(each).summary for each in profile_names()}
        return summaries("machine", lines, as_json=as_json)
    profile = load_profile(name)
    if as_json:
        return dump(msgspec.to_builtins(profile))
    rates: dict[str, Provenance] = {f"vram bytes@{each.name}": each.gpu.vram for each in profile.devices}
    rates |= {} if profile.devices else {"vram bytes": profile.gpu.vram}
    rates |= {"host bytes": profile.host.memory, "host bytes reserved": profile.host.reserved}
    rates |= roofs_of(profile).rates
    rows = [
        (key, _value(rate), f"{100 * rate.spread:.0f} %", str(rate.n), rate.source, rate.date, rate.note)
        for key, rate in rates.items()
    ]
    heads = ("rate", "value", "spread", "n", "source", "date", "note")
    return f"{profile.name}: {profile.summary}\n\n{table(heads, rows)}"


def rungs(*, as_json: bool) -> str:
    """How far rates are off that nobody measured on a machine, and what leaving machines and engines out shows."""
    ladder = shipped_ladder()
    if not as_json:
        return rungs_text(ladder)
    spreads = {"carried": ladder.carried_spreads, "typical": ladder.typical_spreads}
    told = {"schema": "twin.rungs/1", "whole": ladder.whole, "spreads": spreads, "judged": ladder.judged}
    return dump(msgspec.to_builtins(told))


def rungs_text(ladder: Ladder) -> str:
    """The same as tables."""
    groups = [
        (rung, group, f"{100 * each.spread:.0f} %", str(each.n), str(each.machines), str(each.engines), each.note)
        for rung, spreads in (("carried", ladder.carried_spreads), ("typical", ladder.typical_spreads))
        for group, each in spreads.items()
    ]
    judged = [
        (each.rung, each.of, str(each.rows), str(each.machines), str(each.engines), f"{100 * each.median_error:.1f} %",
         f"{100 * each.coverage:.0f} %", f"{100 * each.half_width:.0f} %")
        for each in ladder.judged
    ]  # fmt: skip
    heads = ("rung", "of", "calls, steps", "machines", "engines", "median error", "90 % holds", "half-width")
    return (
        "what leaving each machine out (carried) and each engine out (typical) shows\n"
        + table(heads, judged)
        + f"\nwhole steps are off by {100 * ladder.whole.spread:.0f} % beside their kernels: {ladder.whole.note}\n"
        + "\nspreads of groups, for kernels that fewer than three machines tell of; of others their own\n"
        + table(("rung", "group", "spread", "values", "machines", "engines", "from"), groups)
    )


def _value(rate: Provenance) -> str:
    if isinstance(rate, Curve):
        points = zip(rate.at, rate.efficiency, strict=True)
        return ", ".join(f"{efficiency:.3g} at {at:g}" for at, efficiency in points) + f" {rate.over}"
    return format_rate(rate.value, rate.unit) if isinstance(rate, Rate) else ""


def _layout(_: str | None, *, as_json: bool) -> str:
    """All layouts with the engines that have them."""
    engines = {name: load_engine(name).layouts for name in engine_names()}
    rows = [
        (name, load_layout(name).summary, [engine for engine, layouts in engines.items() if name in layouts])
        for name in layout_names()
    ]
    if as_json:
        return dump([dict(zip(("name", "summary", "engines"), row, strict=True)) for row in rows])
    return table(("layout", "what it is", "engines"), [(name, what, ", ".join(by)) for name, what, by in rows])


def format_text(name: str | None) -> str:
    """All formats in a line each, the many of exllamav3 in one, or one with all its planes."""
    if name is None:
        names = format_names()
        many = [each for each in names if is_exl3(each)]
        rows = [_format_row(_format_facts(kv_format(each))) for each in names if each not in many]
        first, last = (_format_facts(kv_format(each)) for each in (many[0], many[-1]))
        ends = zip(_format_row(first), _format_row(last), strict=True)
        rows.append(tuple(low if low == high else f"{low} to {high}" for low, high in ends))
        heads = ("format", "K, V bits", "bytes *", "bits an element", "kept by", "least SM", "what it is")
        return table(heads, sorted(rows)) + f"  * {_BYTES_OF}\n"
    fmt = kv_format(name)
    facts = _format_facts(fmt)
    run_by = [(each["engine"], each["backends"]) for each in facts["engines"]]
    shape = [
        ("K", _plane(fmt.key)),
        ("V", _plane(fmt.value)),
        ("coded", _KINDS[fmt.kind]),
        *([("quantised", f"{fmt.tile_tokens} tokens together")] if fmt.tile_tokens > 1 else []),
        ("bytes", f"{facts['bytes']:,} {_BYTES_OF}"),
        ("bits an element", f"{facts['bits_per_element']:g}, scales included"),
        *(("kept by", each) for each in _kept_by(facts)),
        *(("backends", f"{name}: {', '.join(names)}") for name, names in run_by if names),
        ("least SM", facts["min_capability"] or "any"),
    ]
    return f"{fmt.name}: {fmt.summary}\n\n{table(('what', 'value'), shape)}"


def format_json(name: str | None) -> Any:
    """The same for JSON: a list of all, none folded, or one with its planes."""
    if name is None:
        return [_format_facts(kv_format(each)) for each in format_names()]
    fmt = kv_format(name)
    planes = {"key": msgspec.to_builtins(fmt.key), "value": msgspec.to_builtins(fmt.value)}
    return {**_format_facts(fmt), **planes, "tile_tokens": fmt.tile_tokens}


def _format_facts(fmt: KVFormat) -> dict[str, Any]:
    size = fmt.plane_bytes(kv_heads=HEADS, head_dim=HEAD_DIM)
    engines = [load_engine(name) for name in engine_names()]
    return {
        "name": fmt.name,
        "summary": fmt.summary,
        "kind": fmt.kind,
        "key_bits": fmt.key.bits,
        "value_bits": fmt.value.bits,
        "kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "bytes": size,
        "bits_per_element": 8 * size / (2 * HEADS * HEAD_DIM),
        "min_capability": fmt.min_capability or None,
        "engines": [
            {
                "engine": engine.name,
                "layouts": layouts,
                "backends": list(engine.backends_of(fmt.name)),
            }
            for engine in engines
            if (layouts := [name for name in engine.layouts if engine.keeps(fmt, name)])
        ],
    }


def _format_row(facts: dict[str, Any]) -> tuple[str, ...]:
    return (
        facts["name"],
        f"{facts['key_bits']}, {facts['value_bits']}",
        f"{facts['bytes']:,}",
        f"{facts['bits_per_element']:g}",
        "; ".join(_kept_by(facts)) or "no engine: --what-if",
        facts["min_capability"] or "any",
        facts["summary"].partition(": ")[0] if is_exl3(facts["name"]) else facts["summary"],
    )


def _kept_by(facts: dict[str, Any]) -> list[str]:
    return [f"{each['engine']} ({', '.join(each['layouts'])})" for each in facts["engines"]]


def _plane(plane: Plane) -> str:
    """Bits and what lies beside them."""
    parts = [f"{plane.bits} bits"]
    if plane.group_elements:
        parts.append(f"{plane.group_bytes} B for every {plane.group_elements} elements")
    if plane.head_bytes:
        parts.append(f"{plane.head_bytes} B for every token and head")
    if plane.channel_bytes:
        parts.append(f"{plane.channel_bytes} B for every channel of {plane.tile_tokens} tokens")
    return ", ".join(parts)
