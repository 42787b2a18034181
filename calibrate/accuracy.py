"""`python -m calibrate.accuracy` writes docs/accuracy.md and the README's table of it, from the records alone.

`--check` writes nothing and exits 1 where either is not what the records say today.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from calibrate.live import compare
from calibrate.measurements import measured_machines, shipped_measurements
from calibrate.published.cases import recorded_machines
from calibrate.published.recorded import validate_recorded
from calibrate.validation import Comparison, Summary, summarise
from hwprofiles import load_profile

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
    """Of one; a dash for none."""
    return "-" if share is None else f"{100 * share:{'+' if signed else ''}.1f} %"


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


@cache
def recorded_cases(machine: str) -> Sequence[Comparison]:
    """Comparisons of a machine whose figures others published."""
    return validate_recorded(machine).cases


@cache
def measured_groups(machine: str) -> dict[str, list[Comparison]]:
    """Comparisons of a machine that we measured ourselves, by group; cases of formats by operation."""
    measurements, profile = shipped_measurements(machine), load_profile(machine)
    found: dict[str, list[Comparison]] = {}
    for measured in measurements.rows:
        group = measured.case.operation if measured.group == "formats" else measured.group
        found.setdefault(group, []).append(compare(measured, profile, kv_dtype=measurements.kv_dtype))
    return {name: found[name] for name in GROUPS if name in found}


def summaries() -> list[tuple[str, ...]]:
    """One row for each source of figures."""
    rows = []
    for machine in recorded_machines():
        held_out = [case for case in recorded_cases(machine) if case.role == "held_out"]
        rows.append(summary_row(SOURCES[machine], summarise(held_out)))
    for machine in measured_machines():
        for group, cases in measured_groups(machine).items():
            rows.append(summary_row(f"one {machine.upper()}, ours: {GROUPS[group]}", summarise(cases)))
    return rows


def sections() -> Iterable[str]:
    """Every case, source by source."""
    for machine in recorded_machines():
        yield f"## {machine}: {SOURCES[machine]}\n"
        cases = sorted(recorded_cases(machine), key=lambda case: case.role != "held_out")
        yield table(
            ("case", "published", "predicted", "interval", "error", "naive", "role"),
            (
                (
                    case.id, figure(case.measured, case.unit), figure(case.predicted), interval(case),
                    percent(case.error, signed=True), percent(case.naive_error, signed=True),
                    case.role.replace("_", " "),
                )
                for case in cases
            ),
        )  # fmt: skip
    for machine in measured_machines():
        for group, cases in measured_groups(machine).items():
            yield f"## {machine}, held out: {GROUPS[group]}\n"
            yield table(
                ("case", "measured, us", "predicted, us", "interval", "error", "naive", "wall"),
                (
                    (
                        case.id.removeprefix(f"{machine}."), figure(1e6 * case.measured / scale(case)),
                        figure(case.predicted and 1e6 * case.predicted / scale(case)),
                        interval(case, 1e6 / scale(case)),
                        percent(case.error, signed=True), percent(case.naive_error, signed=True), case.wall,
                    )
                    for case in cases
                ),
            )  # fmt: skip


def scale(case: Comparison) -> float:
    """Of the unit that a measured case is told in, to seconds."""
    return {"s": 1.0, "ms": 1e3, "us": 1e6}[case.unit]


def interval(case: Comparison, factor: float = 1.0) -> str:
    """Its ends; a dash for a count."""
    if case.low is None or case.high is None or not case.has_interval:
        return "-"
    return f"{figure(factor * case.low)} to {figure(factor * case.high)}"


def document() -> str:
    """docs/accuracy.md."""
    return "\n".join([INTRODUCTION, table(SUMMARY_HEAD, summaries()), *sections()])


def readme(text: str) -> str:
    """The README with its table as the records say."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(SUMMARY_HEAD, summaries())}\n{END}{after}"


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
