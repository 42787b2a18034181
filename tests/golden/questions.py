"""The questions whose answers are kept, none of them picked by hand.

They are made from the shipped models, machines, rulebooks and formats and from the values of every option that moves
numbers (`places.py`); those of `refusals.py` are refused.
"""

from collections.abc import Iterable, Iterator
from functools import cache

from hwprofiles import profile_names
from tests.golden.places import (
    CONTEXTS,
    DECODES,
    EVERYWHERE,
    NOT_COMPARED,
    PREFILLS,
    Place,
    Words,
    abroad,
    drafts,
    drawn,
    fits_heads,
    homes,
    kinds,
    one,
    only_what_if,
    options_of,
    places,
    published_tasks,
    rated_formats,
)
from tests.golden.refusals import refusals
from twin.engines import load_engine
from twin.formats import format_names, is_exl3, kv_format
from twin.models import model_names

REQUESTS = ("--requests", "24")


@cache
def questions() -> dict[str, list[Words]]:
    """All of them, each once, by the name of the file that keeps their answers."""
    made: dict[str, Iterable[Words]] = {
        "predict": _predictions(),
        "options": _with_options(),
        "speculation": _speculating(),
        "compare": _comparisons(),
        "simulate": _simulations(),
        "catalogue": _catalogue(),
        "validate": (("validate", "--recorded", "--hw", machine) for machine in profile_names()),
        "refused": refusals(),
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


def _somewhere(asked: dict[Words, list[Place]], command: str = "predict") -> Iterator[Words]:
    """Each of the words at a place that the lot falls on, of those where they can be asked."""
    return (_usually(one(able, " ".join(words)), words, command) for words, able in asked.items())


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


def _shown_formats(by: str) -> list[str]:
    """All formats; of exllamav3's many one for each number of bits of K."""
    many: dict[int, list[str]] = {}
    for fmt in filter(is_exl3, format_names()):
        many.setdefault(kv_format(fmt).key.bits, []).append(fmt)
    few = [one(names, f"{by} {bits}") for bits, names in many.items()]
    return [*(fmt for fmt in format_names() if not is_exl3(fmt)), *few]


def _with_options() -> Iterator[Words]:
    """Every value of every option alone, and options two at a time."""
    for alike in kinds().values():
        asked: dict[Words, list[Place]] = {}
        for place in alike:
            for value in (value for values in options_of(place).values() for value in values):
                if not {"--spec", "--what-if"} & set(value):  # those have questions of their own
                    asked.setdefault(value, []).append(place)
        yield from _somewhere(asked)
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
    lengths: dict[Words, list[Place]] = {}
    for place in able:
        for words in drafts(place.model):
            if "--accept" in words:
                lengths.setdefault(words, []).append(place)
            else:
                yield _usually(place, words)
    yield from _somewhere(lengths)
    tasks = sorted({task for place in able for task in published_tasks(place.model)})
    yield from _somewhere({task: [place for place in able if task in published_tasks(place.model)] for task in tasks})
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
    able = [place for place in homes() if place.rules.block_pool is not None]
    asked: dict[Words, list[Place]] = {}
    for place in able:
        for fmt in rated_formats(place, PREFILLS):
            asked.setdefault(("--kv-dtype", fmt), []).append(place)
        for option, values in options_of(place, simulated=True).items():
            few = option in {"--spec", "--task", "--backend"}
            for value in drawn(values, f"simulate {place}") if few else values:
                asked.setdefault(value, []).append(place)
    for words in (*_somewhere(asked, "simulate"), *_paired(able, "simulate")):
        at = words.index("--layout")
        many = () if "--requests" in words or "--trace-in" in words else REQUESTS
        yield (*words[:at], *words[at + 2 :], *many)


def _catalogue() -> Iterator[Words]:
    """Lists of what is known and every entry of them; of exllamav3's many formats a few."""
    yield from (("profiles",), ("models",), ("layouts",), ("formats",))
    yield from (("profiles", machine) for machine in profile_names())
    yield from (("models", model) for model in model_names())
    yield from (("formats", fmt) for fmt in _shown_formats("catalogue"))
    for machine in profile_names():
        yield ("formats", "--hw", machine)
        yield from (("formats", fmt, "--hw", machine) for fmt in drawn(load_engine("twin").formats, machine, most=3))
