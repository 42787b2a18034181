"""Choices side by side: predictions of layouts or formats, and from where on a format is faster on one machine."""

from collections.abc import Sequence
from typing import Any

import msgspec

from twin.answers.comparison import Comparison, Quality
from twin.answers.crossover import Crossing, Crossover
from twin.assumptions import beyond_native
from twin.engines import OWN
from twin.prediction import Prediction
from twin.render.text import TIERS, ended_by, plural, rate, table, used_of
from twin.units import KIB, MS, format_bytes, format_seconds

CROSSOVER_SCHEMA = "twin.crossover/1"


def comparison_text(compared: Comparison) -> str:
    """The title, the table, and what was refused."""
    first = compared.predictions[0]
    case = first.case
    layout = f"layout {case.layout.name}, " if compared.over == "formats" else ""
    batch = f", {case.question.batch} sequences" if case.question.batch > 1 else ""
    asked = f"{layout}{case.question.ctx_tokens:,} token{plural(case.question.ctx_tokens)}{batch}"
    title = f"{case.model.name} on {first.machine.name}, {case.rules.title}, {asked}"
    if compared.over == "layouts":
        columns = [_layout_column(each) for each in compared.predictions]
        heads = ("", *(each.case.layout.name for each in compared.predictions))
        body = table(heads, [(name, *(column[name] for column in columns)) for name in columns[0]])
    else:
        body = _formats(compared)
    # of the context that is compared at: the longest ones differ and have a column
    notes = [note for each in compared.predictions for note in beyond_native(each.case, each.case.question.ctx_tokens)]
    beyond = "".join(f"  {note}\n" for note in dict.fromkeys(notes))
    refused = "".join(f"  {name} is refused: {why}\n" for name, why in compared.refused.items())
    return f"{title}\n\n{body}{beyond}{refused}"


def _layout_column(each: Prediction) -> dict[str, str]:
    decode, prefill = each.decode, each.prefill
    return {
        "fits": "yes" if each.fits else "no",
        "longest context": f"{each.memory.max_ctx_tokens():,}",
        "ended by": ended_by(each.memory),
        "decode": rate(decode.tokens_per_s) if decode else "-",
        "prefill": _prefill(each),
        "first token": format_seconds(each.ttft_s.value) if each.ttft_s else "-",
        "decode wall": decode.bound if decode else "-",
        "prefill wall": prefill.bound if prefill and prefill.parts else "-",
        "host reads a step": format_bytes(decode.link_bytes) if decode else "-",
        **{TIERS.get(name, name): used_of(each.memory, pools) for name, pools in each.memory.tiers()},
        "why not": _why_not(each),
    }


def _formats(compared: Comparison) -> str:
    pooled = any(each.memory.kv_pool for each in compared.predictions)
    heads = ["format", "KiB a token", "fits", "longest context", *(["pool tokens"] if pooled else [])]
    heads += ["decode", "ms a token", "prefill", "first token", "decode kernel", "perplexity", "needle"]
    rows = [_format_row(compared, each, pooled=pooled) for each in compared.predictions]
    notes = [f"  {each.case.fmt.name}: {_why_not(each)}\n" for each in compared.predictions if _why_not(each) != "-"]
    sources = {row.source for each in compared.predictions for row in compared.quality(each)}
    carried = "".join(f"  perplexity and needle are published, not predicted: {source}\n" for source in sorted(sources))
    return table(heads, rows) + "".join(notes) + _whose_kernels(compared) + carried


def _format_row(compared: Comparison, each: Prediction, *, pooled: bool) -> tuple[str, ...]:
    placed = each.memory.token_bytes
    pool = each.memory.kv_pool
    decode = each.decode
    return (
        each.case.fmt.name,
        f"{(placed.vram_bytes + placed.host_bytes) / KIB:.2f}",
        "yes" if each.fits else "no",
        f"{each.memory.max_ctx_tokens():,}",
        *([f"{pool.printed_tokens:,}" if pool else "-"] if pooled else []),
        rate(decode.tokens_per_s) if decode else "-",
        f"{each.case.question.batch / decode.tokens_per_s.value / MS:.1f}" if decode else "-",
        _prefill(each),
        format_seconds(each.ttft_s.value) if each.ttft_s else "-",
        _kernel(each),
        *quality_cells(compared.quality(each)),
    )


def _kernel(each: Prediction) -> str:
    """Whose kernel reads the cache, and where its rates are from, or on what they stand where nobody measured it."""
    known = each.kernel_rate
    if known is None:
        return "-"
    rung = each.kernel_rung
    return f"{each.kernel.split('/')[1]}, {known.source if rung == 'measured' else rung}"


def _prefill(each: Prediction) -> str:
    return rate(each.prefill.tokens_per_s) if each.prefill and each.prefill.parts else "-"


def _whose_kernels(compared: Comparison) -> str:
    """What was carried over from another machine, and where this project's own kernels are compared."""
    told = [(each.case.fmt.name, each.kernel_rate) for each in compared.predictions]
    text = "".join(f"  {name}: {rate.note}\n" for name, rate in told if rate and "carried over from" in rate.note)
    first = compared.predictions[0]
    if first.case.rules.name != OWN:
        text += (
            f"  speeds are those of {first.case.rules.name}'s kernels; this project's own may rank the formats "
            f"otherwise: twin formats --hw {first.machine.name}\n"
        )
    return text


def quality_cells(rows: Sequence[Quality]) -> tuple[str, str]:
    """Perplexities (or their change on another model), and at which contexts a needle was found."""
    found = sorted({row.value for row in rows if row.metric == "perplexity"})
    changes = [f"+{row.value:g} % elsewhere" for row in rows if row.metric == "perplexity_change_percent"]
    needles = [row.conditions.removeprefix("found at ") for row in rows if row.metric == "needle"]
    perplexity = " / ".join(f"{value:g}" for value in found) or ", ".join(changes)
    return perplexity or "-", "; ".join(needles) or "-"


def _why_not(each: Prediction) -> str:
    """What it lacks: memory, or rates; those of one machine are named together."""
    start = f"machine {each.machine.name} has no rate for "
    rates = dict.fromkeys(rate for text in each.missing for rate in text.removeprefix(start).split(", "))
    alike = all(text.startswith(start) for text in each.missing)
    return each.memory.shortage() or (start + ", ".join(rates) if rates and alike else "; ".join(each.missing)) or "-"


def crossover_text(found: Crossover) -> str:
    """A line a format: from which context on it is faster at each batch, and how it stands at one context."""
    batches = [crossing.batch for crossing in found.lines[0].crossings]
    shown = (f"at {found.ctx_tokens:,}, batch 1", f"of {found.against}", "held by")
    heads = ("format", *(f"faster at batch {batch}" for batch in batches), *shown)
    rows = [
        (
            line.kv_dtype + (" *" if line.kv_dtype in found.carried else ""),
            *(_from(crossing) for crossing in line.crossings),
            format_seconds(line.seconds),
            f"{line.ratio:.2f} +- {line.ratio * line.spread:.2f}",
            line.wall,
        )
        for line in found.lines
    ]
    tokens = f"{found.query_tokens} query token{plural(found.query_tokens)}"
    carried = f", carried over from {found.carried_from}" if found.carried_from else ""
    text = (
        f"{found.machine}, kernels of engine {found.engine} (this project's own{carried}): "
        f"attention of one layer, {tokens}, against {found.against}\n\n{table(heads, rows)}"
    )
    text += "".join(f"  {name}: {why}\n" for name, why in found.refused.items())
    if found.carried_from:
        text += (
            f"  * Not measured on {found.machine} ({', '.join(found.carried)}): shares of roofs and operations an "
            f"element are those of {found.carried_from}\n"
        )
    if found.others:
        text += (
            f"  Other engines run kernels of their own here ({', '.join(found.others)}), which may rank the formats "
            f"otherwise: twin compare --over formats --model MODEL --hw {found.machine}\n"
        )
    return text


def _from(crossing: Crossing) -> str:
    where = "never" if crossing.ctx_tokens is None else f"from {crossing.ctx_tokens:,}"
    return f"{where} ({crossing.wall})"


def crossover_json(found: Crossover) -> dict[str, Any]:
    """All of it."""
    return {"schema": CROSSOVER_SCHEMA, **msgspec.to_builtins(found)}
