"""The questions whose answers are kept, none of them picked by hand.

They are made from the shipped models, machines, rulebooks and formats (`places.py`) and from the values of every option
that moves numbers (`values.py`); those of `refusals.py` are refused.
"""

from collections.abc import Iterable, Iterator
from functools import cache

from hwprofiles import profile_names
from tests.golden.places import (
    CONTEXTS,
    DECODES,
    PREFILLS,
    Place,
    Words,
    abroad,
    drawn,
    fits_heads,
    homes,
    only_what_if,
    places,
    rated_formats,
    usual,
)
from tests.golden.refusals import refusals
from tests.golden.values import EVERYWHERE, NOT_COMPARED, REQUESTS, asked_of, drafts, options_of, published_tasks
from twin.engines import load_engine
from twin.formats import format_names, is_exl3, kv_format
from twin.models import load_model, model_names


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


def _predict(place: Place, ctx: str, *more: str) -> Words:
    return ("predict", *place.words, "--ctx", ctx, *more)


def _usually(place: Place, words: Words, command: str = "predict") -> Words:
    """The words at a context, and in a format, that the lot falls on."""
    by = f"{place} {words}"
    able = rated_formats(place, PREFILLS if command == "simulate" else DECODES)
    formats = [] if "--kv-dtype" in words else drawn(able, by)
    stored = ("--kv-dtype", formats[0]) if formats else ()
    ctx = () if command == "simulate" else ("--ctx", *drawn(usual(place), by))
    return (command, *place.words, *ctx, *stored, *words)


def _predictions() -> Iterator[Words]:
    """A ladder of contexts where there are rates, some context where there are none, and every format."""
    for place in homes():
        yield from (_predict(place, ctx) for ctx in CONTEXTS)
    for place in abroad(models=1):
        yield from (_predict(place, ctx) for ctx in drawn(CONTEXTS, str(place)))
    for place in homes():
        for fmt in rated_formats(place):
            yield _predict(place, *drawn(usual(place), f"{place} {fmt}"), "--kv-dtype", fmt)
    for kind in _kinds():
        for fmt in _shown_formats(kind):
            able = [place for place in _at(kind) if only_what_if(place, fmt)]
            for place in drawn(able, f"{kind} {fmt}"):
                yield _predict(place, *drawn(usual(place), fmt), "--kv-dtype", fmt, "--what-if")


def _kinds() -> list[str]:
    return sorted({place.kind for place in homes()})


def _at(kind: str) -> list[Place]:
    return [place for place in homes() if place.kind == kind]


def _shown_formats(by: str) -> list[str]:
    """All formats; of exllamav3's many one for each number of bits of K."""
    many: dict[int, list[str]] = {}
    for fmt in filter(is_exl3, format_names()):
        many.setdefault(kv_format(fmt).key.bits, []).append(fmt)
    return [
        *(fmt for fmt in format_names() if not is_exl3(fmt)),
        *(fmt for bits, names in many.items() for fmt in drawn(names, f"{by} {bits}")),
    ]


def _with_options() -> Iterator[Words]:
    """Every value of every option alone, and options two at a time."""
    for kind in _kinds():
        asked: dict[Words, list[Place]] = {}
        for place in _at(kind):
            for value in (value for option, values in options_of(place).items() for value in values):
                if not {"--spec", "--what-if"} & set(value):  # those have questions of their own
                    asked.setdefault(value, []).append(place)
        for value, able in asked.items():
            yield from (_usually(place, value) for place in drawn(able, " ".join(value)))
        yield from _paired(_at(kind), others=1)


def _paired(able: list[Place], *, others: int, command: str = "predict") -> Iterator[Words]:
    """Every option beside so many others, each with a value and at a place that the lot falls on."""
    simulated = command == "simulate"
    for option in sorted({option for place in able for option in asked_of(place, simulated=simulated)}):
        [place] = drawn((place for place in able if option in asked_of(place, simulated=simulated)), option)
        offered = asked_of(place, simulated=simulated)
        for other in drawn((name for name in offered if name != option), f"{place} {option}", most=others):
            [first], [second] = (drawn(offered[name], f"{place} {option} {other}") for name in (option, other))
            if not set(first) & set(second):
                yield _usually(place, first + second, command)


def _speculating() -> Iterator[Words]:
    """Drafters and lengths of drafts of each model; every task, every format and three batches of each drafter."""
    able = [place for place in homes() if load_model(place.model).drafters and place.rules.block_pool]
    lengths: dict[Words, list[Place]] = {}
    for place in able:
        for words in drafts(place.model):
            if "--accept" in words:
                lengths.setdefault(words, []).append(place)
            else:
                yield _usually(place, words)
    for words, drafting in lengths.items():
        yield from (_usually(place, words) for place in drawn(drafting, " ".join(words)))
    for task in sorted({task for place in able for task in published_tasks(place.model)}):
        [place] = drawn((place for place in able if task in published_tasks(place.model)), " ".join(task))
        yield _usually(place, task)
    for drafter in sorted({drafter.name for place in able for drafter in load_model(place.model).drafters}):
        drafting = [place for place in able if drafter in {each.name for each in load_model(place.model).drafters}]
        for fmt in sorted({fmt for place in drafting for fmt in rated_formats(place)}):
            [place] = drawn((place for place in drafting if fmt in rated_formats(place)), f"{drafter} {fmt}")
            yield _usually(place, ("--kv-dtype", fmt, "--spec", drafter))
        for batch in EVERYWHERE["--batch"]:
            [place] = drawn(drafting, f"{drafter} {batch}")
            yield _usually(place, ("--spec", drafter, "--accept", "1.5", "--batch", batch))


def _comparisons() -> Iterator[Words]:
    """Layouts wherever there are several, all formats where there are rates, some where memory alone is known."""
    for place in places():
        if load_model(place.model).indexer and place.layout == place.rules.layouts[0]:
            for ctx in drawn(CONTEXTS, str(place), most=2):
                yield ("compare", *place.words[:-2], "--ctx", ctx)
    for kind in _kinds():
        [place] = drawn(_at(kind), kind)
        yield ("compare", *place.words, "--ctx", *drawn(usual(place), kind), "--over", "formats")
        some = drawn((fmt for fmt in format_names() if only_what_if(place, fmt) and not is_exl3(fmt)), kind, most=3)
        named = ("--formats", ",".join(sorted(some)), "--what-if")
        yield ("compare", *place.words, "--ctx", *drawn(usual(place), kind), *named)
        for option in sorted({option for place in _at(kind) for option in options_of(place)} - NOT_COMPARED):
            yield _compared(_at(kind), option)
    for place in abroad(models=1):
        kept = [fmt for fmt in place.rules.formats_of(place.layout) if fits_heads(place, fmt)]
        some = drawn(kept, str(place), most=2)
        yield ("compare", *place.words, "--ctx", *drawn(usual(place), str(place)), "--formats", ",".join(sorted(some)))


def _compared(alike: list[Place], option: str) -> Words:
    """Two formats beside a value of the option, at a place that the lot falls on."""
    [place] = drawn((place for place in alike if option in options_of(place)), option)
    [value] = drawn(options_of(place)[option], f"compare {place}")
    some = ",".join(sorted(drawn(rated_formats(place), option, most=2)))
    if value[0] == "--kv-dtype":
        _, some, *value = value
    return ("compare", *place.words, "--ctx", *drawn(usual(place), option), "--formats", some, *value)


def _simulations() -> Iterator[Words]:
    """Every value of every option of a workload and of a pool, every format, and options two at a time."""
    able = [place for place in homes() if place.rules.block_pool is not None]
    asked: dict[Words, list[Place]] = {}
    for place in able:
        for fmt in rated_formats(place, PREFILLS):
            asked.setdefault(("--kv-dtype", fmt), []).append(place)
        for option, values in asked_of(place, simulated=True).items():
            few = option in {"--spec", "--task", "--backend"}
            for value in drawn(values, f"simulate {place}") if few else values:
                asked.setdefault(value, []).append(place)
    alone = [
        _usually(place, value, "simulate") for value, able in asked.items() for place in drawn(able, " ".join(value))
    ]
    for words in (*alone, *_paired(able, others=1, command="simulate")):
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
