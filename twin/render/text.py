"""Answers as text: a headline that stands alone, and tables for those who want to know why."""

import io
from collections.abc import Iterable, Sequence

from hwprofiles.rates import Curve, Provenance, Rate
from twin.assumptions import ASSUMPTIONS
from twin.prediction import Phase, Prediction, Quantity
from twin.remedies import remedies
from twin.units import KIB, format_bytes, format_rate, format_seconds

SIGNIFICANT = 3


def headline(prediction: Prediction) -> str:
    """What was asked and what the answer is, a line each."""
    case, plan = prediction.case, prediction.memory
    ctx = case.question.ctx_tokens
    batch = f", {case.question.batch} sequences" if case.question.batch > 1 else ""
    placed, layers = case.layout.placement(case), case.model.attention_layers
    longest = f"{plan.max_ctx_tokens():,} tokens ({_pool_name(plan.limit().name)} ends it)"
    lines = [
        f"{case.model.name} on {prediction.machine.name}, {case.rules.name}",
        f"layout {case.layout.name}, {case.fmt.name} cache, {ctx:,} tokens of context{batch}",
        "",
        _row("fits", f"yes; longest context {longest}" if prediction.fits else f"NO: {plan.shortage()}"),
    ]
    if not prediction.fits:
        lines.append(_row("longest", longest if plan.max_ctx_tokens() else "not even one page of cache fits"))
    lines += _speeds(prediction)
    lines += [
        _row(
            "KV cache",
            f"{placed.vram_bytes * layers / KIB:.2f} KiB a token in VRAM, "
            f"{placed.host_bytes * layers / KIB:.2f} KiB on the host",
        ),
        *_memory_rows(prediction),
    ]
    if not prediction.fits:
        lines.append(_row("try", "; ".join(remedies(prediction))))
    return "\n".join(lines) + "\n"


def _speeds(prediction: Prediction) -> list[str]:
    decode, prefill = prediction.decode, prediction.prefill
    if decode is None or prefill is None or prediction.ttft_s is None:
        return []
    link = f"{format_bytes(decode.link_bytes)} a step, {format_bytes(prefill.link_bytes)} for the prefill"
    return [
        _row("decode", f"{_rate(decode.tokens_per_s)}, {format_seconds(decode.seconds.value)} a step"),
        _row("", f"wall: {_wall(decode)}"),
        _row("prefill", _rate(prefill.tokens_per_s)),
        _row("", f"wall: {_wall(prefill)}"),
        _row("first token", f"{format_seconds(prediction.ttft_s.value)} {_range(prediction.ttft_s, seconds=True)}"),
        *([_row("host reads", link)] if decode.link_bytes else []),
    ]


def _wall(phase: Phase) -> str:
    held = [part for part in phase.parts if part.wall == phase.bound]
    seconds = sum(part.seconds for part in held)
    if not seconds:
        return phase.bound
    share = f"{phase.bound}, {100 * seconds / phase.seconds.value:.0f} % of the time"
    sol_s = sum(part.sol_s for part in held)
    return f"{share}, at {100 * sol_s / seconds:.0f} % of its speed of light" if sol_s else share


def _memory_rows(prediction: Prediction) -> Iterable[str]:
    plan = prediction.memory
    for name, pools in (("VRAM", plan.devices()), ("host RAM", plan.host())):
        used = sum(pool.used_bytes(plan.pages) for pool in pools)
        there = sum(pool.capacity_bytes for pool in pools)
        yield _row(name, f"{format_bytes(used)} of {format_bytes(there)}")


def explain(prediction: Prediction) -> str:
    """Each part of each phase: time, speed of light, share, wall, and the rates it hangs on."""
    sections = []
    for title, phase in (("decode step", prediction.decode), ("prefill", prediction.prefill)):
        if phase is not None:
            sections += [f"{title}: {format_seconds(phase.seconds.value)}; wall: {_wall(phase)}", _parts_table(phase)]
    if prediction.sources:
        sections += ["rates", table(("rate", "value", "spread", "source", "from"), _rate_rows(prediction.sources))]
    sections += ["memory", _memory_table(prediction)]
    sections += ["assumptions", "\n".join(f"  {_assumption(key)}" for key in prediction.assumptions) + "\n"]
    return "\n".join(sections)


def _assumption(key: str) -> str:
    return f"{key:4s} {ASSUMPTIONS[key]}" if key in ASSUMPTIONS else key


def _parts_table(phase: Phase) -> str:
    rows = [
        (
            part.name,
            format_seconds(part.seconds),
            format_seconds(part.sol_s) if part.sol_s else "-",
            f"{100 * part.sol_s / part.seconds:.0f} %" if part.sol_s else "-",
            f"{100 * part.seconds / phase.seconds.value:.1f} %",
            part.wall,
            ", ".join(part.rates),
        )
        for part in phase.parts
        if part.seconds
    ]
    return table(("part", "time", "speed of light", "% of it", "share", "wall", "rates"), rows)


def _rate_rows(sources: dict[str, Provenance]) -> list[tuple[str, ...]]:
    return [
        (name, _value(rate), f"{100 * rate.spread:.0f} %", rate.source, ", ".join(rate.fitted_on) or rate.note)
        for name, rate in sources.items()
    ]


def _value(rate: Provenance) -> str:
    if isinstance(rate, Curve):
        return " / ".join(f"{efficiency:.3g}" for efficiency in rate.efficiency)
    return format_rate(rate.value, rate.unit) if isinstance(rate, Rate) else ""


def _memory_table(prediction: Prediction) -> str:
    plan = prediction.memory
    rows = [
        (pool.name, name, format_bytes(size)) for pool in plan.pools for name, size in pool.parts(plan.pages).items()
    ]
    rows += [
        (pool.name, "free", format_bytes(pool.capacity_bytes - pool.used_bytes(plan.pages))) for pool in plan.pools
    ]
    return table(("where", "part", "size"), sorted(rows, key=lambda row: row[0]))


def comparison(predictions: Sequence[Prediction]) -> str:
    """One column a layout."""
    heads = ("", *(each.case.layout.name for each in predictions))
    rows = [
        ("fits", *("yes" if each.fits else "no" for each in predictions)),
        ("longest context", *(f"{each.memory.max_ctx_tokens():,}" for each in predictions)),
        ("ended by", *(_pool_name(each.memory.limit().name) for each in predictions)),
        ("decode", *(_rate(each.decode.tokens_per_s) if each.decode else "-" for each in predictions)),
        ("prefill", *(_rate(each.prefill.tokens_per_s) if each.prefill else "-" for each in predictions)),
        ("first token", *(format_seconds(each.ttft_s.value) if each.ttft_s else "-" for each in predictions)),
        ("decode wall", *(each.decode.bound if each.decode else "-" for each in predictions)),
        ("prefill wall", *(each.prefill.bound if each.prefill else "-" for each in predictions)),
        ("host reads a step", *(format_bytes(each.decode.link_bytes) if each.decode else "-" for each in predictions)),
        *(_used_row(predictions, tier) for tier in ("VRAM", "host RAM")),
        ("why not", *(each.memory.shortage() or "-" for each in predictions)),
    ]
    case = predictions[0].case
    title = (
        f"{case.model.name} on {predictions[0].machine.name}, {case.rules.name}, {case.question.ctx_tokens:,} tokens"
    )
    return f"{title}\n\n{table(heads, rows)}"


def _used_row(predictions: Sequence[Prediction], tier: str) -> tuple[str, ...]:
    cells = []
    for each in predictions:
        pools = each.memory.devices() if tier == "VRAM" else each.memory.host()
        used = sum(pool.used_bytes(each.memory.pages) for pool in pools)
        cells.append(f"{format_bytes(used)} of {format_bytes(sum(pool.capacity_bytes for pool in pools))}")
    return (tier, *cells)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, as wide as they need to be."""
    from rich.console import Console  # noqa: PLC0415 - 40 ms that a headline does not need
    from rich.table import Table  # noqa: PLC0415

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for head in heads:
        grid.add_column(head, no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=400, color_system=None, markup=False, highlight=False, emoji=False).print(grid)
    return "\n".join(f"  {line.rstrip()}" for line in out.getvalue().splitlines()) + "\n"


def _row(name: str, text: str) -> str:
    return f"  {name:12s} {text}".rstrip()


def _pool_name(name: str) -> str:
    return "host memory" if name == "host" else f"VRAM of {name}"


def _rate(quantity: Quantity) -> str:
    return f"{_figures(quantity.value)} tok/s {_range(quantity)}"


def _range(quantity: Quantity, *, seconds: bool = False) -> str:
    if seconds:
        return f"({format_seconds(quantity.low)} to {format_seconds(quantity.high)})"
    return f"({_figures(quantity.low)} to {_figures(quantity.high)})"


def _figures(value: float) -> str:
    """Three significant figures, at least one decimal below 100."""
    return f"{value:,.0f}" if value >= 10**SIGNIFICANT / 10 else f"{value:.{SIGNIFICANT}g}"
