"""Cache formats by name: their bits and bytes, and which engines keep them where."""

from typing import Any

import msgspec

from twin.engines import engine_names, load_engine
from twin.formats import KVFormat, Plane, format_names, is_exl3, kv_format
from twin.render.text import table

HEADS, HEAD_DIM = 4, 256
"""Shape for which a format's bytes are listed."""
_BYTES_OF = f"of a token in a layer of {HEADS} KV heads x {HEAD_DIM}, K and V with their scales"

_KINDS = {"plain": "as they are", "scaled": "by a scale", "rotated": "rotated, then by a scale"}


def format_text(name: str | None) -> str:
    """All formats in a line each, the many of exllamav3 in one, or one with all its planes."""
    if name is None:
        names = format_names()
        many = [each for each in names if is_exl3(each)]
        rows = [_format_row(_format_facts(kv_format(each))) for each in names if each not in many]
        first, last = (_format_facts(kv_format(each)) for each in (many[0], many[-1]))
        rows.append(tuple(_span(*ends) for ends in zip(_format_row(first), _format_row(last), strict=True)))
        heads = ("format", "K, V bits", "bytes *", "bits an element", "kept by", "least SM", "what it is")
        return table(heads, sorted(rows)) + f"  * {_BYTES_OF}\n"
    fmt = kv_format(name)
    facts = _format_facts(fmt)
    shape = [
        ("K", _plane(fmt.key)),
        ("V", _plane(fmt.value)),
        ("coded", _KINDS[fmt.kind]),
        *([("quantised", f"{fmt.tile_tokens} tokens together")] if fmt.tile_tokens > 1 else []),
        ("bytes", f"{facts['bytes']:,} {_BYTES_OF}"),
        ("bits an element", f"{facts['bits_per_element']:g}, scales included"),
        *(("kept by", each) for each in _kept_by(facts)),
        *(("backends", each) for each in _run_by(facts)),
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
                "layouts": [name for name in engine.layouts if fmt.name in engine.formats_of(name)],
                "backends": list(engine.backends_of(fmt.name)),
            }
            for engine in engines
            if fmt.name in {*engine.formats, *engine.host_formats}
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


def _run_by(facts: dict[str, Any]) -> list[str]:
    return [f"{each['engine']}: {', '.join(each['backends'])}" for each in facts["engines"] if each["backends"]]


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


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
