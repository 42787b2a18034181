"""Sets rates of engines' kernels from what others published of whole steps on many machines.

`python -m calibrate.published.shares [engine ...]` writes them into `hwprofiles/kernels/<engine>.json`, and for
`step/<engine>` what its host takes of a step beside kernels; `--check` only compares. An engine has a few (ENGINES):
shares of a roof and latencies, each of one or several of its kernels. On every machine with rows they are found by
least squares on relative errors, and drawn to the engine's mean over machines as strongly as machines are alike, which
is learned with them: one row moves a machine a little, a curve of rows sets it.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from calibrate.published.curves import KernelRow, kernel_rows
from calibrate.published.speeds import SERVING, SpeedRow, speed_rows
from hwprofiles.files import Table
from hwprofiles.ladder import kind_of
from hwprofiles.profile import KERNEL_AXES, Kernel
from hwprofiles.rates import Curve, Rate
from hwprofiles.store import KERNELS, KERNELS_SCHEMA
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.engines import engine_names

Row = SpeedRow | KernelRow
Values = NDArray[Any]

DATE = "2026-12-01"
NOISE = 0.05  # relative, of a published figure: two runs of a benchmark on machines of one name differ by as much
ROUNDS = 8
FOLDS = 8  # that a machine's curves are left out in
ALIKE = 4  # rows of a curve that tell as much as all of it: its errors go together
LONGEST_STEP = 0.7  # of a logarithm, in one round
KNOWN = 0.9  # of what machines differ by: a kernel of which a machine's rows leave more is not that machine's
LEAST_SPREAD = 0.02  # of a rate
LEAST_TAU = 0.02  # that machines are taken to differ by
FEW = 45.0  # tokens up to which bytes hold products
LATENCY_TAU, FEW_TAU, MANY_TAU = 0.5, 0.15, 0.3  # how far machines differ, before it is learned
LEAST_S, MOST_S = 1e-7, 1e-2  # of a latency
LEAST_SHARE = 2e-3
LEAST_STEP_S = 1e-5  # of what a host takes of a step
FEWEST_SERVED = 5  # models on machines that set an engine's step; with fewer it stands on that of other engines
MAD = 1.4826  # standard deviations of a normal distribution in a median distance from its middle


class Parameter(NamedTuple):
    """One number of an engine on a machine, which several of its kernels have in common."""

    kernels: tuple[str, ...]
    place: float | None  # of a share, on its kernels' axis; None: their latency
    start: float

    @property
    def tau(self) -> float:
        """How far machines are taken to differ before it is learned."""
        if self.place is None:
            return LATENCY_TAU
        return FEW_TAU if self.place <= FEW and not self.kernels[0].startswith("attend") else MANY_TAU


STEPS_ALONE = {1.0: 0.9, 12.0: 0.7, 512.0: 0.5}
"""Places, with first values, where whole steps tell: of one token, of a few at once, of a prompt's."""
CURVES = {16.0: 0.9, 160.0: 0.7, 1024.0: 0.6}
"""The same where times of single kernels tell: of a few tokens, of many sequences at once, of a prompt's."""


def products(
    implementation: str, *formats: str, operation: str = "linear", places: Mapping[float, float] = CURVES
) -> tuple[Parameter, ...]:
    """Shares of products over tokens, the same for all formats."""
    keys = tuple(f"{operation}/{implementation}/{fmt}" for fmt in formats)
    return tuple(Parameter(keys, place, start) for place, start in places.items())


def launches(
    implementation: str, *formats: str, operation: str = "linear", start: float = 1e-5
) -> tuple[Parameter, ...]:
    """Their latency."""
    return (Parameter(tuple(f"{operation}/{implementation}/{fmt}" for fmt in formats), None, start),)


def of_each(implementation: str, *formats: str, operation: str = "linear") -> tuple[Parameter, ...]:
    """Shares and latencies of products, each format's its own."""
    return tuple(
        each
        for fmt in formats
        for each in (
            *products(implementation, fmt, operation=operation),
            *launches(implementation, fmt, operation=operation),
        )
    )


def attention(implementation: str, *formats: str) -> tuple[Parameter, ...]:
    """Shares and latencies of attention in decode and in prompts, by format."""
    found: list[Parameter] = []
    for fmt in formats:
        decode, dense = f"attend_decode/{implementation}/{fmt}", f"attend_dense/{implementation}/{fmt}"
        found += [Parameter((decode,), 1.0, 0.7), Parameter((decode,), None, 1e-5)]
        found += [Parameter((dense,), 512.0, 0.3), Parameter((dense,), 4096.0, 0.6), Parameter((dense,), None, 1e-5)]
    return tuple(found)


GGML_PLAIN, GGML = "f16", "quantised"
ENGINES: dict[str, tuple[Parameter, ...]] = {
    "llama.cpp": (
        *products("llama.cpp", GGML, places=STEPS_ALONE),
        *products("llama.cpp", GGML_PLAIN, places=STEPS_ALONE),
        *launches("llama.cpp", GGML, GGML_PLAIN, start=4e-5),
        *products("llama.cpp", GGML, GGML_PLAIN, operation="experts", places=STEPS_ALONE),
        *launches("llama.cpp", GGML, GGML_PLAIN, operation="experts"),
        *(
            Parameter((f"{operation}/{name}/fp16",), 1.0, start)
            for name in ("llama.cpp", "llama.cpp_unfused")
            for operation, start in (("attend_decode", 0.5), ("attend_dense", 0.3))
        ),
        Parameter(("attend_decode/llama.cpp/q8_0",), 1.0, 0.3),
        Parameter((f"experts/llama.cpp_cpu/{GGML}", f"linear/llama.cpp_cpu/{GGML}"), 1.0, 0.5),
        Parameter(("attend_decode/llama.cpp_cpu/fp16",), 1.0, 0.5),
    ),
    "exllamav3": (
        *products("exllamav3", "exl3", places={1.0: 0.4, 2048.0: 0.5}),
        Parameter(("attend_decode/exllamav3/exl3_k8v8",), 1.0, 0.3),
        Parameter(("attend_dense/exllamav3/exl3_k8v8",), 1.0, 0.5),
    ),
    "library": of_each("library", "bf16"),
    "vllm": (
        *of_each("vllm", "fp8", "nvfp4"),
        *of_each("vllm", "bf16", "fp8", "mxfp4", "nvfp4", operation="experts"),
    ),
    "sglang": (
        *of_each("sglang", "fp8", "nvfp4"),
        *of_each("sglang", "bf16", "fp8", "mxfp4", "nvfp4", "w4a16", operation="experts"),
    ),
    "flash_attention": attention("flash_attention", "bf16"),
    "flashinfer": attention("flashinfer", "bf16", "fp8"),
    "fa3": attention("fa3", "bf16", "fp8"),
    "trtllm_mha": attention("trtllm_mha", "bf16", "fp8"),
    "triton": attention("triton", "bf16", "fp8"),
}
"""By whose kernels they are, which is the name of the file that holds them."""


class Fitted(NamedTuple):
    """Logarithms of an engine's parameters: their mean over machines, by machine, and how far machines differ."""

    mean: Values
    machines: dict[str, Values]
    deviations: dict[str, Values]
    tau: Values


def kernels_of(
    parameters: Sequence[Parameter], logs: Values, spreads: Mapping[str, float], rows: tuple[str, ...]
) -> dict[str, Kernel]:
    """Kernels with these values; spreads by phase."""
    shares: dict[str, dict[float, float]] = {}
    latencies: dict[str, float] = {}
    for parameter, log in zip(parameters, logs, strict=True):
        for key in parameter.kernels:
            if parameter.place is None:
                latencies[key] = round_to(math.exp(log))
            else:
                shares.setdefault(key, {})[parameter.place] = min(1.0, round_to(math.exp(log)))
    known: dict[str, Any] = {"n": len(rows), "source": "fitted", "date": DATE, "fitted_on": rows}
    found: dict[str, Kernel] = {}
    for key in dict.fromkeys((*shares, *latencies)):
        operation, own = key.split("/")[0], sorted(shares.get(key, {}).items())
        spread = spreads["prefill" if operation == "attend_dense" else "decode"]
        curve = None
        if own:
            at, values = zip(*own, strict=True)
            over = KERNEL_AXES.get(operation, "tokens")
            curve = Curve(over=over, at=at, efficiency=values, spread=spread, **known)
        latency = Rate(value=latencies[key], unit="s", spread=spread, **known) if key in latencies else None
        found[key] = Kernel(efficiency=curve, latency=latency)
    return found


def round_to(value: float, digits: int = 4) -> float:
    """So many significant digits."""
    return float(f"{value:.{digits}g}")


class _Told(NamedTuple):
    """Logarithm of predicted over measured of one row, and how it answers to each parameter."""

    error: float
    slopes: Values


def told(rows: Sequence[Row], parameters: Sequence[Parameter], logs: Values) -> list[_Told]:
    """Rows of one machine at these values."""
    kernels = kernels_of(parameters, logs, {"decode": 0.0, "prefill": 0.0}, ("all",))
    roofs: dict[int, Roofs] = {}
    answers = []
    for row in rows:
        if id(row.machine) not in roofs:
            machine = replace(row.machine, kernels={**row.machine.kernels, **kernels})
            roofs[id(row.machine)] = Roofs(machine, strict=False)
        answers.append(_told_of(row, parameters, kernels, row.breakdown(roofs[id(row.machine)])))
    return answers


def _told_of(row: Row, parameters: Sequence[Parameter], kernels: Mapping[str, Kernel], breakdown: Breakdown) -> _Told:
    """A share between two places answers to both, as it is interpolated."""
    seconds, scaling = breakdown.seconds, breakdown.sensitivity()
    slopes = np.zeros(len(parameters))
    for at, parameter in enumerate(parameters):
        for key in parameter.kernels:
            if parameter.place is None:
                slopes[at] += scaling.get(f"{key}#latency", 0.0) / seconds
            elif curve := kernels[key].efficiency:
                slopes[at] -= (
                    scaling.get(f"{key}#efficiency", 0.0) / seconds * _weight(curve, parameter.place, row.grain)
                )
    return _Told(math.log(seconds / row.seconds), slopes)


def _weight(curve: Curve, place: float, grain: float) -> float:
    """By how much the logarithm of a curve at `grain` follows that at one of its places."""
    where = grain if curve.over in ("tokens", "rows") else place
    low = max((at for at in curve.at if at <= where), default=curve.at[0])
    high = min((at for at in curve.at if at >= where), default=curve.at[-1])
    if place not in (low, high):
        return 0.0
    if low == high:
        return 1.0
    upper = math.log(where / low) / math.log(high / low)
    share = curve.efficiency[curve.at.index(place)] / curve(where)
    return (upper if place == high else 1 - upper) * share


def fit(parameters: Sequence[Parameter], rows: Sequence[Row]) -> Fitted:
    """An engine's parameters on all machines of one kind that have rows."""
    of = {
        name: [row for row in rows if row.machine.device_name == name]
        for name in sorted({r.machine.device_name for r in rows})
    }
    mean = np.log([parameter.start for parameter in parameters])
    tau = np.array([parameter.tau for parameter in parameters])
    logs, deviations = {name: mean.copy() for name in of}, {name: tau.copy() for name in of}
    for _ in range(ROUNDS):
        for name, own in of.items():
            logs[name], deviations[name] = on_machine(parameters, own, mean, tau, logs[name], rounds=1)
        mean, tau = _over_machines(parameters, logs, deviations)
    return Fitted(mean, logs, deviations, tau)


def on_machine(
    parameters: Sequence[Parameter], rows: Sequence[Row], mean: Values, tau: Values, start: Values,
    *, rounds: int = 4,
) -> tuple[Values, Values]:  # fmt: skip
    """One machine's parameters, drawn to the mean, and how well its rows and the mean know them."""
    counts, logs = Counter(row.curve for row in rows), start
    weight = np.array([1 / (NOISE * max(1.0, math.sqrt(counts[row.curve] / ALIKE))) for row in rows])
    covariance = np.diag(tau**2)
    for _ in range(rounds):
        answers = told(rows, parameters, logs)
        slopes = np.array([each.slopes for each in answers]) * weight[:, None]
        errors = np.array([each.error for each in answers]) * weight
        matrix, target = np.vstack([slopes, np.diag(1 / tau)]), np.concatenate([-errors, (mean - logs) / tau])
        step = np.linalg.lstsq(matrix, target, rcond=None)[0]
        logs = _bounded(parameters, logs + np.clip(step, -LONGEST_STEP, LONGEST_STEP))
        covariance = np.linalg.inv(matrix.T @ matrix)
    return logs, np.sqrt(np.diag(covariance))


def _bounded(parameters: Sequence[Parameter], logs: Values) -> Values:
    most = np.log([MOST_S if parameter.place is None else 1.0 for parameter in parameters])
    least = np.log([LEAST_S if parameter.place is None else LEAST_SHARE for parameter in parameters])
    return np.asarray(np.clip(logs, least, most))


def _over_machines(
    parameters: Sequence[Parameter], logs: dict[str, Values], deviations: dict[str, Values]
) -> tuple[Values, Values]:
    """Mean and deviation over machines, each weighed by how much its own rows tell of a parameter."""
    values, own = np.array(list(logs.values())), np.array(list(deviations.values()))
    first = np.array([parameter.tau for parameter in parameters])
    known = np.clip(1 - (own / first) ** 2, 0.0, 1.0)  # of what is learned of a parameter there, beyond the mean
    total = known.sum(axis=0)
    centre = np.where(total > 0, (known * values).sum(axis=0) / np.maximum(total, 1e-12), values.mean(axis=0))
    squares = ((values - centre) ** 2 * known).sum(axis=0) + first**2  # as if one more machine differed as at first
    return _bounded(parameters, centre), np.maximum(np.sqrt(squares / (total + 1)), LEAST_TAU)


def left_out(parameters: Sequence[Parameter], rows: Sequence[Row], fitted: Fitted) -> dict[str, float]:
    """Logarithm of predicted over measured by row, of a machine's curves each told by its others and the mean.

    Whole curves are left out, in FOLDS parts. A machine of one curve is told by the mean alone: that is the rung below,
    and no error of this one.
    """
    errors: dict[str, float] = {}
    for name in fitted.machines:
        own = [row for row in rows if row.machine.device_name == name]
        curves = sorted({row.curve for row in own})
        for fold in range(min(FOLDS, len(curves)) if len(curves) > 1 else 0):
            away = set(curves[fold::FOLDS])
            rest = [row for row in own if row.curve in away]
            others = [row for row in own if row.curve not in away]
            logs, _ = on_machine(parameters, others, fitted.mean, fitted.tau, fitted.machines[name])
            errors |= {row.id: each.error for row, each in zip(rest, told(rest, parameters, logs), strict=True)}
    return errors


def spreads_of(rows: Sequence[Row], errors: Mapping[str, float]) -> dict[str, float]:
    """By phase, what a fitted rate is off by on a curve that did not set it: root mean square, each machine once.

    Where no curve was left out, what machines are taken to differ by.
    """
    found: dict[str, float] = {}
    for name in ("decode", "prefill"):
        squares: dict[str, list[float]] = {}
        for row in rows:
            if row.id in errors and row.phase.startswith(name):
                squares.setdefault(row.machine.device_name, []).append(errors[row.id] ** 2)
        means = [sum(own) / len(own) for own in squares.values()]
        found[name] = round(max(LEAST_SPREAD, math.sqrt(sum(means) / len(means))), 3) if means else MANY_TAU
    return found


def rows_of(engine: str) -> list[Row]:
    """All published rows that tell of the engine's kernels."""
    own = {key for parameter in ENGINES[engine] for key in parameter.kernels}
    kernels: list[Row] = [row for row in kernel_rows() if row.op.kernel in own]
    return [*(row for row in speed_rows() if row.engine == engine and not row.served), *kernels]


def document_of(engine: str) -> tuple[Table, str]:
    """The engine's file, kernels that rows set over those that it has, and how each kind of machine fits."""
    path = KERNELS / f"{engine}.json"
    document: Table = json.loads(path.read_bytes()) if path.exists() else {}
    machines = {name: dict(kernels) for name, kernels in document.get("machines", {}).items()}
    lines, parameters, every = [], ENGINES[engine], rows_of(engine)
    for kind in sorted({kind_of(row.machine.gpu) for row in every}):
        rows = [row for row in every if kind_of(row.machine.gpu) == kind]
        fitted = fit(parameters, rows)
        errors = left_out(parameters, rows, fitted)
        lines += [f"{engine} on {kind}: {len(rows)} rows, {_summary(fitted, errors)}", *_means(parameters, fitted)]
        for name, kernels in known_kernels(parameters, rows, fitted, spreads_of(rows, errors)).items():
            there = machines.setdefault(name, {})
            there |= {key: _plain(own) for key, own in kernels.items() if _is_published(there.get(key, {}))}
    return _document(engine, machines), "\n".join(lines)


def known_kernels(
    parameters: Sequence[Parameter], rows: Sequence[Row], fitted: Fitted, spreads: Mapping[str, float]
) -> dict[str, dict[str, Kernel]]:
    """By machine, the kernels of which its own rows tell more than the mean does."""
    found: dict[str, dict[str, Kernel]] = {}
    for name, logs in fitted.machines.items():
        named = tuple(sorted({row.named for row in rows if row.machine.device_name == name}))
        told_of = fitted.deviations[name] < KNOWN * fitted.tau
        known = {key for parameter, own in zip(parameters, told_of, strict=True) if own for key in parameter.kernels}
        kernels = kernels_of(parameters, logs, spreads, named)
        found[name] = {key: kernel for key, kernel in kernels.items() if key in known}
    return found


def _document(engine: str, machines: Table) -> Table:
    return {"schema": KERNELS_SCHEMA, "engine": engine, "machines": dict(sorted(machines.items()))}


def _summary(fitted: Fitted, errors: Mapping[str, float]) -> str:
    """Of how many machines, and how far whole curves are off that were left out."""
    machines = f"{len(fitted.machines)} machines"
    if not errors:
        return f"{machines}, none with two curves"
    sizes = sorted(abs(error) for error in errors.values())
    middle, most = sizes[len(sizes) // 2], sizes[int(0.95 * len(sizes))]
    return f"{machines}; left out by curve: {len(sizes)} rows, median {middle:.1%}, 95th {most:.1%}"


def _means(parameters: Sequence[Parameter], fitted: Fitted) -> Iterator[str]:
    """A line for each parameter."""
    for parameter, mean, tau in zip(parameters, fitted.mean, fitted.tau, strict=True):
        names = f"{parameter.kernels[0]}{' and others' if len(parameter.kernels) > 1 else ''}"
        place = "latency" if parameter.place is None else f"at {parameter.place:g}"
        yield f"  {names:44s} {place:8s} {math.exp(mean):9.3g}  machines differ by {tau:.0%}"


def steps_of(engine: str) -> tuple[Table, str]:
    """The engine's file with what the host takes of a step: the median of what kernels leave of served steps.

    One number for all machines, each model on each machine once, however its layers are shared.
    """
    left = {key: [beside_kernels_s(row) for row in rows] for key, rows in served(engine).items()}
    medians = [float(np.median(own)) for own in left.values()]
    value = round_to(max(LEAST_STEP_S, float(np.median(medians))), 2)
    spread = round(min(1.0, float(np.median(np.abs(np.array(medians) - value))) * MAD / value), 2)
    rows = tuple(sorted({f"{SERVING.name} {machine}" for machine, _ in left}))
    latency = {"value": value, "unit": "s", "spread": spread, "n": len(medians), "source": "fitted", "date": DATE,
               "fitted_on": rows, "note": "what kernels leave of served steps"}  # fmt: skip
    machines: Table = json.loads((KERNELS / f"{engine}.json").read_bytes())["machines"]
    for machine in sorted({machine for machine, _ in left}):
        machines.setdefault(machine, {})[f"step/{engine}/decode"] = {"latency": latency}
    told_of = f"{engine}: {value * 1e3:.2f} ms a step, of {len(medians)} models on machines, {spread:.0%}"
    return _document(engine, machines), told_of


def served(engine: str) -> dict[tuple[str, str], list[SpeedRow]]:
    """Its served steps, by device and model."""
    found: dict[tuple[str, str], list[SpeedRow]] = {}
    for row in (row for row in speed_rows() if row.engine == engine and row.served):
        found.setdefault((row.machine.device_name, row.case.model.name), []).append(row)
    return found


def beside_kernels_s(row: SpeedRow) -> float:
    """What the kernels of a served step leave of its seconds, less than nothing where they alone take longer."""
    some = Rate(value=LEAST_STEP_S, unit="s", spread=0.0, n=1, source="published", date=DATE)
    kernels = {**row.machine.kernels, f"step/{row.engine}/decode": Kernel(latency=some)}
    breakdown = row.breakdown(Roofs(replace(row.machine, kernels=kernels), strict=False))
    host_s = sum(seconds for (part, _, _), (seconds, _) in breakdown.by_account.items() if part.startswith("host"))
    return row.seconds - breakdown.seconds + host_s


def _is_published(there: Table) -> bool:
    """Whether this command may set a kernel: not where the machine's own calibration or seed did."""
    rates = [rate for rate in there.values() if isinstance(rate, dict)]
    return all(rate.get("date") == DATE and rate["source"] == "fitted" for rate in rates)


def _plain(kernel: Kernel) -> Table:
    raw: Table = msgspec.to_builtins(kernel)
    return {key: value for key, value in raw.items() if value is not None and key != "machine"}


def main(arguments: Sequence[str]) -> int:
    """Write the files of the engines named, or of all; or check them: 1 where one is another."""
    check, others = "--check" in arguments, 0
    steps = [f"step/{name}" for name in engine_names() if len(served(name)) >= FEWEST_SERVED]
    for engine in [each for each in arguments if each != "--check"] or [*ENGINES, *steps]:
        word, _, name = engine.rpartition("/")
        document, told_of = steps_of(name) if word else document_of(name)
        path, text = KERNELS / f"{name}.json", json.dumps(document, indent=1) + "\n"
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            others += 1
            told_of += f"\n{path.name} is another"
        sys.stdout.write(f"{told_of}\n")
    return int(others > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
