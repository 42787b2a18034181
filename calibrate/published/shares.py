"""Sets rates of engines' kernels from what others published of whole steps on many machines.

`python -m calibrate.published.shares [engine ...]` writes them into `hwprofiles/kernels/<engine>.json`. An engine has a
few (ENGINES): shares of a roof and latencies, each of one or several of its kernels. On every machine with rows they
are found by least squares on relative errors, and drawn to the engine's mean over machines as strongly as machines are
alike, which is learned with them: one row moves a machine a little, a curve of rows sets it.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from calibrate.published.speeds import SpeedRow, speed_rows
from hwprofiles.files import Table
from hwprofiles.ladder import kind_of
from hwprofiles.profile import KERNEL_AXES, Kernel
from hwprofiles.rates import Curve, Rate
from hwprofiles.store import KERNELS, KERNELS_SCHEMA
from twin.cost.roofline import Roofs

Field = Literal["few", "many", "share", "latency"]
"""A share over few and over many tokens, one over all, or seconds a call."""
PLACES = {"few": 8.0, "many": 256.0}  # tokens at which shares of few and of many are held; between them, interpolated
BETWEEN = 45.0  # tokens in a batch from which on a row tells more of many
DATE = "2026-12-01"
NOISE = 0.05  # relative, of a published figure: two runs of a benchmark on machines of one name differ by as much
ROUNDS = 12
ALIKE = 4  # rows of a curve that tell as much as all of it: its errors go together
LONGEST_STEP = 0.7
KNOWN = 0.9  # of what machines differ by: a kernel of which a machine's rows leave more is not that machine's
LEAST_SPREAD = 0.02
FIRST_TAU = {"few": 0.15, "many": 0.3, "share": 0.3, "latency": 0.5}  # how far machines differ, before it is learned


class Parameter(NamedTuple):
    """One number of an engine on a machine: a field that several of its kernels have in common."""

    kernels: tuple[str, ...]
    field: Field
    start: float


def _products(implementation: str, *formats: str, operation: str = "linear", few: float = 0.95, many: float = 0.5,
              latency: float = 3e-5) -> tuple[Parameter, ...]:  # fmt: skip
    keys = tuple(f"{operation}/{implementation}/{fmt}" for fmt in formats)
    return Parameter(keys, "few", few), Parameter(keys, "many", many), Parameter(keys, "latency", latency)


ENGINES: dict[str, tuple[Parameter, ...]] = {}


class Fitted(NamedTuple):
    """Logarithms of an engine's parameters: their mean over machines, by machine, and how far machines differ."""

    mean: np.ndarray
    machines: dict[str, np.ndarray]
    deviations: dict[str, np.ndarray]
    tau: np.ndarray


def kernels_of(parameters: Sequence[Parameter], logs: np.ndarray, spreads: Mapping[Field, float],
               rows: tuple[str, ...]) -> dict[str, Kernel]:  # fmt: skip
    """Kernels with these values."""
    found: dict[str, dict[str, float]] = {}
    for parameter, log in zip(parameters, logs, strict=True):
        for key in parameter.kernels:
            found.setdefault(key, {})[parameter.field] = float(math.exp(log))
    return {key: _kernel(key, values, spreads, rows) for key, values in found.items()}


def _kernel(key: str, values: dict[str, float], spreads: Mapping[Field, float], rows: tuple[str, ...]) -> Kernel:
    known: dict[str, Any] = {"n": len(rows), "source": "fitted", "date": DATE, "fitted_on": rows}
    latency = None
    if "latency" in values:
        latency = Rate(value=round_to(values["latency"]), unit="s", spread=spreads["latency"], **known)
    places = [(PLACES[name], values[name]) for name in ("few", "many") if name in values]
    if "share" in values:
        places = [(1.0, values["share"])]
    curve = None
    if places:
        at, shares = zip(*places, strict=True)
        over = KERNEL_AXES.get(key.split("/")[0], "tokens")
        shares = tuple(min(1.0, round_to(share)) for share in shares)
        curve = Curve(over=over, at=at, efficiency=shares, spread=spreads["few" if len(at) > 1 else "share"], **known)
    return Kernel(efficiency=curve, latency=latency)


def round_to(value: float, digits: int = 4) -> float:
    """So many significant digits."""
    return float(f"{value:.{digits}g}")


class _Told(NamedTuple):
    """Logarithm of predicted over measured of one row, and how it answers to each parameter."""

    error: float
    slopes: np.ndarray


def told(row: SpeedRow, parameters: Sequence[Parameter], logs: np.ndarray) -> _Told:
    """One row at these values."""
    kernels = kernels_of(parameters, logs, dict.fromkeys(FIRST_TAU, 0.0), (row.id,))
    machine = replace(row.machine, kernels={**row.machine.kernels, **kernels})
    breakdown = row.breakdown(Roofs(machine, strict=False))
    seconds, scaling = breakdown.seconds, breakdown.sensitivity()
    few = row.phase == "decode" and row.case.question.batch < BETWEEN
    slopes = np.zeros(len(parameters))
    for at, parameter in enumerate(parameters):
        name = "latency" if parameter.field == "latency" else "efficiency"
        if parameter.field in PLACES and (parameter.field == "few") != few:
            continue
        hanging = sum(scaling.get(f"{key}#{name}", 0.0) for key in parameter.kernels)
        slopes[at] = hanging / seconds * (1 if name == "latency" else -1)
    return _Told(math.log(seconds / row.seconds), slopes)


def fit(parameters: Sequence[Parameter], rows: Sequence[SpeedRow]) -> Fitted:
    """An engine's parameters on all machines of one kind that have rows."""
    of = {name: [row for row in rows if row.machine.name == name] for name in sorted({r.machine.name for r in rows})}
    mean = np.log([parameter.start for parameter in parameters])
    tau = np.array([FIRST_TAU[parameter.field] for parameter in parameters])
    logs, deviations = {name: mean.copy() for name in of}, {name: tau.copy() for name in of}
    for _ in range(ROUNDS):
        for name, own in of.items():
            logs[name], deviations[name] = on_machine(parameters, own, mean, tau, logs[name], rounds=1)
        mean, tau = _over_machines(parameters, logs, deviations)
    return Fitted(mean, logs, deviations, tau)


def on_machine(
    parameters: Sequence[Parameter], rows: Sequence[SpeedRow], mean: np.ndarray, tau: np.ndarray, start: np.ndarray,
    *, rounds: int = 4,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One machine's parameters, drawn to the mean, and how well its rows and the mean know them."""
    counts, logs = Counter(row.curve for row in rows), start
    weight = np.array([1 / (NOISE * max(1.0, math.sqrt(counts[row.curve] / ALIKE))) for row in rows])
    covariance = np.diag(tau**2)
    for _ in range(rounds):
        answers = [told(row, parameters, logs) for row in rows]
        slopes = np.array([each.slopes for each in answers]) * weight[:, None]
        errors = np.array([each.error for each in answers]) * weight
        matrix, target = np.vstack([slopes, np.diag(1 / tau)]), np.concatenate([-errors, (mean - logs) / tau])
        step = np.linalg.lstsq(matrix, target, rcond=None)[0]
        logs = _bounded(parameters, logs + np.clip(step, -LONGEST_STEP, LONGEST_STEP))
        covariance = np.linalg.inv(matrix.T @ matrix)
    return logs, np.sqrt(np.diag(covariance))


def _bounded(parameters: Sequence[Parameter], logs: np.ndarray) -> np.ndarray:
    most = np.array([math.log(1e-2) if parameter.field == "latency" else 0.0 for parameter in parameters])
    least = np.array([math.log(1e-7) if parameter.field == "latency" else -6.0 for parameter in parameters])
    return np.clip(logs, least, most)


def _over_machines(
    parameters: Sequence[Parameter], logs: dict[str, np.ndarray], deviations: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation over machines, each weighed by how much its own rows tell of a parameter."""
    values, own = np.array(list(logs.values())), np.array(list(deviations.values()))
    first = np.array([FIRST_TAU[parameter.field] for parameter in parameters])
    known = np.clip(1 - (own / first) ** 2, 0.0, 1.0)  # of what is learned of a parameter there, beyond the mean
    total = known.sum(axis=0)
    centre = np.where(total > 0, (known * values).sum(axis=0) / np.maximum(total, 1e-12), values.mean(axis=0))
    squares = ((values - centre) ** 2 * known).sum(axis=0) + first**2  # as if one more machine differed as at first
    return _bounded(parameters, centre), np.maximum(np.sqrt(squares / (total + 1)), 0.02)


def left_out(parameters: Sequence[Parameter], rows: Sequence[SpeedRow], fitted: Fitted) -> dict[str, float]:
    """Logarithm of predicted over measured by row, of a machine's curves each told by its others and the mean.

    A machine of one curve is told by the mean alone: that is the rung below, and no error of this one.
    """
    errors: dict[str, float] = {}
    for name in fitted.machines:
        own = [row for row in rows if row.machine.name == name]
        curves = sorted({row.curve for row in own})
        for curve in curves if len(curves) > 1 else ():
            others = [row for row in own if row.curve != curve]
            logs, _ = on_machine(parameters, others, fitted.mean, fitted.tau, fitted.machines[name])
            errors |= {row.id: told(row, parameters, logs).error for row in own if row.curve == curve}
    return errors


def spreads_of(rows: Sequence[SpeedRow], errors: Mapping[str, float]) -> dict[Field, float]:
    """What a fitted share is off by on a curve that did not set it: root mean square, each machine once."""

    def over(phases: set[str]) -> float:
        squares: dict[str, list[float]] = {}
        for row in rows:
            if row.id in errors and row.phase in phases:
                squares.setdefault(row.machine.name, []).append(errors[row.id] ** 2)
        means = [sum(own) / len(own) for own in squares.values()]
        return round(max(LEAST_SPREAD, math.sqrt(sum(means) / len(means))) if means else FIRST_TAU["share"], 3)

    decode, prefill = over({"decode"}), over({"prefill", "prefill_chunk"})
    return {"few": decode, "latency": decode, "many": prefill, "share": max(decode, prefill)}


def document_of(engine: str) -> tuple[Table, str]:
    """The engine's file with the kernels that its rows set over those that it has, and a line for each kind of machine."""
    path = KERNELS / f"{engine}.json"
    document: Table = json.loads(path.read_bytes()) if path.exists() else {}
    machines = {name: dict(kernels) for name, kernels in document.get("machines", {}).items()}
    lines, parameters = [], ENGINES[engine]
    every = [row for row in speed_rows() if row.engine == engine]
    for kind in sorted({kind_of(row.machine.gpu) for row in every}):
        rows = [row for row in every if kind_of(row.machine.gpu) == kind]
        fitted = fit(parameters, rows)
        errors = left_out(parameters, rows, fitted)
        spreads = spreads_of(rows, errors)
        lines += [
            f"{engine} on {kind}: {len(rows)} rows, {len(fitted.machines)} machines; left out by curve: {_told(errors)}"
        ]
        for parameter, mean, tau in zip(parameters, fitted.mean, fitted.tau, strict=True):
            names = f"{parameter.kernels[0]}{' and others' if len(parameter.kernels) > 1 else ''}"
            lines.append(f"  {names:44s} {parameter.field:8s} {math.exp(mean):9.3g}  machines differ by {tau:.0%}")
        for name, logs in fitted.machines.items():
            ids = tuple(row.id for row in rows if row.machine.name == name)
            known = {
                key
                for parameter, deviation, tau in zip(parameters, fitted.deviations[name], fitted.tau, strict=True)
                if deviation < KNOWN * tau
                for key in parameter.kernels
            }
            kernels = kernels_of(parameters, logs, spreads, ids)
            own = {key: _plain(kernel) for key, kernel in kernels.items() if key in known}
            machines[name] = {**machines.get(name, {}), **own}
    document = {"schema": KERNELS_SCHEMA, "engine": engine, "machines": dict(sorted(machines.items()))}
    return document, "\n".join(lines)


def _told(errors: Mapping[str, float]) -> str:
    if not errors:
        return "no machine has two curves"
    sizes = sorted(abs(error) for error in errors.values())
    return f"{len(sizes)} rows, median {sizes[len(sizes) // 2]:.1%}, 95th {sizes[int(0.95 * len(sizes))]:.1%}"


def _plain(kernel: Kernel) -> Table:
    raw: Table = msgspec.to_builtins(kernel)
    return {key: value for key, value in raw.items() if value is not None and key != "machine"}


def main(engines: Sequence[str]) -> None:
    """Write the files of the engines named, or of all."""
    for engine in engines or ENGINES:
        document, told_of = document_of(engine)
        (KERNELS / f"{engine}.json").write_text(json.dumps(document, indent=1) + "\n")
        sys.stdout.write(f"{told_of}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
