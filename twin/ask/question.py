"""A Question is what a person asks, by name: nothing is looked up here, only numbers are checked."""

import math
from typing import Literal, get_args

from msgspec import Struct

from hwprofiles.links import FULL_LANES, LANES, PCIE_LANE_BYTES_PER_S
from twin.errors import BadValue
from twin.units import MAX_BYTES, MAX_TOKENS

Prefill = Literal["auto", "staged", "naive"]
Copies = Literal["serial", "overlapped"]
Tier = Literal["vram", "host"]
Ngram = Literal["ram", "disk"]
HostPages = Literal["huge", "4KiB"]
StateType = Literal["fp16", "fp32"]
Split = Literal["layer", "row"]

MAX_BATCH = 4096
MAX_GPUS = 1024
MAX_LAYERS = 4097

CHOICES: dict[str, tuple[str, ...]] = {
    "prefill": get_args(Prefill),
    "copies": get_args(Copies),
    "pooled": get_args(Tier),
    "ngram": get_args(Ngram),
    "host_pages": get_args(HostPages),
    "state_dtype": get_args(StateType),
    "split": get_args(Split),
    "cached_in": get_args(Tier),
}

_FLAGS = {"staging_bytes": "staging", "utilisation": "util", "pool_bytes": "pool", "max_model_tokens": "max-model-len"}
_FLAGS |= {"max_sequences": "max-seqs", "prefix_caching": "prefix-cache", "cached_tokens": "cached", "patched": "stock"}
_FLAGS |= {"async_scheduling": "sync-scheduling", "accepted": "accept", "output_length": "output"}
_FLAGS |= {"prefix_tokens": "prefix", "lanes": "pcie", "pcie_generation": "pcie"}
_FLAGS |= {"gpu_layers": "ngl", "cpu_experts": "n-cpu-moe", "whole_windows": "swa-full"}
_FLAGS |= {"ram_bytes": "ram", "vram_free_bytes": "vram-free", "chunk_tokens": "chunk"}
_FLAGS |= {"offload_bytes": "kv-offload", "eager": "enforce-eager"}
"""Options that are not named after what they set."""


def flag(field: str) -> str:
    """The option that sets a field of a question or of a workload."""
    return f"--{_FLAGS.get(field, field).replace('_', '-')}"


class Question(Struct, frozen=True, kw_only=True):
    """What is asked. None means: as the engine does by default, and for the engine: one that loads the model."""

    ctx_tokens: int  # tokens in the cache when the predicted decode step begins, and length of the prompt in prefill
    model: str = "qwen3.8-flash-next"
    weights: str | None = None  # other weights than the checkpoint's, such as q4_k_m or 4.05bpw
    hw: str | None = None
    engine: str | None = None
    layout: str | None = None
    kv_dtype: str | None = None
    batch: int = 1
    chunk_tokens: int | None = None
    staging_bytes: int | None = None
    prefill: Prefill | None = None
    copies: Copies | None = None
    pooled: Tier | None = None
    ngram: Ngram | None = None
    host_pages: HostPages | None = None
    gpus: int | None = None  # so many of the machine's device
    tp: int | None = None  # devices that share every layer, by heads and rows
    pp: int | None = None  # stages of layers one after the other, each on `tp` devices
    split: Split | None = None  # how devices share a model where neither number says it: stages, or rows of each layer
    lanes: int = FULL_LANES
    pcie_generation: int | None = None  # with `lanes` a link of its own; without one the machine's, with fewer lanes
    ram_bytes: int | None = None  # the host's memory
    vram_free_bytes: int | None = None  # what others leave of each device's memory
    backend: str | None = None  # attention backend, where the engine has several for the format
    strict: bool = False  # refuse rates that were not measured on the machine, in place of borrowing them
    what_if: bool = False  # ask for a format that the engine does not keep: bytes count, dequantising is free (A14)
    speculation: str | None = None  # `<drafter>:<tokens>`, such as mtp:3
    accepted: float | None = None  # tokens that a verify step yields on average, 1 to k + 1
    task: str | None = None  # in place of `accepted`: a task with a published acceptance
    utilisation: float | None = None  # share of VRAM that an engine with a block pool may take
    pool_bytes: int | None = None  # size of the block pool, in place of what utilisation leaves
    max_model_tokens: int | None = None  # longest request that the engine expects; None: the context asked about
    max_sequences: int | None = None
    window_share: float | None = None  # tokens of a pool of windows to one of the other layers' pool
    state_slots: int | None = None  # whole sequences' states in their pool, in place of their share of memory
    prefix_caching: bool = False
    patched: bool = True  # whether the published patches to groups and pages are in
    promotes_windows: bool = True  # whether the patch to the pages of sliding layers is among them
    async_scheduling: bool = True  # whether an engine with a block pool schedules a step while the one before it runs
    cold_start: bool = False  # whether the engine compiles while it profiles, which costs pool
    state_dtype: StateType | None = None
    gpu_layers: int | None = None  # layers on devices, the output counted as one; the first ones are the processor's
    cpu_experts: int = 0  # layers, from the first on, whose experts are the processor's
    whole_windows: bool = False  # whether windows keep what they no longer see
    cached_tokens: int = 0  # prompt tokens that an earlier request left in the prefix cache
    cached_in: Tier | None = None  # the memory that they lie in; None: VRAM
    offload_bytes: int | None = None  # host memory that an engine with a block pool keeps older blocks in
    eager: bool = False  # whether nothing is compiled and no step is captured in a CUDA graph
    graph_tokens: int | None = None  # most tokens of a step that is captured


def check_numbers(question: Question) -> None:
    """Raise BadValue for a number or word outside its range."""
    ranges = (
        ("context", question.ctx_tokens, 1, MAX_TOKENS, "tokens"),
        ("batch", question.batch, 1, MAX_BATCH, "sequences"),
        ("cached prefix", question.cached_tokens, 0, question.ctx_tokens, "tokens"),
        ("chunk", question.chunk_tokens, 1, MAX_TOKENS, "tokens"),
        ("longest request", question.max_model_tokens, 1, MAX_TOKENS, "tokens"),
        ("most sequences", question.max_sequences, 1, MAX_BATCH, "sequences"),
        ("pool of states", question.state_slots, 1, MAX_TOKENS, "states"),
        ("offloaded cache", question.offload_bytes, 1, MAX_BYTES, "bytes"),
        ("largest captured step", question.graph_tokens, 1, MAX_TOKENS, "tokens"),
        ("number of devices", question.gpus, 1, MAX_GPUS, "devices"),
        ("tensor parallelism", question.tp, 1, MAX_GPUS, "devices"),
        ("pipeline parallelism", question.pp, 1, MAX_GPUS, "stages"),
        ("PCIe generation", question.pcie_generation, 1, max(PCIE_LANE_BYTES_PER_S), ""),
        ("host memory", question.ram_bytes, 1, MAX_BYTES, "bytes"),
        ("layers on devices", question.gpu_layers, 0, MAX_LAYERS, "layers"),
        ("layers with experts on the processor", question.cpu_experts, 0, MAX_LAYERS, "layers"),
        ("free VRAM", question.vram_free_bytes, 1, MAX_BYTES, "bytes"),
    )
    for what, value, low, high, unit in ranges:
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise BadValue(f"{what} {value} is outside the range of {low:,} to {high:,} {unit}".rstrip())
    if question.lanes not in LANES or isinstance(question.lanes, bool):
        raise BadValue(f"{question.lanes} PCIe lanes", hint=f"one of {', '.join(map(str, LANES))}")
    for field, known in CHOICES.items():
        value = getattr(question, field)
        if value is not None and value not in known:
            raise BadValue(f"{field.replace('_', ' ')} {value!r} is not known", hint=f"one of {', '.join(known)}")
    if question.utilisation is not None and not 0 < question.utilisation <= 1:
        raise BadValue(f"utilisation {question.utilisation:g} is outside the range above 0 and up to 1")
    if question.window_share is not None and not 0 < question.window_share <= 1:
        raise BadValue(f"window share {question.window_share:g} is outside the range above 0 and up to 1")
    if question.accepted is not None and not math.isfinite(question.accepted):
        raise BadValue(f"accepted tokens {question.accepted} is not a number")
