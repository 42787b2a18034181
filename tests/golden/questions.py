"""The questions whose answers are kept, none of them picked by hand.

They are made from the shipped models, machines, rulebooks and formats and from the values of every option that moves
numbers; those of `refusals.py` are refused. Where every combination would be too many, one is drawn by lot: the one
whose words have the smallest checksum. Such a draw does not depend on what else there is, so that a new model or
machine adds questions and leaves the others alone.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from calibrate.operations.lowering import DENSE_MODEL, SPARSE_MODEL
from calibrate.published.cases import load_recorded, recorded_machines
from hwprofiles import load_profile, profile_names
from hwprofiles.store import RECORDS
from tests.golden.refusals import refusals
from twin.engines import EngineRules, engine_names, load_engine
from twin.formats import format_names, is_exl3, kv_format
from twin.models import ModelSpec, load_model, model_names
from twin.models.rewritten import in_weights, weight_names
from twin.models.speculation import ACCEPTANCE
from twin.units import parse_tokens

Words = tuple[str, ...]
Options = dict[str, list[Words]]
"""What can be asked, value by value, by the option that it is about."""
Item = TypeVar("Item")

CONTEXTS = ("1", "512", "2051", "8k", "32k", "100k", "200k", "1M", "3M")
USUAL_SPARSE, USUAL_DENSE = "1M", "100k"
"""Longest context of questions about options: of models with sparse attention and of others."""

DECODES = ("attend_decode", "gather_vram", "gather_host")
PREFILLS = ("attend_dense",)
"""Operations of a kernel's key in a profile, by the phase that needs one of them."""


class Place(NamedTuple):
    """A model as an engine runs it on a machine under a layout."""

    model: str
    engine: str
    machine: str
    layout: str

    @property
    def words(self) -> Words:
        """The options that name it."""
        return ("--model", self.model, "--engine", self.engine, "--hw", self.machine, "--layout", self.layout)

    @property
    def kind(self) -> str:
        """What places share whose options are the same."""
        return f"{self.engine} {self.layout}"

    @property
    def rules(self) -> EngineRules:
        """The engine's rulebook."""
        return load_engine(self.engine)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return load_model(self.model)

    @property
    def usual(self) -> list[str]:
        """Contexts of questions about options."""
        longest = parse_tokens(USUAL_SPARSE if self.spec.indexer else USUAL_DENSE)
        return [ctx for ctx in CONTEXTS if 512 < parse_tokens(ctx) <= longest]


def drawn(items: Iterable[Item], by: str, *, most: int = 1) -> list[Item]:
    """Those that the lot `by` falls on: the smallest checksums first."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{by} {item}".encode()).digest())[:most]


def one(items: Iterable[Item], by: str) -> Item:
    """The one that the lot falls on; there must be any."""
    return drawn(items, by)[0]


@cache
def measured_models() -> list[str]:
    """Models that figures or calibrations are about: they are asked everything, the others little."""
    asked = {case.ask.model for each in recorded_machines() for case in load_recorded(each).case_of.values()}
    return [name for name in model_names() if name in {SPARSE_MODEL, DENSE_MODEL, *asked}]


@cache
def measured_machines() -> list[str]:
    """Machines with records: those of data sheets, whose rates are borrowed, are asked little, see `_machines`."""
    return [name for name in profile_names() if (RECORDS / name).is_dir()]


@cache
def places() -> list[Place]:
    """Wherever a measured model can be asked for."""
    return [place for model in measured_models() for place in places_of(model)]


@cache
def places_of(model: str) -> list[Place]:
    """Wherever a rulebook loads the model's checkpoint and runs its attention, with or without rates on the machine."""
    spec = load_model(model)
    return [
        Place(model, engine, machine, layout)
        for engine, rules in ((name, load_engine(name)) for name in engine_names())
        if spec.weights.format in rules.weight_formats and (not spec.selects_blocks or rules.sparse_kernels)
        for machine in measured_machines()
        for layout in rules.layouts
        if layout != "offload" or spec.selects_blocks
    ]


@cache
def at_home(place: Place) -> bool:
    """Whether the machine has rates for the model's weights under that engine, and memory enough for them."""
    spec, machine = place.spec, load_profile(place.machine)
    total = sum(spec.parameters.values())
    rated = place.rules.kernel("linear", spec.weights.format) in machine.kernels
    holds = total * spec.weights.bits / 8 < machine.gpu.vram.value * machine.gpu_count
    return rated and holds and runs_on(place)


def runs_on(place: Place) -> bool:
    """Whether the engine is modelled on so many devices."""
    return not place.rules.shares_pool or load_profile(place.machine).gpu_count == 1


def homes() -> list[Place]:
    return [place for place in places() if at_home(place)]


def kinds() -> dict[str, list[Place]]:
    """Places at home, by kind."""
    found = homes()
    return {kind: [place for place in found if place.kind == kind] for kind in sorted({place.kind for place in found})}


def abroad() -> list[Place]:
    """Places without rates or memory enough, of one model each."""
    groups: dict[str, list[Place]] = {}
    for place in places():
        if not at_home(place):
            groups.setdefault(f"{place.kind} {place.machine}", []).append(place)
    return [one(alike, group) for group, alike in groups.items()]


def fits_heads(place: Place, fmt: str) -> bool:
    return not kv_format(fmt).check(head_dim=place.spec.attention.head_dim)


@cache
def rated_formats(place: Place, operations: tuple[str, ...] = DECODES) -> list[str]:
    """What the engine keeps there, its kernels start on and the machine has rates for, of one of the operations."""
    rules, has = place.rules, float(load_profile(place.machine).gpu.compute_capability)
    return [
        fmt
        for fmt in rules.formats_of(place.layout)
        if fits_heads(place, fmt)
        and float(rules.needs.get(fmt, kv_format(fmt).min_capability) or 0) <= has
        and any(has_rate(place, fmt, by, operations) for by in (rules.name, *rules.backends_of(fmt)))
    ]


def has_rate(place: Place, fmt: str, backend: str, operations: tuple[str, ...] = DECODES) -> bool:
    """Whether the machine has a rate for one of the operations over that format."""
    kernels = load_profile(place.machine).kernels
    return any(f"{operation}/{backend}/{fmt}" in kernels for operation in operations)


def only_what_if(place: Place, fmt: str) -> bool:
    """Whether the format can be asked for there, but not without `--what-if`; exllamav3's many by exllamav3 alone."""
    foreign = is_exl3(fmt) and fmt not in place.rules.formats
    return fits_heads(place, fmt) and not foreign and fmt not in rated_formats(place)


def valued(**options: Sequence[str]) -> Options:
    """Options with values of their own; an empty one stands for an option without."""
    named = {f"--{name.replace('_', '-')}": values for name, values in options.items()}
    return {name: [(name, value) if value else (name,) for value in values] for name, values in named.items()}


EVERYWHERE = valued(
    batch=("2", "8", "64"), chunk=("512", "4096", "16k"), pcie=("x16", "x8", "x4"), state_dtype=("fp16", "fp32")
)
OFFLOADED = valued(
    staging=("4MiB", "128MiB", "1GiB"), prefill=("auto", "staged", "naive"), copies=("serial", "overlapped"),
    pooled=("vram", "host"), host_pages=("huge", "4KiB"),
)  # fmt: skip
TABLED = valued(ngram=("ram", "disk"))
POOLED = valued(
    util=("0.8", "0.93", "0.97"), pool=("2GiB", "5GiB"), max_seqs=("1", "16", "256"), max_model_len=("128k", "1M"),
    prefix_cache=("",), cold_start=("",), stock=("",), sync_scheduling=("",),
) | {"--cached": [("--prefix-cache", "--cached", tokens) for tokens in ("300", "6k")]}  # fmt: skip
HASHED = ("--trace-in", "hashed.jsonl", "--time-unit")
PROMPTS = ("--trace-in", "prompts.jsonl", "--rate", "4", "--chars-per-token", "4")
WORKLOADS = (
    valued(
        requests=("1", "60"), rate=("0.2", "4", "50"), prompt=("64", "4k", "30k"), output_tokens=("1", "16", "1k"),
        lengths=("fixed", "uniform", "exponential", "lognormal"), seed=("7",), max_model_len=("8k", "64k"),
        no_interval=("",),
    )
    | {
        "--cv": [("--lengths", "lognormal", "--cv", "2"), ("--lengths", "uniform", "--cv", "0.3")],
        "--arrivals": [("--rate", "4", "--arrivals", kind) for kind in ("poisson", "constant", "burst")],
        "--burstiness": [("--rate", "4", "--burstiness", "0.25")],
        "--prefix": [("--prefix", "2k"), ("--prefix", "2k", "--prefix-cache")],
    }
    | {  # files beside which every question is asked, see `answers.py`
        "--trace-in": [("--trace-in", "trace.jsonl")],
        "--time-unit": [(*HASHED, unit) for unit in ("s", "ms")],
        "--hash-tokens": [(*HASHED, unit, "--hash-tokens", "16", "--prefix-cache") for unit in ("s", "ms")],
    }
)  # fmt: skip
NOT_COMPARED = {"--cached", *OFFLOADED}
"""Options that `compare` does not have."""
NOT_SIMULATED = {"--cached", "--batch"}
"""The same of `simulate`."""


def options_of(place: Place, *, simulated: bool = False) -> Options:
    """Options of a prediction, or of a simulation, there: what can be asked for beside context and format."""
    made = dict(EVERYWHERE)
    if place.layout == "offload":
        made |= OFFLOADED
    if place.spec.ngram is not None:
        made |= TABLED
    if place.rules.block_pool is not None:
        made |= POOLED | {"--spec": [words for words in drafts(place.model) if "--accept" in words]}
        made["--task"] = published_tasks(place.model)
    made["--weights"] = [("--weights", name) for name in drawn(loaded_weights(place), str(place), most=2)]
    other = drawn((fmt for fmt in place.rules.formats if only_what_if(place, fmt)), str(place))
    made["--what-if"] = [("--kv-dtype", fmt, "--what-if") for fmt in other]
    made["--backend"] = [
        ("--kv-dtype", fmt, "--backend", backend)
        for fmt in rated_formats(place)
        for backend in place.rules.backends_of(fmt)
        if has_rate(place, fmt, backend)
    ]
    made = {option: values for option, values in made.items() if values}
    return {name: each for name, each in made.items() if name not in NOT_SIMULATED} | WORKLOADS if simulated else made


def loaded_weights(place: Place) -> list[str]:
    """Other weights that the engine loads."""
    able = place.rules.weight_formats
    return [name for name in (*weight_names(), BITS_A_WEIGHT) if in_weights(place.spec, name).weights.format in able]


def drafts(model: str) -> list[Words]:
    """Drafters with the published acceptance, and with few to the most tokens of which half are accepted."""
    made: list[Words] = []
    for drafter in load_model(model).drafters:
        made.append(("--spec", drafter.name))
        for tokens in sorted({1, drafter.default_tokens, (drafter.max_tokens * 3) // 4, drafter.max_tokens}):
            made.append(("--spec", f"{drafter.name}:{tokens}", "--accept", f"{1 + tokens / 2:g}"))
    return made


def published_tasks(model: str) -> list[Words]:
    """Drafters and tasks whose acceptance is published for the model's family, as they are asked for."""
    path = ACCEPTANCE / f"{load_model(model).family}.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return sorted({("--spec", f"{row['drafter']}:{row['tokens']}", "--task", row["task"]) for row in rows})


REQUESTS = ("--requests", "24")
BITS_A_WEIGHT = "3.5bpw"


@cache
def questions() -> dict[str, list[Words]]:
    """All of them, each once, by the name of the file that keeps their answers."""
    made: dict[str, Iterable[Words]] = {
        "predict": _predictions(),
        "options": (*_with_options(), *_celled(), *_of_engines()),
        "speculation": _speculating(),
        "compare": _comparisons(),
        "simulate": _simulations(),
        "catalogue": _catalogue(),
        "validate": (("validate", "--recorded", "--hw", machine) for machine in measured_machines()),
        "machines": _machines(),
        "refused": refusals(measured_models()),
    }
    return {name: list(dict.fromkeys(asked)) for name, asked in made.items()}


def _ask(place: Place, ctx: str, *more: str, command: str = "predict") -> Words:
    return (command, *place.words, "--ctx", ctx, *more)


def _usually(place: Place, words: Words, command: str = "predict") -> Words:
    """The words at a context, and in a format, that the lot falls on."""
    by = f"{place} {words}"
    able = rated_formats(place, PREFILLS if command == "simulate" else DECODES)
    formats = [] if "--kv-dtype" in words else drawn(able, by)
    stored = ("--kv-dtype", formats[0]) if formats else ()
    ctx = () if command == "simulate" else ("--ctx", one(place.usual, by))
    return (command, *place.words, *ctx, *stored, *words)


def _somewhere(
    able: list[Place], offered: Callable[[Place], Iterable[Words]], command: str = "predict"
) -> Iterator[Words]:
    """Everything that is offered anywhere, at one of the places that offer it."""
    asked: dict[Words, list[Place]] = {}
    for place in able:
        for words in offered(place):
            asked.setdefault(words, []).append(place)
    return (_usually(one(where, " ".join(words)), words, command) for words, where in asked.items())


def _predictions() -> Iterator[Words]:
    """A ladder of contexts where there are rates, some context where there are none, and every format."""
    for place in homes():
        yield from (_ask(place, ctx) for ctx in CONTEXTS)
    yield from (_ask(place, one(CONTEXTS, str(place))) for place in abroad())
    for place in homes():
        for fmt in rated_formats(place):
            yield _ask(place, one(place.usual, f"{place} {fmt}"), "--kv-dtype", fmt)
    for kind, alike in kinds().items():
        for fmt in _shown_formats(kind):
            for place in drawn((place for place in alike if only_what_if(place, fmt)), f"{kind} {fmt}"):
                yield _ask(place, one(place.usual, fmt), "--kv-dtype", fmt, "--what-if")
    for model in model_names():
        if model not in measured_models():
            yield from _briefly(model)


def _briefly(model: str) -> Iterator[Words]:
    """Two questions about a model that nobody measured: at home where it has one, and anywhere in other weights."""
    able = [place for place in places_of(model) if runs_on(place)]
    place = one([place for place in able if at_home(place)] or able, model)
    yield _ask(place, one(CONTEXTS, model))
    place = one(able, f"{model} in other weights")
    yield _ask(place, one(place.usual, model), "--weights", one(loaded_weights(place), model))


def _shown_formats(by: str) -> list[str]:
    """All formats; of exllamav3's many one for each number of bits of K."""
    many: dict[int, list[str]] = {}
    for fmt in filter(is_exl3, format_names()):
        many.setdefault(kv_format(fmt).key.bits, []).append(fmt)
    few = [one(names, f"{by} {bits}") for bits, names in many.items()]
    return [*(fmt for fmt in format_names() if not is_exl3(fmt)), *few]


def _with_options() -> Iterator[Words]:
    """Every value of every option alone, and options two at a time."""

    def alone(place: Place) -> Iterator[Words]:
        values = (value for values in options_of(place).values() for value in values)
        return (value for value in values if not {"--spec", "--what-if"} & set(value))  # those are asked elsewhere

    for alike in kinds().values():
        yield from _somewhere(alike, alone)
        yield from _paired(alike)


def _paired(able: list[Place], command: str = "predict") -> Iterator[Words]:
    """Every option beside another, each with a value and at a place that the lot falls on."""
    offered = {place: options_of(place, simulated=command == "simulate") for place in able}
    for option in sorted({option for options in offered.values() for option in options}):
        place = one((place for place in able if option in offered[place]), option)
        for other in drawn((name for name in offered[place] if name != option), f"{place} {option}"):
            first, second = (one(offered[place][name], f"{place} {option} {other}") for name in (option, other))
            if not set(first) & set(second):
                yield _usually(place, first + second, command)


def _speculating() -> Iterator[Words]:
    """Drafters and lengths of drafts of each model; every task, every format and three batches of each drafter."""
    able = [place for place in homes() if place.spec.drafters and place.rules.block_pool]
    yield from (_usually(place, words) for place in able for words in drafts(place.model) if "--accept" not in words)
    yield from _somewhere(able, lambda place: (words for words in drafts(place.model) if "--accept" in words))
    yield from _somewhere(able, lambda place: published_tasks(place.model))
    for drafter in sorted({drafter.name for place in able for drafter in place.spec.drafters}):
        drafting = [place for place in able if drafter in {each.name for each in place.spec.drafters}]
        for fmt in sorted({fmt for place in drafting for fmt in rated_formats(place)}):
            place = one((place for place in drafting if fmt in rated_formats(place)), f"{drafter} {fmt}")
            yield _usually(place, ("--kv-dtype", fmt, "--spec", drafter))
        for _, batch in EVERYWHERE["--batch"]:
            place = one(drafting, f"{drafter} {batch}")
            yield _usually(place, ("--spec", drafter, "--accept", "1.5", "--batch", batch))


def _comparisons() -> Iterator[Words]:
    """Layouts wherever there are several, all formats where there are rates, some where memory alone is known."""
    for place in places():
        if place.spec.indexer and place.layout == place.rules.layouts[0]:
            for ctx in drawn(CONTEXTS, str(place), most=2):
                yield ("compare", *place.words[:-2], "--ctx", ctx)
    for kind, alike in kinds().items():
        place = one(alike, kind)
        ctx = one(place.usual, kind)
        yield _ask(place, ctx, "--over", "formats", command="compare")
        some = drawn((fmt for fmt in format_names() if only_what_if(place, fmt) and not is_exl3(fmt)), kind, most=3)
        yield _ask(place, ctx, "--formats", ",".join(sorted(some)), "--what-if", command="compare")
        for option in sorted({option for place in alike for option in options_of(place)} - NOT_COMPARED):
            yield _compared(alike, option)
    for place in abroad():
        kept = [fmt for fmt in place.rules.formats_of(place.layout) if fits_heads(place, fmt)]
        some = drawn(kept, str(place), most=2)
        yield _ask(place, one(place.usual, str(place)), "--formats", ",".join(sorted(some)), command="compare")


def _compared(alike: list[Place], option: str) -> Words:
    """Two formats beside a value of the option, at a place that the lot falls on."""
    place = one((place for place in alike if option in options_of(place)), option)
    value = one(options_of(place)[option], f"compare {place}")
    some = ",".join(sorted(drawn(rated_formats(place), option, most=2)))
    if value[0] == "--kv-dtype":
        _, some, *value = value
    return _ask(place, one(place.usual, option), "--formats", some, *value, command="compare")


def _simulations() -> Iterator[Words]:
    """Every value of every option of a workload and of a pool, every format, and options two at a time."""

    def alone(place: Place) -> Iterator[Words]:
        yield from (("--kv-dtype", fmt) for fmt in rated_formats(place, PREFILLS))
        for option, values in options_of(place, simulated=True).items():
            few = option in {"--spec", "--task", "--backend"}
            yield from drawn(values, f"simulate {place}") if few else values

    able = [place for place in homes() if place.rules.block_pool is not None]
    for words in (*_somewhere(able, alone, "simulate"), *_paired(able, "simulate")):
        at = words.index("--layout")
        many = () if "--requests" in words or "--trace-in" in words else REQUESTS
        yield (*words[:at], *words[at + 2 :], *many)
    yield ("simulate", "--model", "llama-3.1-8b", "--hw", "h200", *PROMPTS)


CHANGED = valued(
    gpus=("1", "2", "5"), pcie=("x1", "gen3x16", "gen3x4"), ram=("32GiB", "200GiB"), vram_free=("18GiB", "22GiB"),
)  # fmt: skip


SHARED: Words = ("--model", "llama-3.1-70b", "--engine", "vllm", "--hw", "h200")
WAYS: tuple[Words, ...] = (
    ("--tp", "8"), ("--tp", "2", "--pp", "2"), ("--gpus", "4", "--split", "layer"), ("--gpus", "2", "--split", "row"),
)  # fmt: skip
"""How several devices share a model."""


def _machines() -> Iterator[Words]:
    """Each machine of a data sheet under two engines, the rates of two of them, and what can be asked of a machine."""
    sheets = [machine for machine in profile_names() if machine not in measured_machines()]
    for machine in sheets:
        asked = ("predict", "--model", "llama-3.1-8b", "--hw", machine, "--ctx", one(CONTEXTS, machine))
        yield from (asked, (*asked, "--engine", one(engine_names(), f"{machine} engine")))
    yield from (("profiles", machine) for machine in drawn(sheets, "profiles", most=2))
    yield from (("predict", "--hw", name) for name in ("h100", "4x-rtx4090"))
    for ways in WAYS:
        yield ("predict", *SHARED, "--ctx", "32k", *ways)
        yield ("compare", *SHARED, "--ctx", "32k", "--formats", "bf16,fp8", *ways)
        yield ("simulate", *SHARED, *ways, *REQUESTS)
    yield ("predict", "--model", "qwen3.8-27b", "--weights", "4.0bpw", "--layout", "vram", "--tp", "2", "--ctx", "32k")
    able = homes()
    for option, values in CHANGED.items():
        roomy = [place for place in able if option != "--gpus" or not place.rules.shares_pool]
        for value in values:
            yield _usually(one(roomy, " ".join(value)), value)
        value = one(values, option)
        yield _compared_on(one([place for place in roomy if not place.rules.shares_pool], option), value)
        pooled = one([place for place in able if place.rules.block_pool is not None], option)
        words = _usually(pooled, ("--gpus", "1") if option == "--gpus" else value, "simulate")
        at = words.index("--layout")
        yield (*words[:at], *words[at + 2 :], *REQUESTS)


CELLED = valued(
    ngl=("0", "9", "200"), n_cpu_moe=("1", "300"), max_seqs=("2",), chunk=("96", "2k"), swa_full=("",), gpus=("3",),
    kv_dtype=("q8_0/q4_0", "iq4_nl"), backend=("llama.cpp_unfused",), batch=("3",), engine=("ollama",),
)  # fmt: skip
"""What is asked of an engine that lays its whole context out at the start."""


def _celled() -> Iterator[Words]:
    """Each on a model that many can hold and a machine of its own, whatever these are measured for."""
    specs = [load_model(name) for name in model_names()]
    able = [spec.name for spec in specs if not spec.selects_blocks and spec.active_parameters < 2**35]
    for value in (words for values in CELLED.values() for words in values):
        by = " ".join(value)
        asked = value if "--engine" in value else ("--engine", "llama.cpp", *value)
        where = ("--hw", one(profile_names(), by), "--ctx", one(CONTEXTS, by), "--weights", "q4_k_m")
        yield ("predict", "--model", one(able, by), *where, *asked)


OF_ENGINES: tuple[tuple[Words, Options], ...] = (
    (
        ("--model", "llama-3.1-8b", "--engine", "vllm", "--hw", "h200"),
        valued(strict=("",), enforce_eager=("",), graph_tokens=("64", "4096"), kv_offload=("8GiB",)),
    ),
    (("--model", "qwen3.5-27b", "--engine", "sglang", "--hw", "h200"), valued(state_slots=("40",))),
    (("--model", "gemma-4-26b-a4b", "--engine", "sglang", "--hw", "h200"), valued(window_share=("0.5",))),
    (
        ("--model", "qwen3-30b-a3b", "--weights", "q4_k_m", "--engine", "llama.cpp", "--hw", "rtx3090"),
        valued(ngl=("9",), n_cpu_moe=("9",), swa_full=("",)),
    ),
)
"""Options that few engines have, each on a model and a machine that can."""
FROM_HOST = ("--prefix-cache", "--cached", "6k", "--kv-offload", "8GiB", "--cached-in", "host")


def _of_engines() -> Iterator[Words]:
    """Each by all commands that have it."""
    for words, options in OF_ENGINES:
        formats = "q8_0,fp16" if "llama.cpp" in words else "bf16,fp8"
        for value in (value for values in options.values() for value in values):
            yield ("predict", *words, "--ctx", "8k", *value)
            yield ("compare", *words, "--ctx", "8k", "--formats", formats, *value)
            if "llama.cpp" not in words:
                yield ("simulate", *words, *value, *REQUESTS)
    yield ("predict", *OF_ENGINES[0][0], "--ctx", "100k", *FROM_HOST)


def _compared_on(place: Place, value: Words) -> Words:
    return _ask(place, one(place.usual, str(value)), "--over", "formats", *value, command="compare")


def _catalogue() -> Iterator[Words]:
    """Lists of what is known and every entry of them; of exllamav3's many formats a few."""
    yield from (("profiles",), ("profiles", "--rungs"), ("models",), ("layouts",), ("formats",))
    yield from (("profiles", machine) for machine in measured_machines())
    yield from (("models", model) for model in model_names())
    for weights in (*weight_names(), BITS_A_WEIGHT):
        yield ("models", one(model_names(), weights), "--weights", weights)
    yield from (("formats", fmt) for fmt in _shown_formats("catalogue"))
    for machine in measured_machines():
        yield ("formats", "--hw", machine)
        yield from (("formats", fmt, "--hw", machine) for fmt in drawn(load_engine("twin").formats, machine, most=3))
