"""Public rows against predictions, by kind of row and of model; rows of a curve that set a rate are told apart.

Run `python -m calibrate.published.public [part of an id ...]` for a line a row: asked, predicted, measured, rung.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from calibrate.published.estimates import Asked, Estimate
from calibrate.published.public_cases import Public, PublicCase, PublicRow, load_public, model_of, question_of
from calibrate.published.public_figures import PUBLIC_FIGURES
from calibrate.published.recorded import ROUNDING, fitted_rows
from calibrate.validation import Comparison, Role, Skipped, Summary, Validation, summarise, validation_of
from hwprofiles import load_profile
from hwprofiles.store import FOLDER as MACHINES_ROOM
from twin.ask.question import Question
from twin.engines import engine_names, load_engine
from twin.errors import TwinError
from twin.models import ModelSpec, load_model
from twin.prediction import predict
from twin.render.text import table
from twin.units import GB, GIB, KIB, MIB, MS

UNITS = {
    "B": 1, "bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "s": 1, "ms": MS, "GB/s": GB, "GiB/s": GIB,
}  # fmt: skip
"""Sizes of the units that rows and figures have different ones of; all others must be the same."""
ALIKE = {"bool": "", "fraction": ""}


SORTS = dict.fromkeys(("decode", "prefill", "ttft", "decode_ratio"), "speed")
SORTS |= dict.fromkeys(("kv_pool", "vram", "kv_size", "fit"), "memory")
"""What kinds of rows are judged together; any other kind is by itself."""


class PublicComparison(Comparison, frozen=True, kw_only=True):
    """One public row and what the twin says of it."""

    kind: str
    architecture: str
    """What tells costs of models apart: how layers attend, and whether experts are chosen."""
    engine: str
    curve: str
    curve_seen: bool
    """Whether another row of its curve set a rate: it is held out, but of a machine and engine that were seen."""
    rung: str
    """The least sure rung that a time stands on; empty for a count."""
    question: dict[str, Any]
    differs: dict[str, str]

    @property
    def sort(self) -> str:
        """Speed, memory, or its kind."""
        return SORTS.get(self.kind, self.kind)


class Group(Struct, frozen=True, kw_only=True):
    """Rows that have something in common."""

    by: str
    name: str
    fit: Summary
    held_out: Summary
    curve_seen: Summary
    """Those of `held_out` whose curve set a rate."""


class PublicValidation(Validation, frozen=True, kw_only=True):
    """Every public row, with what groups of them add up to."""

    groups: tuple[Group, ...]


def validate_public(names: Sequence[str] = ()) -> PublicValidation:
    """Ask and compare every public row, or those whose id has one of `names` in it."""
    public, fitted = load_public(), fitted_ids()
    seen = {case.curve for case in public.cases.values() if _role_reason(case, fitted)}
    rows = [row for row in public.rows if not names or any(name in row.id for name in names)]
    cases = [
        _compared(row, case, public, role_reason=_role_reason(case, fitted), curve_seen=case.curve in seen)
        for row in rows
        if (case := public.cases.get(row.id)) is not None
    ]
    plain = validation_of("public rows", cases, tuple(_skipped(rows, public)))
    return PublicValidation(
        **{name: getattr(plain, name) for name in Validation.__struct_fields__}, groups=tuple(_groups(cases))
    )


def fitted_ids() -> dict[str, str]:
    """Rows that set a rate anywhere: in a file of machines or kernels, or in a rulebook; and where."""
    found: dict[str, str] = {}
    for path in sorted(MACHINES_ROOM.rglob("*.json")):
        if "records" not in path.parts:
            found |= dict.fromkeys(_ids_in(json.loads(path.read_text(encoding="utf-8"))), _place(path))
    for name in engine_names():
        found |= dict(fitted_rows(load_engine(name), f"engine {name}"))
    return found


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _ids_in(document: object) -> Iterator[str]:
    """Ids in every list called `fitted_on` of a data file."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "fitted_on" and isinstance(value, list):
                yield from (id_ for id_ in value if isinstance(id_, str))
            else:
                yield from _ids_in(value)
    elif isinstance(document, list):
        for value in document:
            yield from _ids_in(value)


def _role_reason(case: PublicCase, fitted: dict[str, str]) -> str:
    if case.id in fitted:
        return f"sets {fitted[case.id]}"
    return f"sets {case.sets}" if case.sets else ""


def _compared(
    row: PublicRow, case: PublicCase, public: Public, *, role_reason: str, curve_seen: bool
) -> PublicComparison:
    estimate, why, rung, model = _answered(case)
    unit = case.unit or row.unit
    right = case.value if case.value is not None else row.value
    if right is None:
        raise AssertionError(f"{row.id} has no right value")
    measured = float(right)
    if estimate is not None:
        size = _size(PUBLIC_FIGURES[case.figure].unit, unit)
        estimate = estimate.converted(lambda value: value * size)
    error = None if estimate is None else _error(estimate.value, measured)
    kind = public.tolerances.get(row.kind)
    tolerance = case.tolerance if case.tolerance is not None else kind.tolerance if kind else 0.0
    role: Role = "fit" if role_reason else "held_out"
    return PublicComparison(
        id=row.id, machine=str(case.ask.get("hw", "")), metric=row.metric, unit=unit, measured=measured,
        predicted=estimate.value if estimate else None,
        low=estimate.low if estimate else None,
        high=estimate.high if estimate else None,
        error=error,
        naive_error=None if estimate is None or estimate.naive is None else _error(estimate.naive, measured),
        role=role, role_reason=role_reason, tolerance=tolerance,
        tolerance_reason=case.reason or (kind.reason if kind else ""),
        within=error is not None and abs(error) <= tolerance + ROUNDING,
        measured_low=measured, measured_high=measured, note=why,
        kind=row.kind, architecture=architecture(model),
        engine=str(case.ask.get("engine", "")).partition("==")[0], curve=case.curve,
        curve_seen=curve_seen and role == "held_out", rung=rung, question=case.ask, differs=dict(case.differs),
    )  # fmt: skip


def _answered(case: PublicCase) -> tuple[Estimate | None, str, str, ModelSpec]:
    """The prediction or why there is none, the rung that it stands on, and the model."""
    model = load_model(model_of(case.ask))
    try:
        question = question_of(case.ask)
        profile = load_profile(question.hw or "")
        against = None if case.against is None else question_of(case.against)
        asked = Asked(question=question, profile=profile, against=against, workload=case.workload)
        estimate = PUBLIC_FIGURES[case.figure].estimate(asked)
        return estimate, "", _rung(question) if _is_timed(case) else "", model
    except TwinError as refused:
        return None, str(refused), "", model


def _is_timed(case: PublicCase) -> bool:
    return PUBLIC_FIGURES[case.figure].unit in {"tok/s", "s", "ms"}


def _rung(question: Question) -> str:
    """The least sure rung of the kernels' rates behind a prediction."""
    return next(reversed(predict(question).standing()), "")


def architecture(model: ModelSpec) -> str:
    """What a model's layers are: latent, sparse, windowed or full attention, recurrences, experts."""
    kinds = {type(mixer).__name__ for mixer in model.caches}
    words = [
        "latent attention" if "LatentAttention" in kinds else "",
        "sparse attention" if model.selects_blocks else "",
        "windows" if any(mixer.reach for mixer in model.caches) else "",
        "recurrent" if model.states else "",
    ]
    experts = (
        "experts"
        if any(layer.feed_forward and layer.feed_forward.experts > 1 for layer in model.kinds.values())
        else ""
    )
    return ", ".join(word for word in (*(words if any(words) else ["full attention"]), experts) if word)


def _size(ours: str, theirs: str) -> float:
    """What a figure is multiplied by to be in a row's unit. ValueError for units of different things."""
    ours, theirs = ALIKE.get(ours, ours), ALIKE.get(theirs, theirs)
    if ours == theirs:
        return 1.0
    if ours not in UNITS or theirs not in UNITS:
        raise ValueError(f"a figure in {ours!r} is no row in {theirs!r}")
    return UNITS[ours] / UNITS[theirs]


def _error(predicted: float, measured: float) -> float:
    return (predicted - measured) / measured if measured else predicted - measured


def _skipped(rows: Iterable[PublicRow], public: Public) -> Iterator[Skipped]:
    for row in rows:
        if (rule := public.not_asked.get(row.id)) is not None:
            yield Skipped(id=row.id, system=rule.because, metric=row.metric, status="not_predicted", reason=rule.reason)


def _groups(cases: Sequence[PublicComparison]) -> Iterator[Group]:
    for by in ("sort", "kind", "architecture", "engine", "rung"):
        for name in dict.fromkeys(getattr(case, by) for case in cases):
            own = [case for case in cases if getattr(case, by) == name]
            held_out = [case for case in own if case.role == "held_out"]
            yield Group(
                by=by, name=name,
                fit=summarise([case for case in own if case.role == "fit"]),
                held_out=summarise(held_out),
                curve_seen=summarise([case for case in held_out if case.curve_seen]),
            )  # fmt: skip


def public_text(validation: PublicValidation) -> str:
    """A line a row, then the groups."""
    cases = [case for case in validation.cases if isinstance(case, PublicComparison)]
    lines = table(_HEADS, [_line(case) for case in cases])
    refused = "".join(f"  {case.id}: {case.note}\n" for case in cases if case.predicted is None)
    skipped = "".join(f"  {row.id}: {row.system}: {row.reason}\n" for row in validation.skipped)
    asked, answered = len(cases), sum(case.predicted is not None for case in cases)
    verdict = f"{asked} rows asked, {answered} answered, {sum(not case.within for case in cases)} outside; "
    reasons = Counter(row.system for row in validation.skipped)
    told = ", ".join(f"{count} {because.replace('_', ' ')}" for because, count in reasons.most_common())
    verdict += f"{len(validation.skipped)} not asked{f' ({told})' if told else ''}\n"
    parts = [lines, "not answered\n" + refused if refused else "", "not asked\n" + skipped if skipped else ""]
    return "\n".join(part for part in (*parts, groups_text(validation.groups), verdict) if part)


_HEADS = ("row", "predicted", "90 % interval", "measured", "unit", "error", "", "rung", "role", "figure")


def _line(case: PublicComparison) -> tuple[str, ...]:
    role = "curve seen" if case.curve_seen else case.role
    if case.predicted is None or case.low is None or case.high is None or case.error is None:
        return case.id, "-", "-", f"{case.measured:,.5g}", case.unit, "-", "", "", role, case.metric
    interval = f"{case.low:,.4g} to {case.high:,.4g}" if case.has_interval else "-"
    missed = "" if not case.has_interval or case.covered else "missed"
    return (
        case.id, f"{case.predicted:,.5g}", interval, f"{case.measured:,.5g}", case.unit, f"{100 * case.error:+.1f} %",
        missed or ("" if case.within else "OUTSIDE"), case.rung, role, case.metric,
    )  # fmt: skip


def groups_text(groups: Sequence[Group]) -> str:
    """A line a group and role: rows, answered, median, 95th percentile, worst, coverage."""
    rows = []
    for group in groups:
        for role in ("held_out", "curve_seen", "fit"):
            summary: Summary = getattr(group, role)
            if summary.n:
                rows.append((
                    group.by, group.name or "-", role.replace("_", " "), str(summary.n),
                    str(summary.n - summary.unanswered), _percent(summary.median_abs_error),
                    _percent(summary.p95_abs_error), _percent(summary.coverage_90), str(summary.outside),
                    summary.worst or "-",
                ))  # fmt: skip
    heads = ("by", "", "role", "rows", "answered", "median", "95th", "covered", "outside", "worst, or first without")
    return table(heads, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g} %"


def main(names: Sequence[str]) -> None:
    """Print the rows whose id has one of `names` in it, or all."""
    sys.stdout.write(public_text(validate_public(names)))


if __name__ == "__main__":
    main(sys.argv[1:])
