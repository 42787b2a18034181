"""What is asked beside a place, a context and a format: every option that moves numbers, value by value."""

import json
from collections.abc import Sequence

from tests.golden.places import Place, Words, drawn, has_rate, only_what_if, rated_formats
from twin.models import load_model
from twin.models.speculation import ACCEPTANCE

TRACED = {
    "--trace-in": [("--trace-in", "trace.jsonl")],
    "--time-unit": [("--trace-in", "hashed.jsonl", "--time-unit", unit) for unit in ("s", "ms")],
    "--hash-tokens": [
        ("--trace-in", "hashed.jsonl", "--time-unit", unit, "--hash-tokens", "16", "--prefix-cache")
        for unit in ("s", "ms")
    ],
}
"""Files beside which every question is asked, see `tests/golden/answers.py`."""

EVERYWHERE: dict[str, Sequence[str]] = {
    "--batch": ("2", "8", "64"),
    "--chunk": ("512", "4096", "16k"),
    "--pcie": ("x16", "x8", "x4"),
    "--state-dtype": ("fp16", "fp32"),
}
OFFLOADED: dict[str, Sequence[str]] = {
    "--staging": ("4MiB", "128MiB", "1GiB"),
    "--prefill": ("auto", "staged", "naive"),
    "--copies": ("serial", "overlapped"),
    "--pooled": ("vram", "host"),
    "--host-pages": ("huge", "4KiB"),
}
TABLED: dict[str, Sequence[str]] = {"--ngram": ("ram", "disk")}
POOLED: dict[str, Sequence[str]] = {
    "--util": ("0.8", "0.93", "0.97"),
    "--pool": ("2GiB", "5GiB"),
    "--max-seqs": ("1", "16", "256"),
    "--max-model-len": ("128k", "1M"),
    "--prefix-cache": ("",),
    "--cold-start": ("",),
    "--stock": ("",),
    "--sync-scheduling": ("",),
}
CACHED = {"--cached": [("--prefix-cache", "--cached", tokens) for tokens in ("300", "6k")]}
WORKLOADS: dict[str, Sequence[str]] = {
    "--requests": ("1", "60"),
    "--rate": ("0.2", "4", "50"),
    "--prompt": ("64", "4k", "30k"),
    "--output-tokens": ("1", "16", "1k"),
    "--lengths": ("fixed", "uniform", "exponential", "lognormal"),
    "--seed": ("7",),
    "--max-model-len": ("8k", "64k"),
    "--no-interval": ("",),
}
SHAPES = {
    "--cv": [("--lengths", "lognormal", "--cv", "2"), ("--lengths", "uniform", "--cv", "0.3")],
    "--arrivals": [("--rate", "4", "--arrivals", kind) for kind in ("poisson", "constant", "burst")],
    "--burstiness": [("--rate", "4", "--burstiness", "0.25")],
    "--prefix": [("--prefix", "2k"), ("--prefix", "2k", "--prefix-cache")],
}
REQUESTS = ("--requests", "24")

NOT_COMPARED = {"--cached", *OFFLOADED}
"""Options that `compare` does not have."""
NOT_SIMULATED = {"--cached", "--batch"}
"""The same of `simulate`."""


def options_of(place: Place) -> dict[str, list[Words]]:
    """What can be asked for there beside context and format, value by value, by the option that it is about."""
    groups = [EVERYWHERE]
    if place.layout == "offload":
        groups.append(OFFLOADED)
    if load_model(place.model).ngram is not None:
        groups.append(TABLED)
    made: dict[str, list[Words]] = {}
    if place.rules.block_pool is not None:
        groups.append(POOLED)
        made |= CACHED | {"--spec": [words for words in drafts(place.model) if "--accept" in words]}
        made["--task"] = published_tasks(place.model)
    for option, values in ((option, values) for group in groups for option, values in group.items()):
        made[option] = [(option, value) if value else (option,) for value in values]
    other = drawn((fmt for fmt in place.rules.formats if only_what_if(place, fmt)), str(place))
    made["--what-if"] = [("--kv-dtype", fmt, "--what-if") for fmt in other]
    made["--backend"] = [
        ("--kv-dtype", fmt, "--backend", backend)
        for fmt in rated_formats(place)
        for backend in place.rules.backends_of(fmt)
        if has_rate(place, fmt, backend)
    ]
    return {option: values for option, values in made.items() if values}


def asked_of(place: Place, *, simulated: bool) -> dict[str, list[Words]]:
    """Options of a prediction or of a simulation there."""
    if not simulated:
        return options_of(place)
    alone = {
        option: [(option, value) if value else (option,) for value in values] for option, values in WORKLOADS.items()
    }
    shared = {option: values for option, values in options_of(place).items() if option not in NOT_SIMULATED}
    return shared | alone | SHAPES | TRACED


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
