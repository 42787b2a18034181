"""Answers as text: a headline that stands alone, and tables for those who want to know why."""

from collections.abc import Callable, Sequence
from unicodedata import combining, east_asian_width

from hwprofiles.rates import Curve, Provenance, Rate
from twin.answers.remedies import remedies
from twin.ask.case import Case
from twin.assumptions import ASSUMPTIONS
from twin.memory.memory import Memory
from twin.memory.plan import MemoryPlan
from twin.prediction import Phase, Prediction, Quantity
from twin.units import KIB, format_bytes, format_rate, format_seconds

SIGNIFICANT = 3
TIERS = {"host memory": "host RAM"}  # memories that a row calls otherwise than a sentence


def headline(prediction: Prediction) -> str:
    """What was asked and what the answer is, a line each."""
    case, plan = prediction.case, prediction.memory
    ctx = case.question.ctx_tokens
    batch = f", {case.question.batch} sequences" if case.question.batch > 1 else ""
    placed = plan.token_bytes
    longest = f"{plan.max_ctx_tokens():,} tokens ({ended_by(plan)} ends it)"
    lines = [
        f"{case.model.name} on {prediction.machine.name}, {case.rules.title}",
        f"layout {case.layout.name}, {case.fmt.name} cache{_on(case)}, {ctx:,} token{plural(ctx)} of context{batch}",
        *_shared(prediction),
        *_drafted(case),
        "",
        row("fits", f"yes; longest context {longest}" if prediction.fits else f"NO: {plan.shortage()}"),
    ]
    if not prediction.fits:
        lines.append(row("longest", longest if plan.max_ctx_tokens() else _no_page(plan)))
    lines += [row("note", each) for each in prediction.notes]
    lines += _speeds(prediction)
    vram_kib, host_kib = placed.vram_bytes / KIB, placed.host_bytes / KIB
    lines += [
        row("KV cache", f"{vram_kib:.2f} KiB a token in VRAM, {host_kib:.2f} KiB on the host"),
        *_pooled(prediction),
        *(row(TIERS.get(name, name), used_of(plan, pools)) for name, pools in plan.tiers()),
    ]
    if not prediction.fits:
        lines.append(row("try", "; ".join(remedies(prediction))))
    return "\n".join(lines) + "\n"


def _no_page(plan: MemoryPlan) -> str:
    pool, device = plan.kv_pool, plan.devices()[0]
    if pool is not None and device.held_bytes > device.capacity_bytes:
        return f"none: the device has no room for a pool of {format_bytes(pool.pool_bytes)}"
    return "not even one page of cache fits"


def _on(case: Case) -> str:
    """The attention backend, and that of verify steps where it is another."""
    verify = f" (verify on {case.verify_backend})" if case.speculation and case.verify_backend != case.backend else ""
    return f" on {case.backend}{verify}" if case.backend else ""


def _shared(prediction: Prediction) -> list[str]:
    """How devices share the model, where ranks do or stages were asked for."""
    case, asked = prediction.case, prediction.case.question
    stages = case.stages(prediction.machine.gpu_count)
    if case.tp == 1 and (stages == 1 or (asked.pp is None and asked.split is None)):
        return []
    ways = [f"each layer shared by {case.tp} ranks"] if case.tp > 1 else []
    ways += [f"layers in {stages} stages"] if stages > 1 else []
    usual = "" if asked.tp or asked.pp or asked.split else f", as {case.rules.name} does unless told otherwise"
    return [f"{' and '.join(ways)}{usual}"]


def _drafted(case: Case) -> list[str]:
    speculation = case.speculation
    if speculation is None:
        return []
    yields = f"a step yields {speculation.accepted:.3g} of {speculation.tokens + 1} ({speculation.source})"
    return [f"{speculation.drafter.name} drafts {speculation.tokens} tokens; {yields}"]


def _pooled(prediction: Prediction) -> list[str]:
    """What an engine with a block pool prints when it starts."""
    pool = prediction.memory.kv_pool
    if pool is None:
        return []
    blocks = f"{pool.blocks:,} blocks of {pool.plan.holds} ({format_bytes(pool.plan.block_bytes)})"
    prints = f"{pool.printed_tokens:,} tokens, {pool.concurrency:.2f} x {pool.max_model_tokens:,}"
    sizes = ((pool.window_tokens, "tokens of windows"), (pool.states, "sequences' states"))
    beside = ", ".join(f"{size:,} {what}" for size, what in sizes if size)
    return [row("block pool", f"{blocks}; prints {prints}"), *([row("", f"beside it {beside}")] if beside else [])]


def _speeds(prediction: Prediction) -> list[str]:
    decode, prefill, ttft_s = prediction.decode, prediction.prefill, prediction.ttft_s
    lines = []
    if decode is not None:
        lines.append(row("decode", f"{rate(decode.tokens_per_s)}, {format_seconds(decode.seconds.value)} a step"))
        lines.append(row("", f"wall: {_wall(decode)}"))
    if prediction.break_even is not None:
        lines.append(row("", f"drafting pays from {prediction.break_even:.2f} tokens a step on"))
    if prefill is not None and prefill.seconds.value:
        lines += [row("prefill", rate(prefill.tokens_per_s)), row("", f"wall: {_wall(prefill)}")]
    elif prefill is not None:
        lines.append(row("prefill", "none: the first decode step takes the whole prompt"))
    if ttft_s is not None:
        lines.append(row("first token", f"{format_seconds(ttft_s.value)} {_range(ttft_s, format_seconds)}"))
    if decode is not None and decode.link_bytes:
        after = f", {format_bytes(prefill.link_bytes)} for the prefill" if prefill else ""
        lines.append(row("host reads", f"{format_bytes(decode.link_bytes)} a step{after}"))
    lines += [row(name, f"not predicted: {why}") for name, why in prediction.not_predicted.items()]
    return lines + _standing(prediction)


def _standing(prediction: Prediction) -> list[str]:
    """On what the speeds stand, where not all of it was measured on the machine."""
    if not prediction.rungs:
        return []
    standing = prediction.standing()
    counted = [f"{len(keys)} {rung}" for rung, keys in standing.items()]
    return [row("rates", f"{', '.join(counted)} of {sum(map(len, standing.values()))} kernels; --explain names them")]


def _wall(phase: Phase) -> str:
    held = [part for part in phase.parts if part.wall == phase.bound]
    seconds = sum(part.seconds for part in held)
    if not seconds:
        return phase.bound
    share = f"{phase.bound}, {100 * seconds / phase.seconds.value:.0f} % of the time"
    sol_s = sum(part.sol_s for part in held)
    return f"{share}, at {100 * sol_s / seconds:.0f} % of its speed of light" if sol_s else share


def explain(prediction: Prediction) -> str:
    """Each part of each phase: time, speed of light, share, wall, and the rates that it follows from."""
    sections = []
    for title, phase in (("decode step", prediction.decode), ("prefill", prediction.prefill)):
        if phase is not None and phase.parts:
            sections += [f"{title}: {format_seconds(phase.seconds.value)}; wall: {_wall(phase)}", _parts_table(phase)]
    if prediction.sources:
        rows = [
            (
                name,
                _value(rate),
                f"{100 * rate.spread:.0f} %",
                rate.source,
                prediction.rung_of(name),
                ", ".join(rate.fitted_on) or rate.note,
            )
            for name, rate in prediction.sources.items()
        ]
        sections += ["rates", table(("rate", "value", "spread", "source", "rung", "from"), rows)]
    told = (f"{key:4s} {ASSUMPTIONS[key]}" if key in ASSUMPTIONS else key for key in prediction.assumptions)
    sections += ["memory", _memory_table(prediction), "assumptions", "".join(f"  {each}\n" for each in told)]
    return "\n".join(sections)


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


def _value(rate: Provenance) -> str:
    if isinstance(rate, Curve):
        return " / ".join(f"{efficiency:.3g}" for efficiency in rate.efficiency)
    return format_rate(rate.value, rate.unit) if isinstance(rate, Rate) else ""


def _memory_table(prediction: Prediction) -> str:
    plan = prediction.memory
    rows = []
    for pool in sorted(plan.memories, key=lambda pool: pool.name):
        free = pool.capacity_bytes - pool.used_bytes(plan.pages)
        parts = pool.parts(plan.pages) | {"free" if free >= 0 else "short": abs(free)}
        rows += [(pool.name, name, format_bytes(size)) for name, size in parts.items()]
    return table(("where", "part", "size"), rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, as wide as they need to be."""
    lines = [[" ".join(cell.split()) for cell in cells] for cells in (heads, *rows)]
    widths = [max(map(_columns, cells)) for cells in zip(*lines, strict=True)]
    text = ""
    for line in lines:
        padded = (cell + " " * (width - _columns(cell)) for cell, width in zip(line, widths, strict=True))
        text += f"  {'  '.join(padded)}".rstrip() + "\n"
    return text


def _columns(text: str) -> int:
    """Columns of a terminal that `text` takes: East Asian characters are wide, combining ones take none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 1 + (east_asian_width(each) in "WF") for each in text)


def plural(number: int) -> str:
    """What a noun ends in after that number."""
    return "" if number == 1 else "s"


def row(name: str, text: str) -> str:
    """A line of an answer: what it tells, and that."""
    return f"  {name:12s} {text}".rstrip()


def used_of(plan: MemoryPlan, pools: Sequence[Memory]) -> str:
    """What is used of all these together."""
    used = sum(pool.used_bytes(plan.pages) for pool in pools)
    return f"{format_bytes(used)} of {format_bytes(sum(pool.capacity_bytes for pool in pools))}"


def ended_by(plan: MemoryPlan) -> str:
    """The memory that ends the context, as people call it."""
    limit = plan.limit()
    tier = next(tier for tier, pools in plan.tiers() if limit.name in {pool.name for pool in pools})
    return tier if tier == "host memory" else f"{tier} of {limit.name}"


def rate(quantity: Quantity) -> str:
    """Tokens a second with their interval."""
    return f"{_figures(quantity.value)} tok/s {_range(quantity, _figures)}"


def _range(quantity: Quantity, shown: Callable[[float], str]) -> str:
    return f"({shown(quantity.low)} to {shown(quantity.high)})"


def _figures(value: float) -> str:
    """Three significant figures, at least one decimal below 100."""
    return f"{value:,.0f}" if value >= 10**SIGNIFICANT / 10 else f"{value:#.{SIGNIFICANT}g}".rstrip(".")
