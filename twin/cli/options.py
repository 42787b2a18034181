"""The options of the commands, in groups: what is asked, how it is placed, pooled, drafted, loaded and measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from twin.cli.common import BYTES, INPUT, OUTPUT_TOKENS, TOKENS, Name

Option = Callable[[Any], Any]


def _model(default: str) -> Option:
    return click.option("--model", type=Name("model"), default=default, show_default=True,
                        help="A shipped model or the path of a model file.")  # fmt: skip


def _longest(default: str) -> Option:
    return click.option("--max-model-len", "max_model_tokens", type=TOKENS, default=None,
                        help=f"Longest request that the engine is told to expect [default: {default}].")  # fmt: skip


_NAMES = (
    click.option("--hw", type=Name("machine"), default=None,
                 help="A shipped machine or the path of a profile [default: the engine's]."),
    click.option("--engine", type=Name("engine"), default=None,
                 help="The inference engine whose rules apply [default: one that loads the model]."),
    click.option("--kv-dtype", type=Name("format"), default=None,
                 help="Format of the cache, listed by twin formats [default: the engine's]."),
    click.option("--chunk", "chunk_tokens", type=TOKENS, default=None,
                 help="Prompt tokens of one prefill pass [default: the engine's]."),
    click.option("--pcie", "lanes", type=click.Choice(["x16", "x8", "x4"]), default="x16", show_default=True,
                 help="What if: PCIe lanes of each device."),
    click.option("--what-if", is_flag=True,
                 help="Ask for a format that the engine does not keep: bytes count, decoding it is taken as free."),
)  # fmt: skip

MODEL_OPTIONS = (_model("qwen3.8-flash-next"), *_NAMES)
SERVED_MODEL_OPTIONS = (_model("qwen3.8-27b"), *_NAMES)

QUESTION_OPTIONS = (
    click.option("--ctx", "ctx_tokens", type=TOKENS, default="1M", show_default=True,
                 help="Tokens of context: 32768, 256k, 1M (1M = 1,048,576)."),
    *MODEL_OPTIONS,
    click.option("--batch", type=int, default=1, show_default=True, help="Sequences that decode together."),
    click.option("--ngram", type=click.Choice(["ram", "disk"]), default=None,
                 help="Where the n-gram table is read from [default: the engine's]."),
)  # fmt: skip

LAYOUT = click.option("--layout", type=Name("layout"), default=None,
                      help="Where the cache lives [default: offload if attention is sparse, else vram].")  # fmt: skip

OFFLOAD_OPTIONS = (
    click.option("--staging", "staging_bytes", type=BYTES, default=None,
                 help="Buffer of a staged prefill, such as 32MiB [default: the engine's]."),
    click.option("--prefill", type=click.Choice(["auto", "staged", "naive"]), default=None,
                 help="How a prefill reads host planes [default: auto, the engine's own choice]."),
    click.option("--copies", type=click.Choice(["serial", "overlapped"]), default=None,
                 help="Whether staged copies run beside the kernels [default: the engine's]."),
    click.option("--pooled", type=click.Choice(["vram", "host"]), default=None,
                 help="What if: the indexer's pooled keys on the host [default: vram]."),
    click.option("--host-pages", type=click.Choice(["huge", "4KiB"]), default=None,
                 help="Page size of registered host memory [default: huge]."),
)  # fmt: skip

POOL_OPTIONS = (
    click.option("--util", "utilisation", type=float, default=None,
                 help="Share of VRAM for an engine with a block pool, such as 0.93 [default: 0.9]."),
    click.option("--pool", "pool_bytes", type=BYTES, default=None,
                 help="Size of the block pool, in place of what --util leaves."),
    click.option("--max-seqs", "max_sequences", type=int, default=None,
                 help="Most sequences that run at once [default: the engine's]."),
    click.option("--prefix-cache", "prefix_caching", is_flag=True, help="Keep prompts for later requests."),
    click.option("--cold-start", is_flag=True, help="The engine compiles while it profiles, which costs pool."),
    click.option("--state-dtype", type=click.Choice(["fp16", "fp32"]), default=None,
                 help="Type of recurrent states [default: the engine's]."),
    click.option("--backend", type=Name("backend"), default=None,
                 help="Attention backend, where a format has several."),
    click.option("--stock", "patched", is_flag=True, default=True, flag_value=False,
                 help="Without the published patches to groups and pages."),
    click.option("--sync-scheduling", "async_scheduling", is_flag=True, default=True, flag_value=False,
                 help="Schedule a step only when the one before has ended."),
)  # fmt: skip

SPECULATION_OPTIONS = (
    click.option("--spec", "speculation", default=None, metavar="DRAFTER:K",
                 help="Draft K tokens a step and verify them: mtp:3, dflash2:15."),
    click.option("--accept", "accepted", type=float, default=None,
                 help="Tokens that a step yields on average, 1 to K + 1."),
    click.option("--task", default=None, help="In place of --accept: a task whose acceptance is published."),
)  # fmt: skip

MAX_LEN = _longest("the context")
SERVED_MAX_LEN = _longest("the model's own limit")

CACHED = click.option("--cached", "cached_tokens", type=TOKENS, default=None,
                      help="With --prefix-cache: prompt tokens that an earlier request left there.")  # fmt: skip

TRACE_OPTIONS = (
    click.option("--trace-in", type=INPUT, default=None,
                 help="Serve the requests of a trace: JSON lines with arrival_s (seconds) or timestamp, prompt_tokens "
                      "or input_length, output_tokens or output_length; optional are id, hash_ids, and prefix_id with "
                      "prefix_tokens."),
    click.option("--time-unit", type=click.Choice(["s", "ms"]), default=None,
                 help="What timestamp counts [default: what the trace shows]."),
    click.option("--hash-tokens", type=TOKENS, default=None,
                 help="Prompt tokens of each of hash_ids [default: what the trace shows]."),
)  # fmt: skip

WORKLOAD_OPTIONS = (
    click.option("--requests", type=int, default=None, help="How many requests [default: 1000]."),
    click.option("--rate", type=float, default=None, help="Requests a second [default: all at once]."),
    click.option("--prompt", type=TOKENS, default=None, help="Mean prompt length in tokens [default: 512]."),
    click.option("--output-tokens", "--output", "output_length", type=OUTPUT_TOKENS, default=None,
                 help="Mean output length in tokens, no file [default: 256]."),
    click.option("--lengths", type=click.Choice(["fixed", "uniform", "exponential", "lognormal"]), default=None,
                 help="How both lengths are distributed around their means [default: exponential]."),
    click.option("--cv", type=float, default=None, help="Standard deviation over mean, for uniform and lognormal."),
    click.option("--arrivals", type=click.Choice(["poisson", "constant", "burst"]), default=None,
                 help="How requests come in at --rate [default: poisson]."),
    click.option("--burstiness", type=float, default=None, help="Shape of the gaps: 1 is Poisson, less is burstier."),
    click.option("--prefix", "prefix_tokens", type=TOKENS, default=None,
                 help="Tokens at the start that all prompts share, beside --prompt."),
    click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same requests."),
)  # fmt: skip

MEASURED_OPTIONS = (
    click.option("--recorded", is_flag=True, help="Against everything that was ever recorded (the default)."),
    click.option("--hw", type=Name("machine"), default=None,
                 help="Whose measurements [default: all that are recorded]; with --device, the profile to judge."),
    click.option("--device", default=None, help="Run the kernels here and now: cuda, cuda:1 or cpu."),
    click.option("--quick", is_flag=True, help="With --device: a third of the grid."),
    click.option("--group", "groups", multiple=True,
                 type=click.Choice(["grid", "long_curve", "formats", "operations"]),
                 help="With --device: which cases, more than once for several: sparse attention (grid, the default), "
                      "its decode up to 3M tokens, every cache format, all other operations."),
    click.option("--record", "keep", is_flag=True, help="With --device: add the rows to the profile's measurements."),
)  # fmt: skip

QUALITY_OPTIONS = (
    click.option("--kv-dtype", default=None, metavar="A,B,...",
                 help="Which formats [default: all; of exl3_* k8v8, k6v6, k4v4, k3v3 and k2v2]."),
    click.option("--tensors", type=click.Path(path_type=Path), default=None,
                 help="K, V and Q dumped from a model, a safetensors file: k, v, q or layers.N.k and so on."),
    click.option("--heads", type=click.Choice(["outliers", "gaussian", "tails", "sinks"]), default=None,
                 help="Which made-up heads to show in full [default: outliers]."),
    click.option("--model", type=Name("model"), default=None,
                 help="Whose shape is made up, and whose published figures are shown [default: qwen3.8-27b]."),
    click.option("--tokens", type=TOKENS, default=None,
                 help="Tokens in the cache [default: 4096, of a file all]."),
    click.option("--seed", type=int, default=None, help="Of what is made up; the same gives the same [default: 0]."),
    click.option("--device", default="cpu", show_default=True, help="Where to measure: cpu, cuda or cuda:1."),
    click.option("--explain", is_flag=True, help="Show all heads, or all layers of a file, in full."),
)  # fmt: skip
