"""`twin quality` as text and as JSON (twin.quality/1): what was measured, and apart from it what is published."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from calibrate.quality.errors import ABSMAX_INT4, FormatErrors
from calibrate.quality.measure import REFERENCES, Measured, Sample
from twin.render.comparison import quality_cells
from twin.render.text import table

SCHEMA = "twin.quality/1"

_NOTES = {
    ABSMAX_INT4: "round(x / scale), scale = absmax / 7 of a token and head, nothing rotated: what anybody would write",
    "fp8": "with scales of 1, which an engine takes where nobody calibrated others",
}


def quality_text(measured: Measured, *, explain: bool = False) -> str:
    """One table in full (`explain`: all of them), the outputs of all heads side by side, and what is published."""
    chosen = "" if measured.pooled else measured.chosen
    full = [sample for sample in measured.samples if explain or sample.name == chosen]
    measured_here = "MEASURED here: K, V and attention over a cache in each format against float64 without one\n"
    sections = [_title(measured), measured_here]
    if measured.pooled:
        sections.append(_layers_text(measured))
    sections += [_sample_text(measured, sample) for sample in full]
    if len(measured.samples) > 1 and not measured.pooled:
        sections.append("relative error of attention's output on all kinds of heads\n" + _overview(measured))
    sections += [_notes(measured), _published(measured)]
    return "\n".join(sections)


def _title(measured: Measured) -> str:
    shape = f"{measured.kv_heads} KV heads of {measured.head_dim}"
    seed = "" if measured.seed is None else f", seed {measured.seed}"
    where = f"{measured.device} ({measured.device_name})"
    if measured.tensors is None:
        model = measured.model.name if measured.model else ""
        return f"cache formats on made-up heads in the shape of {model} ({shape}){seed}; {where}\n"
    layers = f", {len(measured.samples)} layers" if len(measured.samples) > 1 else ""
    return f"cache formats on {measured.tensors} ({shape}{layers}){seed}; {where}\n"


def _sample_text(measured: Measured, sample: Sample) -> str:
    peak = sample.concentration
    about = f"{sample.name}: {sample.about}" if sample.about else sample.name
    queries = "made-up queries" if sample.generated else "queries of the file"
    return (
        f"{about}\n"
        f"  {sample.tokens:,} tokens, {sample.heads} KV heads, {sample.queries:,} {queries}; attention is spread like "
        f"over {peak.effective_tokens:,.0f} even tokens,\n"
        f"  {100 * peak.top_share:.0f} % of it on the strongest, {100 * peak.first_share:.0f} % on the first four\n"
        + table(_HEADS, [_row(measured, row) for row in sample.formats])
    )


def _percent(share: float) -> str:
    """Two significant figures, three from 10 % on."""
    return f"{100 * share:.{2 if share < 0.1 else 3}g} %"


def _figure(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "K error": ("key_relative_rms", _percent), "V error": ("value_relative_rms", _percent),
    "score rms": ("score_rms", _figure), "score max": ("score_max", _figure),
    "KL mean": ("kl_mean", _figure), "KL 99 %": ("kl_p99", _figure),
    "output error": ("output_relative_rms", _percent), "cosine": ("output_cosine_mean", "{:.5f}".format),
}  # fmt: skip
_HEADS = ("format", "bytes *", *_COLUMNS)


def _row(measured: Measured, row: FormatErrors) -> tuple[str, ...]:
    figures = (shown(getattr(row.errors, name)) for name, shown in _COLUMNS.values())
    return _shown(row.name), f"{measured.token_bytes[row.name]:,}", *figures


def _shown(name: str) -> str:
    return f"{name} (reference)" if name in REFERENCES else name


def _layers_text(measured: Measured) -> str:
    """Pooled, with the layer in which attention moves most."""
    samples, rows = measured.samples, []
    for number, row in enumerate(measured.pooled):
        worst = max(samples, key=lambda sample: sample.formats[number].errors.kl_mean)
        most = worst.formats[number].errors.kl_mean
        rows.append((*_row(measured, row), f"{_figure(most)} ({worst.name})" if most else "-"))
    tokens, queries = sum(sample.tokens for sample in samples), sum(sample.queries for sample in samples)
    return (
        f"all {len(samples)} layers together\n  {tokens:,} tokens, {queries:,} queries: {_queries(samples)}\n"
        + table((*_HEADS, "worst KL mean"), rows)
    )


def _queries(samples: Sequence[Sample]) -> str:
    """Where those of the layers come from."""
    made_up = [sample.name for sample in samples if sample.generated]
    if len(made_up) == len(samples):
        return "made up"
    return f"of the file, made up for {', '.join(made_up)}" if made_up else "of the file"


def _overview(measured: Measured) -> str:
    """The outputs' errors of all heads side by side."""
    rows = [
        (*_row(measured, same[0])[:2], *(_percent(row.errors.output_relative_rms) for row in same))
        for same in zip(*(sample.formats for sample in measured.samples), strict=True)
    ]
    return table(("format", "bytes *", *(sample.name for sample in measured.samples)), rows)


def _notes(measured: Measured) -> str:
    first = measured.samples[0]
    lines = [
        "  * of a token in a layer, K and V of all KV heads with their scales",
        "  errors of K, V and output are relative root mean squares; scores are q k / sqrt(D); KL is in nats",
        "  an error of one head is no loss of a model's: it tells formats apart, not how answers change",
    ]
    lines += [f"  {row.name}: {_NOTES[row.name]}" for row in first.formats if row.name in _NOTES]
    waiting: dict[int, list[str]] = {}
    for row in first.formats:
        waiting.setdefault(row.waiting_tokens, []).append(row.name)
    lines += [
        f"  {', '.join(names)}: {count:,} of {first.tokens:,} tokens stay in 16 bits, which the bytes leave out: "
        "the first tile, and one that is not full"
        for count, names in waiting.items()
        if count
    ]
    lines += [f"  {name} is left out: {reason}" for name, reason in measured.left_out.items()]
    return "\n".join(lines) + "\n"


def _published(measured: Measured) -> str:
    """What others found with whole models: never a figure of this run."""
    if measured.model is None:
        return "PUBLISHED figures are shown where --model says whose heads these are\n"
    told = {name: rows for name, rows in measured.published.items() if rows}
    title = f"PUBLISHED, not measured here: answers of {measured.model.name}"
    if not told:
        return f"{title}: nothing for these formats\n"
    rows = [(name, *quality_cells(found)) for name, found in told.items()]
    sources = sorted({row.source for found in told.values() for row in found})
    carried = "".join(f"  source: {source}\n" for source in sources)
    return f"{title}\n{table(('format', 'perplexity', 'needle found at'), rows)}{carried}"


def quality_json(measured: Measured) -> dict[str, Any]:
    """The same for scripts, with every set of heads: twin.quality/1."""
    published = [row for rows in measured.published.values() for row in rows]
    return {
        "schema": SCHEMA,
        "question": {
            "model": measured.model.name if measured.model else None,
            "tensors": None if measured.tensors is None else str(measured.tensors),
            "heads": measured.chosen,
            "seed": measured.seed,
            "device": measured.device,
        },
        "made": {"device_name": measured.device_name, "torch": measured.torch},
        "kv_heads": measured.kv_heads,
        "head_dim": measured.head_dim,
        "samples": [_sample_json(measured, sample) for sample in measured.samples],
        "pooled": _formats_json(measured, measured.pooled) or None,
        "left_out": [{"kv_dtype": name, "reason": reason} for name, reason in measured.left_out.items()],
        "published_quality": [msgspec.to_builtins(row) for row in published],
    }


def _sample_json(measured: Measured, sample: Sample) -> dict[str, Any]:
    return {
        "name": sample.name,
        "about": sample.about,
        "tokens": sample.tokens,
        "kv_heads_measured": sample.heads,
        "queries": sample.queries,
        "queries_generated": sample.generated,
        "attention": asdict(sample.concentration),
        "formats": _formats_json(measured, sample.formats),
    }


def _formats_json(measured: Measured, rows: Sequence[FormatErrors]) -> list[dict[str, Any]]:
    return [
        {
            "kv_dtype": row.name,
            "reference": row.name in REFERENCES,
            "bytes_per_token": measured.token_bytes[row.name],
            "tokens_in_16_bits": row.waiting_tokens,
            **asdict(row.errors),
        }
        for row in rows
    ]
