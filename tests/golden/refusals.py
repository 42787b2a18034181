"""Questions that are refused: what a rulebook has no place for, numbers out of range, names that are not known.

Refusals in click's own words (a choice that is none) are left out: their wording belongs to click.
"""

from collections.abc import Iterator, Sequence

from twin.engines import engine_names, load_engine
from twin.formats import format_names
from twin.layouts import layout_names
from twin.models import load_model

Words = tuple[str, ...]

DENSE = "qwen3.8-27b"
NAMED = ("--model", "--hw", "--engine", "--layout", "--kv-dtype", "--backend")
UNKNOWN = "nonesuch"
TOO_MANY = "99999999999999"


def words_of(*texts: str) -> list[Words]:
    """What is typed; of the last word every one of its alternatives."""
    split = [text.split(" ") for text in texts]
    return [(*before, value) for *before, values in split for value in values.split("|")]


ONLY_OFFLOADED = words_of(
    "--staging 32MiB", "--prefill staged", "--copies serial", "--pooled host", "--host-pages 4KiB"
)
ONLY_POOLED = words_of(
    "--util 0.9", "--pool 2GiB", "--max-model-len 2M", "--max-seqs 4", "--prefix-cache", "--cached 1k", "--cold-start",
    "--stock", "--sync-scheduling", "--spec mtp:3",
)  # fmt: skip
OUT_OF_RANGE = words_of(
    f"--ctx 0|-1|{TOO_MANY}|1.5|{UNKNOWN}", "--batch 0|4097", "--chunk 0|100", "--staging 0|1KiB|32",
    "--prefill staged --batch 2", "--engine llama.cpp --model llama-3.1-8b --ngl -1|4098|x",
)  # fmt: skip
OUT_OF_RANGE_POOLED = words_of(
    "--util 0|1.5|nan", "--pool 0|7", "--max-seqs 0|4097", "--max-seqs 2 --batch 3", "--max-model-len 1k --ctx 2k",
    "--prefix-cache --cached 3k --ctx 2k", "--cached 1k --ctx 2k", "--accept 2", "--task all", "--ngram ram",
    f"--spec {UNKNOWN}|{UNKNOWN}:3|mtp:0|mtp:99|mtp:x|dflash2:21", "--spec mtp:3 --accept 0.5|4.5|nan",
    f"--spec mtp:3 --task {UNKNOWN}", "--spec mtp:3 --task all --accept 2",
)  # fmt: skip
WRONG_WORKLOADS = words_of(
    "--requests 0", "--rate 0|-1|nan", f"--prompt 0|{TOO_MANY}", f"--output-tokens 0|{TOO_MANY}", "--cv 0.5",
    "--lengths lognormal --cv -1", "--burstiness 0 --rate 1", "--arrivals burst --rate 1",
    "--trace-in trace.jsonl --requests 3", f"--trace-in {UNKNOWN}.jsonl",
)  # fmt: skip
WRONG_COMPARISONS = [
    *words_of("--over layouts --formats fp16", "--over layouts --layout vram", "--over formats --kv-dtype fp16"),
    ("--formats", UNKNOWN),
    ("--formats", ""),
]


def refusals(models: Sequence[str]) -> Iterator[Words]:
    """All of them; some are answered where a rulebook is more patient than its name says, and kept as they are."""
    yield from _misplaced(models)
    yield from (("predict", "--layout", "vram", *words) for words in ONLY_OFFLOADED)
    without_pool = [engine for engine in engine_names() if not load_engine(engine).shares_pool]
    for at, words in enumerate(ONLY_POOLED):
        yield ("predict", "--engine", without_pool[at % len(without_pool)], *words)
    yield from (("simulate", "--engine", engine, "--requests", "1") for engine in without_pool)
    yield from (("predict", *words) for words in OUT_OF_RANGE)
    yield from (("predict", "--model", DENSE, *words) for words in OUT_OF_RANGE_POOLED)
    for words in WRONG_WORKLOADS:
        few = () if {"--requests", "--trace-in"} & set(words) else ("--requests", "2")
        yield ("simulate", "--model", DENSE, *few, *words)
    yield from (("compare", *words) for words in WRONG_COMPARISONS)
    yield from (("predict", option, name) for option in NAMED for name in (UNKNOWN, ""))
    yield from ((command, UNKNOWN) for command in ("profiles", "models", "formats"))
    yield ("formats", "--hw", UNKNOWN)


def _misplaced(models: Sequence[str]) -> Iterator[Words]:
    """Models under engines that do not load them, layouts and formats under engines that do not have them."""
    for engine in engine_names():
        rules = load_engine(engine)
        for model in models:
            if load_model(model).weights.format not in rules.weight_formats:
                yield ("predict", "--model", model, "--engine", engine, "--layout", "vram", "--ctx", "8k")
        model = next(name for name in models if load_model(name).weights.format in rules.weight_formats)
        for layout in layout_names():
            if layout not in rules.layouts:
                yield ("predict", "--model", model, "--engine", engine, "--layout", layout, "--ctx", "8k")
                continue
            foreign = [fmt for fmt in format_names() if fmt not in rules.formats_of(layout)]
            for fmt in foreign[:: max(1, len(foreign) - 1)]:
                yield ("predict", "--engine", engine, "--layout", layout, "--kv-dtype", fmt, "--ctx", "8k")
    for machine in ("3x-rtx3090", "h200", "rtx3090"):
        yield ("predict", "--model", DENSE, "--engine", "twin", "--hw", machine, "--kv-dtype", "fp8", "--ctx", "8k")
    yield ("predict", "--model", DENSE, "--layout", "offload")
    yield ("predict", "--model", "llama-3.1-8b", "--hw", "h200", "--spec", "mtp:3")
