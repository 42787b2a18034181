"""`twin calibrate --from`: from files to a written profile, and what to say of it."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from calibrate.benchmarks.advice import Advice, advice
from calibrate.benchmarks.asking import Evidence, evidence
from calibrate.benchmarks.fitting import STRANGE, Fitted, fit
from calibrate.benchmarks.parameters import roof_of
from calibrate.benchmarks.points import Given
from calibrate.benchmarks.profile import write_profile
from calibrate.build import CannotCalibrate
from twin.cli.outputs import check_outputs
from twin.render.text import table
from twin.units import format_rate, format_seconds


class Outcome(Struct, frozen=True, kw_only=True):
    """A profile that was written."""

    output: Path
    found: Evidence
    fitted: Fitted
    next: Advice | None


def calibrate_from(paths: Sequence[Path], given: Given, *, name: str | None, output: Path) -> Outcome:
    """Fit the machine's kernels to the files' points and write its profile; nothing is written where that fails."""
    for path in paths:
        check_outputs(output, read={"--from": path})
    found = evidence(paths, given)
    fitted = fit(found)
    if not fitted.parameters:
        raise CannotCalibrate("the files determine no rate: their points hang on too much that is not known")
    machine = write_profile(fitted, found, hw=given.hw, name=name, output=output)
    return Outcome(output=output, found=found, fitted=fitted, next=advice(found, machine))


def outcome_text(outcome: Outcome) -> str:
    """What was fitted on what, what is left, and what to run next."""
    fitted, found = outcome.fitted, outcome.found
    engine = found.asked[0].case
    count = len(found.asked)
    lines = [
        f"{outcome.output} written: {found.machine.name}, {engine.rules.name}, {engine.model.name}: "
        f"{len(fitted.parameters)} rate{'s' if len(fitted.parameters) > 1 else ''} fitted on {count} "
        f"point{'s' if count > 1 else ''}\n",
        table(("fitted", "value", "spread", "before", "on"), _rates(fitted)),
        table(("point", "measured", "before", "predicted", "error"), _points(found, fitted)),
    ]
    if fitted.undetermined:
        kept = ", ".join(str(parameter) for parameter in fitted.undetermined)
        lines.append(f"not determined, as before: {kept}\n")
    lines += [f"left out: {left.where}: {left.reason}\n" for left in found.left]
    lines.append(_next(outcome.next))
    return "\n".join(lines)


def strange(outcome: Outcome) -> list[str]:
    """Points that no share explains."""
    told = zip(outcome.found.asked, outcome.fitted.after, strict=True)
    return [
        f"{asked.point.id}: predicted {format_seconds(after)}, measured {format_seconds(asked.point.seconds)}: "
        "no rate of a kernel explains both it and the others"
        for asked, after in told
        if abs(after / asked.point.seconds - 1) > STRANGE
    ]


def _rates(fitted: Fitted) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    nothing = [0.0] * len(fitted.parameters)
    after, before = (_valued(fitted, values) for values in (fitted.values, nothing))
    known = zip(fitted.parameters, fitted.spreads, fitted.points_of, after, before, strict=True)
    for parameter, spread, ids, now, then in known:
        start = fitted.kernels.starts.get(parameter.kernels[0])
        rung = "assumed" if start is None else start.rung
        on = f"{len(ids)} point{'s' if len(ids) > 1 else ''}"
        rows.append((str(parameter), now, f"{100 * spread:.2g} %", f"{then}, {rung}", on))
    return rows


def _valued(fitted: Fitted, values: Sequence[float]) -> list[str]:
    """Each parameter as it stands in a profile."""
    gpu = fitted.kernels.gpu_at(fitted.parameters, values)
    kernels = fitted.kernels.changed(fitted.parameters, values)
    told = []
    for parameter in fitted.parameters:
        kernel, roof = kernels.get(parameter.kernels[0]), roof_of(gpu, parameter.kernels[0])
        if roof is not None:
            told.append(format_rate(roof.rate.value, roof.rate.unit))
        elif kernel is not None and kernel.efficiency is not None and parameter.places is not None:
            told.append(f"{kernel.efficiency(parameter.places[0]):.3g}")
        else:
            told.append(
                format_seconds(kernel.latency.value) if kernel is not None and kernel.latency is not None else "-"
            )
    return told


def _points(found: Evidence, fitted: Fitted) -> list[tuple[str, ...]]:
    return [
        (
            asked.point.id, format_seconds(asked.point.seconds), format_seconds(before), format_seconds(after),
            f"{100 * (after / asked.point.seconds - 1):+.1f} %",
        )
        for asked, before, after in zip(found.asked, fitted.before, fitted.after, strict=True)
    ]  # fmt: skip


def _next(told: Advice | None) -> str:
    if told is None:
        return ""
    if not told.worth_while:
        return f"one more run would teach little: all is known within {100 * told.width:.2g} %\n"
    return f"one more run would teach most here: {told.command} (known within {100 * told.width:.2g} %)\n"
