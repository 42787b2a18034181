"""Models as engines run them on machines: where there are rates for them, and which contexts and formats are asked for.

Where every combination would be too many, one is drawn by lot: the one whose words have the smallest checksum. Such a
draw does not depend on what else there is, so that a new model or machine adds questions and leaves the others alone.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, TypeVar

from hwprofiles import load_profile, profile_names
from twin.engines import EngineRules, engine_names, load_engine
from twin.formats import is_exl3, kv_format
from twin.models import load_model, model_names
from twin.operations.counts import layer_parameters, parameters
from twin.units import parse_tokens

Words = tuple[str, ...]
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


def drawn(items: Iterable[Item], by: str, *, most: int = 1) -> list[Item]:
    """Those that the lot `by` falls on: the smallest checksums first."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{by} {item}".encode()).digest())[:most]


def places() -> list[Place]:
    """Wherever a rulebook loads the model, whether or not the machine has rates for it."""
    return [
        Place(model, engine, machine, layout)
        for model in model_names()
        for engine in engine_names()
        if loads(model, engine)
        for machine in profile_names()
        for layout in load_engine(engine).layouts
        if layout != "offload" or load_model(model).indexer
    ]


def loads(model: str, engine: str) -> bool:
    """Whether the engine loads the model's checkpoint and runs its attention."""
    spec, rules = load_model(model), load_engine(engine)
    return spec.weights.format in rules.weight_formats and bool(spec.indexer is None or rules.sparse_kernels)


@cache
def at_home(place: Place) -> bool:
    """Whether the machine has rates for the model's weights under that engine, and memory enough for them."""
    spec, machine = load_model(place.model), load_profile(place.machine)
    counts = parameters(spec)
    total = counts.head + counts.embedding + sum(layer_parameters(spec, kind) for kind in spec.layer_kinds)
    rated = place.rules.kernel("linear", spec.weights.format) in machine.kernels
    holds = total * spec.weights.bits / 8 < machine.gpu.vram.value * machine.gpu_count
    return rated and holds and (place.rules.block_pool is None or machine.gpu_count == 1)


def homes() -> list[Place]:
    return [place for place in places() if at_home(place)]


def abroad(*, models: int) -> list[Place]:
    """Places without rates or memory enough, of so many models each."""
    groups: dict[str, list[Place]] = {}
    for place in places():
        if not at_home(place):
            groups.setdefault(f"{place.kind} {place.machine}", []).append(place)
    return [place for group, alike in groups.items() for place in drawn(alike, group, most=models)]


def fits_heads(place: Place, fmt: str) -> bool:
    return not kv_format(fmt).check(head_dim=load_model(place.model).attention.head_dim)


@cache
def rated_formats(place: Place, operations: tuple[str, ...] = DECODES) -> list[str]:
    """What the engine keeps there, its kernels start on and the machine has rates for, of one of the operations."""
    machine, rules = load_profile(place.machine), place.rules
    has = float(machine.gpu.compute_capability)
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


def usual(place: Place) -> list[str]:
    """Contexts of questions about options."""
    longest = parse_tokens(USUAL_SPARSE if load_model(place.model).indexer else USUAL_DENSE)
    return [ctx for ctx in CONTEXTS if 512 < parse_tokens(ctx) <= longest]


def only_what_if(place: Place, fmt: str) -> bool:
    """Whether the format can be asked for there, but not without `--what-if`; exllamav3's many by exllamav3 alone."""
    foreign = is_exl3(fmt) and fmt not in place.rules.formats
    return fits_heads(place, fmt) and not foreign and fmt not in rated_formats(place)
