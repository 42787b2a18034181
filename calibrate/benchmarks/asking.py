"""From points and what their files say to questions on one machine: options say what files do not."""

from collections.abc import Callable, Iterable, Sequence
from os.path import exists, isfile
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from calibrate.benchmarks.points import Given, Left, Point, Reading, Told
from calibrate.benchmarks.reading import read_benchmark
from hwprofiles import HardwareProfile, load_profile, profile_names
from hwprofiles.names import known_as
from hwprofiles.spelling import plain, without_vendor
from twin.ask.case import Case
from twin.ask.question import Question, check_numbers
from twin.ask.resolve import settled
from twin.errors import BadFile, BadValue, Impossible
from twin.models import load_model
from twin.models.spec import ModelSpec
from twin.units import GB

ONE_BY_ONE = "calibrate them one by one"
UNLIKE = 0.1
"""Relative difference of parameters from which on it is another model: embeddings counted twice or not stay below."""


class Asked(NamedTuple):
    """A point and the question that it answers."""

    point: Point
    case: Case


class Evidence(NamedTuple):
    """All points of some files, on the machine they were measured on."""

    machine: HardwareProfile
    asked: tuple[Asked, ...]
    left: tuple[Left, ...]
    paths: tuple[Path, ...]


def evidence(paths: Sequence[Path], given: Given) -> Evidence:
    """What the files hold, asked about. Raises BadFile, BadValue, UnknownName or Impossible in one line.

    Files of different machines, engines or models are no evidence together.
    """
    given.check()
    readings: list[Reading] = []
    left: list[Left] = []
    for path in paths:
        found, others = read_benchmark(path, given)
        readings += found
        left += others
    told = [reading.told for reading in readings]
    machine = _machine(told, given.hw)
    engine = given.engine or _one(told, lambda each: each.engine, "engines")
    for what, of in _ALIKE.items():
        _one(told, of, what)
    cases: dict[Question, Case] = {}
    asked = []
    for reading in readings:
        question = _question(reading, given, engine, given.hw or machine.name)
        if question not in cases:
            cases[question], own = settled(question, machine)
            if own.gpu_count != machine.gpu_count and len(cases) > 1:
                told_by = f"{machine.gpu_count} and {own.gpu_count} devices"
                raise BadFile(f"the files are of different machines: of {told_by}", hint=ONE_BY_ONE)
            machine = own
            _check_model(reading.told, load_model(question.model))
        asked.append(Asked(reading.point, cases[question]))
    return Evidence(machine, tuple(asked), tuple(left), tuple(paths))


def _one(told: Iterable[Told], of: Callable[[Told], str], what: str) -> str:
    """What all say, or those that say anything; BadFile where two say different things."""
    said = list(dict.fromkeys(text for each in told if (text := of(each))))
    if len(said) > 1:
        raise BadFile(f"the files are of different {what}: {said[0]} and {said[1]}", hint=ONE_BY_ONE)
    return said[0] if said else ""


def _model_of(told: Told) -> str:
    """Files of one model lie in different folders."""
    return Path(told.model).name or told.kind


_ALIKE: dict[str, Callable[[Told], str]] = {
    "engines": lambda told: told.engine,
    "models": _model_of,
    "sizes of model": lambda told: str(told.parameters or ""),
}
"""What files of one calibration have in common."""


def _machine(told: Sequence[Told], hw: str | None) -> HardwareProfile:
    """The one that --hw names, or that the files do. Both must agree."""
    cards = list(dict.fromkeys(each.gpus for each in told if each.gpus))
    if len(cards) > 1:
        first, second = (" + ".join(each) for each in cards[:2])
        raise BadFile(f"the files are of different machines: {first} and {second}", hint=ONE_BY_ONE)
    gpus = cards[0] if cards else ()
    if hw is None:
        return _named_by(gpus)
    machine = load_profile(hw)
    for gpu in gpus:
        shipped = known_as(gpu, profile_names())
        known = load_profile(shipped).gpu.name if shipped else gpu
        if _alike(known) != _alike(machine.gpu.name) and shipped is not None:
            raise BadValue(f"--hw {hw} is {machine.gpu.name}, the files are of {gpu}")
    if gpus and len(gpus) != machine.gpu_count:
        named = f"{len(gpus)} device{'s' if len(gpus) > 1 else ''}"
        raise BadValue(f"--hw {hw} has {machine.gpu_count}, the files are of {named}", hint="--hw 2x-NAME is two")
    return machine


def _alike(name: str) -> str:
    return plain(without_vendor(name))


def _named_by(gpus: Sequence[str]) -> HardwareProfile:
    if not gpus:
        raise BadValue("the files do not say on which machine they were measured", hint="--hw says it")
    if len(set(gpus)) > 1:
        raise BadValue(f"the files are of different cards, {' + '.join(gpus)}", hint="--hw takes a profile of them")
    shipped = known_as(gpus[0], profile_names())
    if shipped is None:
        hint = "--hw takes a profile; twin profiles lists what is shipped"
        raise BadValue(f"the files are of {gpus[0]}, of which no profile is shipped", hint=hint)
    return load_profile(shipped if len(gpus) == 1 else f"{len(gpus)}x-{shipped}")


def _question(reading: Reading, given: Given, engine: str, hw: str) -> Question:
    point, told = reading.point, reading.told
    model = given.model or _told_model(told)
    fields: dict[str, Any] = dict(told.flags) | {
        name: value for name, value in (("tp", given.tp), ("pp", given.pp)) if value is not None
    }
    unknown = [name for name in fields if name not in Question.__struct_fields__]
    if unknown:
        flag = unknown[0].replace("_", " ")
        raise Impossible(f"{point.id}: it ran with {flag} {fields[unknown[0]]}, which cannot be asked about")
    ctx_tokens = max(1, point.kv_tokens + point.prompt_tokens + point.steps)
    question = Question(
        ctx_tokens=ctx_tokens, hw=hw, model=model, weights=given.weights or _weights(told, model), engine=engine,
        kv_dtype=given.kv_dtype or told.kv_dtype or None, batch=max(1, 1 if point.requests else point.batch),
        chunk_tokens=given.chunk_tokens or told.chunk_tokens or None,
        max_sequences=point.batch or None if point.requests else None,
    )  # fmt: skip
    question = replace(question, **fields)
    check_numbers(question)
    return question


def _told_model(told: Told) -> str:
    """The file that was run where it lies here, too, else the name by which a server knew it."""
    if told.model.endswith(".gguf"):
        if isfile(told.model):
            return told.model
        what = f"{Path(told.model).name} ({told.kind})" if told.kind else Path(told.model).name
        raise BadValue(f"the files are of {what}, which is not here", hint="--model says which model that is")
    if not told.model:
        raise BadValue("the files do not say of which model they are", hint="--model says it")
    if told.model.startswith(("/", ".", "~")) and not exists(told.model):
        raise BadValue(f"the files are of {told.model}, which is not here", hint="--model says which model that is")
    return told.model


def _weights(told: Told, model: str) -> str | None:
    """As the file says, where the model's own are others."""
    if not told.weights or model.endswith(".gguf"):
        return None
    own = load_model(model).weights.format
    return None if told.engine == "exllamav3" and own == "exl3" else told.weights


def _check_model(told: Told, model: ModelSpec) -> None:
    """BadValue where the file counts other parameters than the model has."""
    has = sum(model.parameters.values())
    if told.parameters > 0 and abs(told.parameters / has - 1) > UNLIKE:
        own, of = f"{told.parameters / GB:.2f} B parameters", told.kind or told.model
        raise BadValue(f"the files are of {of} with {own}, {model.name} has {has / GB:.2f} B")
