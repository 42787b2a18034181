"""`python -m calibrate.accuracy` writes docs/accuracy.md and the README's table of it, from the records alone.

`--check` writes nothing and exits 1 where either is not what the records say today.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from calibrate.live import compare
from calibrate.measurements import measured_machines, shipped_measurements
from calibrate.published.cases import recorded_machines
from calibrate.published.recorded import validate_recorded
from calibrate.validation import Comparison, Summary, summarise
from hwprofiles import load_profile
from twin.units import US

ROOT = Path(__file__).parents[1]
DOCUMENT, README = ROOT / "docs" / "accuracy.md", ROOT / "README.md"
BEGIN, END = "<!-- accuracy: written by python -m calibrate.accuracy -->\n", "<!-- /accuracy -->"

SOURCES = {
    "3x-rtx3090": "three RTX 3090, published: exllamav3 with its KV cache in host memory",
    "rtx3090": "one RTX 3090, published: vLLM in seven cache formats, speculation, serving",
}
GROUPS = {
    "grid": "sparse decode and prefill, from VRAM and host memory",
    "long_curve": "sparse decode of 12 layers from 2k to 3.1M tokens",
    "decode_format": "decode attention over every cache format",
    "prefill_format": "chunks of prompts over every cache format",
    "decode_gather": "gathers of quantised blocks from host memory",
    "operations": "all other operations: products, appends, dequantisation, sampling, flash attention",
}

INTRODUCTION = """# How far predictions are from measurements

Written by `python -m calibrate.accuracy` from the records in `hwprofiles/records/`; a test holds it true. The error is
(predicted - measured) / measured, the interval the predicted 90 %. No rate was fitted on a row that is *held out*; a
row of role *fit* sets a rate, or repeats one that does. The naive estimate is bytes and operations over datasheet
rates. `twin validate --recorded` prints the same rows with tolerances, reasons and notes. What predictions do not
explain is in [unexplained.md](unexplained.md).
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def percent(share: float | None, *, signed: bool = False) -> str:
    """Of one; a dash for none. What rounds to nothing has no sign: it would be that of a last bit."""
    return "-" if share is None else f"{round(100 * share, 1) + 0.0:{'+' if signed else ''}.1f} %"


def figure(value: float | None, unit: str = "") -> str:
    """Four digits."""
    if value is None:
        return "-"
    told = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{told} {unit}".strip()


def summary_row(what: str, summary: Summary) -> tuple[str, ...]:
    """Of some cases: how many, how far off, and how often the interval holds."""
    of = summary.with_interval if summary.with_interval.n else summary
    return (
        what, str(summary.n), percent(of.median_abs_error), percent(of.p95_abs_error), percent(summary.coverage_90),
        percent(summary.naive.median_abs_error),
    )  # fmt: skip


SUMMARY_HEAD = (
    "held out", "cases", "median error", "95th percentile", "covered by the interval", "naive estimate, median",
)  # fmt: skip


class Source(NamedTuple):
    """Cases of one origin."""

    title: str
    """In the summary."""
    heading: str
    """Of its own section."""
    cases: Sequence[Comparison]
    ours: bool
    """Whether we measured them ourselves: then all are held out."""


@cache
def sources() -> tuple[Source, ...]:
    """Published rows of each machine, then groups of our own measurements, cases of formats by operation."""
    found = [
        Source(SOURCES[machine], f"{machine}: {SOURCES[machine]}", validate_recorded(machine).cases, ours=False)
        for machine in recorded_machines()
    ]
    for machine in measured_machines():
        measurements, profile = shipped_measurements(machine), load_profile(machine)
        groups: dict[str, list[Comparison]] = {name: [] for name in GROUPS}
        for measured in measurements.rows:
            group = measured.case.operation if measured.group == "formats" else measured.group
            groups[group].append(compare(measured, profile, kv_dtype=measurements.kv_dtype))
        found += [
            Source(f"one {machine.upper()}, ours: {told}", f"{machine}, held out: {told}", groups[name], ours=True)
            for name, told in GROUPS.items() if groups[name]
        ]  # fmt: skip
    return tuple(found)


def summaries() -> str:
    """One row for each source of figures."""
    held_out = ((source.title, [case for case in source.cases if case.role == "held_out"]) for source in sources())
    return table(SUMMARY_HEAD, [summary_row(title, summarise(cases)) for title, cases in held_out])


def section(source: Source) -> str:
    """Every case of a source."""
    if source.ours:
        head = ("case", "measured, us", "predicted, us", "interval", "error", "naive", "wall")
    else:
        head = ("case", "published", "predicted", "interval", "error", "naive", "role")
    cases = sorted(source.cases, key=lambda case: case.role != "held_out")
    return f"## {source.heading}\n\n{table(head, [case_row(case, ours=source.ours) for case in cases])}"


def case_row(case: Comparison, *, ours: bool) -> tuple[str, ...]:
    """A published figure in its own unit, or a time of ours in microseconds."""
    factor = 1 / US if ours else 1.0
    errors = percent(case.error, signed=True), percent(case.naive_error, signed=True)
    predicted = figure(case.predicted and factor * case.predicted), interval(case, factor)
    if ours:
        return case.id.removeprefix(f"{case.machine}."), figure(factor * case.measured), *predicted, *errors, case.wall
    return case.id, figure(case.measured, case.unit), *predicted, *errors, case.role.replace("_", " ")


def interval(case: Comparison, factor: float) -> str:
    """Its ends; a dash for a count."""
    if case.low is None or case.high is None or not case.has_interval:
        return "-"
    return f"{figure(factor * case.low)} to {figure(factor * case.high)}"


def document() -> str:
    """docs/accuracy.md."""
    return "\n".join([INTRODUCTION, summaries(), *map(section, sources())])


def readme(text: str) -> str:
    """The README with its table as the records say."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{summaries()}\n{END}{after}"


def main(words: Sequence[str]) -> int:
    """Write both, or with `--check` compare; 1 where one of them is out of date."""
    made = {DOCUMENT: document(), README: readme(README.read_text(encoding="utf-8"))}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in words:
            sys.stdout.write(f"{path.relative_to(ROOT)} is not what the records say: python -m calibrate.accuracy\n")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
