"""A served workload with the case that served it, as text and as twin.simulation/1."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict

from twin.answers.service import Service
from twin.render.as_json import names_json
from twin.render.text import plural, row
from twin.serving.metrics import NAMED_QUANTILES, Histogram, ServingResult
from twin.serving.traces import Reading
from twin.units import format_bytes, format_seconds

SIMULATION_SCHEMA = "twin.simulation/1"
CHART_COLUMNS = 64
CHART_ROWS = 6
SHOWN_REJECTIONS = 3

_REJECTED_FOR = {"max_model_tokens": "longer than the model takes", "pool": "larger than the whole pool"}

_COUNTED = (
    "total_s", "busy_s", "steps", "completed",
    "prompt_tokens", "output_tokens", "output_tokens_per_s", "requests_per_s",
)  # fmt: skip
_RESIDENT = ("resident_max", "resident_mean", "preemptions", "recomputed_tokens", "cached_tokens")

Figure = Callable[[ServingResult], float]
_FIGURES: dict[str, Figure] = {
    "total_s": lambda result: result.total_s,
    "output_tokens_per_s": lambda result: result.output_tokens_per_s,
    "ttft_p50_s": lambda result: result.ttft_s.quantile(0.5),
    "itl_p50_s": lambda result: result.itl_s.quantile(0.5),
    "e2e_p50_s": lambda result: result.e2e_s.quantile(0.5),
}
"""Headline figures, whose 90 % intervals are told."""


def service_text(service: Service, what: str, reading: Reading | None = None) -> str:
    """What was served by what, and the headline numbers; `reading` is how a trace was read."""
    case, pool = service.case, service.kv_pool
    speculation = case.speculation
    drafted = f", {speculation.drafter.name} drafts {speculation.tokens}" if speculation else ""
    lines = [
        f"{case.model.name} on {service.machine.name}, {case.rules.title}",
        f"{case.fmt.name} cache on {case.backend or case.layout.name}{drafted}; {pool.blocks:,} blocks of "
        f"{pool.plan.holds}, at most {service.result.limits.max_sequences:,} sequences, "
        f"{service.result.limits.batched_tokens:,} tokens a step",
        *_no_cache(service),
        *service.notes,
        f"{what}; arrivals {reading.text}" if reading else what,
        "",
    ]
    figures = serving_text(service.result, throughput_90=service.ends(_FIGURES["output_tokens_per_s"]))
    return "\n".join([*lines, figures])


def _no_cache(service: Service) -> list[str]:
    """Why nothing can be served, where the pool has not one block for a request."""
    pool, device = service.kv_pool, service.memory.devices()[0]
    if service.result.pool_blocks:
        return []
    if pool.pool_bytes >= pool.plan.block_bytes:
        return [f"no cache fits: {service.memory.shortage()}"]
    taken = sum(size for name, size in device.fixed.items() if name not in ("null block", "state and windows"))
    there, block = format_bytes(device.capacity_bytes), format_bytes(pool.plan.block_bytes)
    return [f"no cache fits: weights and buffers take {format_bytes(taken)} of {there}, a block takes {block}"]


def serving_text(result: ServingResult, *, throughput_90: tuple[float, float] = (0.0, 0.0)) -> str:
    """Headline numbers, with the 90 % interval of output tokens a second, and who was running when."""
    low, high = (_figures(end) for end in throughput_90)
    output, within = f"{_figures(result.output_tokens_per_s)} tok/s out", f" ({low} to {high})" if low != high else ""
    again = f", {result.recomputed_tokens:,} tokens computed again"
    share = result.pool_peak_blocks / result.pool_blocks if result.pool_blocks else 0.0
    lines = [
        f"{result.completed:,} request{plural(result.completed)} in {format_seconds(result.total_s)}: "
        f"{result.prompt_tokens:,} prompt tokens, {result.output_tokens:,} output tokens",
        "",
        row("throughput", f"{output}{within}, {_figures(result.requests_per_s)} req/s"),
        row("first token", _spread(result.ttft_s)),
        row("between", _spread(result.itl_s)),
        row("per token", _spread(result.tpot_s)),
        row("end to end", _spread(result.e2e_s)),
        row("queue", _spread(result.queue_s)),
        row("running", f"{result.resident_max:,} at most, {_figures(result.resident_mean)} on average"),
        row("pool", f"{result.pool_peak_blocks:,} of {result.pool_blocks:,} blocks at most ({100 * share:.0f} %)"),
        row("preemptions", f"{result.preemptions:,}{again}" if result.preemptions else "none"),
    ]
    if result.cached_tokens:
        cached = result.cached_tokens / result.prompt_tokens
        lines.append(row("prefix cache", f"{result.cached_tokens:,} prompt tokens skipped ({100 * cached:.0f} %)"))
    return "\n".join([*lines, *_rejected_rows(result), *_chart(result)]) + "\n"


def _rejected_rows(result: ServingResult) -> list[str]:
    kinds = [f"{count:,} {_REJECTED_FOR[kind]}" for kind, count in sorted(result.rejected.items())]
    rows = [row("rejected", ", ".join(kinds))] if kinds else []
    for each in result.rejections[:SHOWN_REJECTIONS]:
        where = f" (line {each.line:,})" if each.line else ""
        rows.append(row("", f"request {each.id}{where}: {each.reason}"))
    if result.rejected_count > SHOWN_REJECTIONS:
        rows.append(row("", f"and {result.rejected_count - SHOWN_REJECTIONS:,} more"))
    return rows


def _chart(result: ServingResult) -> list[str]:
    """Mean running sequences over time, a column for each share of the time."""
    levels = _columns([level for _, level in result.timeline])
    top = max(levels, default=0.0)
    if not top:
        return []
    edge = len(f"{top:.1f}")
    rows = ["", "  running sequences over time"]
    for height in range(CHART_ROWS, 0, -1):
        bars = "".join("#" if level >= top * (height - 0.5) / CHART_ROWS else " " for level in levels)
        label = f"{top:.1f}" if height == CHART_ROWS else ""
        rows.append(f"  {label:>{edge}} |{bars}".rstrip())
    end = format_seconds(result.total_s)
    axis = f"  {'':{edge}} +{'-' * len(levels)}"
    return [*rows, axis, f"  {'':{edge}}  0{end:>{max(len(levels), len(end) + 2) - 1}}"]


def _columns(levels: list[float]) -> list[float]:
    """As many as fit, each the mean of its share."""
    columns = min(CHART_COLUMNS, len(levels))
    edges = [index * len(levels) // columns for index in range(columns + 1)] if columns else [0]
    shares = [levels[start:end] for start, end in pairwise(edges)]
    return [sum(share) / len(share) for share in shares]


def _spread(times: Histogram) -> str:
    if not times.count:
        return "-"
    named = (f"{name} {format_seconds(times.quantile(share))}" for name, share in NAMED_QUANTILES.items())
    return f"{', '.join(named)}; mean {format_seconds(times.mean)}, max {format_seconds(times.most)}"


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def service_json(service: Service, what: str, reading: Reading | None = None) -> dict[str, Any]:
    """The result with its question and, where three runs were made, the 90 % intervals."""
    pool, limits = service.kv_pool, service.result.limits
    named = ("max_sequences", "batched_tokens", "max_model_tokens", "tokens_per_step")
    question = {
        **names_json(service.case, service.machine),
        "workload": what,
        "trace": reading and _reading_json(reading),
        **{name: getattr(limits, name) for name in named},
        "prefix_caching": limits.prefix_cache,
        "speculative_tokens": limits.speculative,
    }
    result = serving_json(service.result)
    result["pool"] |= {"kv_pool_tokens": pool.printed_tokens, "block_tokens": pool.plan.block_tokens}
    head = {"schema": result.pop("schema"), "question": question, "notes": list(service.notes)}
    return {**head, **result, "interval_90": _interval_json(service)}


def _reading_json(reading: Reading) -> dict[str, Any]:
    """Unit and tokens a hash always, the rest where there is something to say."""
    always = ("time_unit", "hash_tokens")
    return {name: value for name, value in asdict(reading).items() if name in always or value not in (None, "")}


def _interval_json(service: Service) -> dict[str, dict[str, float | None]] | None:
    """The same workload with all steps shorter or longer; null for figures of nothing, such as gaps of one token."""
    if service.fast is None:
        return None
    ends = {name: service.ends(figure) for name, figure in _FIGURES.items()}
    return {
        name: {"low": low if math.isfinite(low) else None, "high": high if math.isfinite(high) else None}
        for name, (low, high) in ends.items()
    }


def serving_json(result: ServingResult) -> dict[str, Any]:
    """The result as twin.simulation/1; times of nothing are null."""
    return {
        "schema": SIMULATION_SCHEMA,
        "limits": asdict(result.limits),
        **{name: getattr(result, name) for name in _COUNTED},
        **{name: getattr(result, name).summary() for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s")},
        **{name: getattr(result, name) for name in _RESIDENT},
        "pool": {"blocks": result.pool_blocks, "peak_blocks": result.pool_peak_blocks},
        "rejected_count": result.rejected_count,
        "rejected_kinds": dict(result.rejected),
        "rejected": [asdict(each) for each in result.rejections],
        "timeline": {
            "bin_s": result.residency.bin_s,
            "points": [{"start_s": start, "residents": level} for start, level in result.timeline],
        },
        "requests": [asdict(each) for each in result.requests],
    }
