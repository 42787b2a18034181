"""The options of the commands: their types, and groups of them by what is asked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click import Choice, option

from hwprofiles.links import LANES
from twin.errors import BadValue
from twin.units import parse_bytes, parse_link, parse_tokens

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Option = Callable[[Any], Any]
Command = TypeVar("Command", bound=Callable[..., Any])


class Parsed(click.ParamType[Any]):
    """A parameter parsed by one of the unit parsers, whose message is shown as it is."""

    def __init__(self, name: str, parse: Callable[[str], Any], *, hint: str = "") -> None:
        self.name = name
        self.parse = parse
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What it stands for; BadValue, naming the option, where the parser refuses the text."""
        del ctx
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except BadValue as wrong:
            where = f"{param.opts[0]}: " if param is not None else ""
            raise BadValue(f"{where}{wrong.message}", hint=self.hint or wrong.hint) from None


class PcieLink(Parsed):
    """A link, whose width completes in the shell."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list["CompletionItem"]:
        """Widths that begin with what is typed."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        del ctx, param
        return [CompletionItem(width) for width in (f"x{each}" for each in LANES) if width.startswith(incomplete)]


class Name(click.ParamType[str]):
    """A name that completes in the shell; what it stands for is checked where it is looked up."""

    def __init__(self, kind: str) -> None:
        self.name = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list["CompletionItem"]:
        """Known names that begin with what is typed."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        del ctx, param
        return [CompletionItem(name) for name in _names(self.name) if name.startswith(incomplete)]


def _names(kind: str) -> list[str]:
    from hwprofiles import profile_names  # noqa: PLC0415
    from twin.engines import backend_names, engine_names  # noqa: PLC0415
    from twin.formats import format_names  # noqa: PLC0415
    from twin.layouts import layout_names  # noqa: PLC0415
    from twin.models import model_names  # noqa: PLC0415

    listed = {
        "model": model_names,
        "machine": profile_names,
        "engine": engine_names,
        "layout": layout_names,
        "format": format_names,
        "backend": backend_names,
    }
    return listed[kind]()


class Stream(click.Path):
    """A path; `-` stands for a standard stream."""

    def __init__(self, stream: str, **checks: Any) -> None:
        super().__init__(path_type=Path, **checks)
        self.stream = stream

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path that is meant."""
        return super().convert(self.stream if str(value) == "-" else value, param, ctx)


TOKENS = Parsed("tokens", parse_tokens)
OUTPUT_TOKENS = Parsed("tokens", parse_tokens, hint="--output is a length here; -o FILE writes the answer to a file")
BYTES = Parsed("size", parse_bytes)
PCIE = PcieLink("link", parse_link)
INPUT = Stream("/dev/stdin")
OUTPUT = Stream("/dev/stdout", dir_okay=False, readable=False)
FILE = click.Path(dir_okay=False, readable=False, path_type=Path)


def with_options(*groups: Sequence[Option]) -> Callable[[Command], Command]:
    """All options of the groups, in order."""

    def decorate(command: Command) -> Command:
        for add in reversed([each for group in groups for each in group]):
            command = add(command)
        return command

    return decorate


JSON = option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
OUT = option("-o", "--output", type=OUTPUT, help="Write the answer to a file instead.")


def _model(default: str) -> Option:
    return option("--model", type=Name("model"), default=default, show_default=True,
                  help="A shipped model, a config.json or its folder, a GGUF, org/name, or a model file.")  # fmt: skip


def _longest(default: str) -> Option:
    return option("--max-model-len", "max_model_tokens", type=TOKENS,
                  help=f"Longest request that the engine is told to expect [default: {default}].")  # fmt: skip


def _link(context: click.Context, _option: click.Parameter, link: tuple[int | None, int]) -> int:
    """Its lanes; the generation is a field of the question of its own."""
    context.params["pcie_generation"], lanes = link
    return lanes


_NAMES = (
    option("--weights", help="The same shape in other weights: bf16, fp8, awq, q4_k_m, 4.05bpw and so on."),
    option("--hw", type=Name("machine"), help="A shipped machine or the path of a profile [default: the engine's]."),
    option("--engine", type=Name("engine"),
           help="The inference engine whose rules apply, such as vllm==0.26 [default: one that loads the model]."),
    option("--kv-dtype", type=Name("format"),
           help="Format of the cache, listed by twin formats; q8_0/q4_0: of K and of V [default: the engine's]."),
    option("--chunk", "--max-num-batched-tokens", "chunk_tokens", type=TOKENS,
           help="Prompt tokens of one prefill pass [default: the engine's, by the device]."),
    option("--gpus", type=int, help="What if: so many of the machine's device, each on a link of its own."),
    option("--tp", type=int, help="Devices that share every layer [default: the engine's]."),
    option("--pp", type=int, help="Stages of layers, each on --tp devices [default: the engine's]."),
    option("--split", type=Choice(["layer", "row"]),
           help="How all devices share the model: stages of layers, or rows of each [default: the engine's]."),
    option("--pcie", "lanes", type=PCIE, default="x16", show_default=True, callback=_link,
           help="What if: the link of each device: x8 is its own with fewer lanes, gen3x4 another, down to x1."),
    option("--ram", "ram_bytes", type=BYTES, help="What if: so much memory on the host, such as 64GiB."),
    option("--vram-free", "vram_free_bytes", type=BYTES,
           help="What if: so much of each device's memory is free, as if it had no more."),
    option("--what-if", is_flag=True,
           help="Ask for a format that the engine does not keep: bytes count, decoding it is taken as free."),
    option("--strict", is_flag=True, help="Refuse rates of kernels that were not measured on the machine."),
)  # fmt: skip

SERVED_MODEL_OPTIONS = (_model("qwen3.8-27b"), *_NAMES)

QUESTION_OPTIONS = (
    option("--ctx", "ctx_tokens", type=TOKENS, default="1M", show_default=True,
           help="Tokens of context: 32768, 256k, 1M (1M = 1,048,576)."),
    _model("qwen3.8-flash-next"),
    *_NAMES,
    option("--batch", type=int, default=1, show_default=True, help="Sequences that decode together."),
    option("--ngram", type=Choice(["ram", "disk"]),
           help="Where the n-gram table is read from [default: the engine's]."),
)  # fmt: skip

LAYOUT = option("--layout", type=Name("layout"),
                      help="Where the cache lives [default: offload if attention is sparse, else vram].")  # fmt: skip

OFFLOAD_OPTIONS = (
    option("--staging", "staging_bytes", type=BYTES,
           help="Buffer of a staged prefill, such as 32MiB [default: the engine's]."),
    option("--prefill", type=Choice(["auto", "staged", "naive"]),
           help="How a prefill reads host planes [default: auto, the engine's own choice]."),
    option("--copies", type=Choice(["serial", "overlapped"]),
           help="Whether staged copies run beside the kernels [default: the engine's]."),
    option("--pooled", type=Choice(["vram", "host"]),
           help="What if: the indexer's pooled keys on the host [default: vram]."),
    option("--host-pages", type=Choice(["huge", "4KiB"]), help="Page size of registered host memory [default: huge]."),
)  # fmt: skip

POOL_OPTIONS = (
    option("--util", "utilisation", type=float,
           help="Share of VRAM for weights and pool, such as 0.93 [default: the engine's]."),
    option("--pool", "pool_bytes", type=BYTES, help="Size of the block pool, in place of what --util leaves."),
    option("--max-seqs", "--max-num-seqs", "max_sequences", type=int,
           help="Most sequences that run at once [default: the engine's, by the device]."),
    option("--window-share", type=float,
           help="Tokens of a pool of windows to one of the other layers' [default: the engine's]."),
    option("--state-slots", type=int,
           help="States in a pool of their own, in place of their share of memory."),
    option("--prefix-cache", "prefix_caching", is_flag=True, help="Keep prompts for later requests."),
    option("--cold-start", is_flag=True, help="The engine compiles while it profiles, which costs pool."),
    option("--enforce-eager", "eager", is_flag=True, help="Nothing is compiled, no step is captured in a CUDA graph."),
    option("--graph-tokens", type=TOKENS, help="Most tokens of a step that is captured [default: the engine's]."),
    option("--kv-offload", "offload_bytes", type=BYTES, help="Host memory for blocks that the pool gives up."),
    option("--state-dtype", type=Choice(["fp16", "fp32"]), help="Type of recurrent states [default: the engine's]."),
    option("--backend", type=Name("backend"), help="Attention backend, where a format has several."),
    option("--stock", "patched", is_flag=True, default=True, flag_value=False,
           help="Without the published patches to groups and pages."),
    option("--sync-scheduling", "async_scheduling", is_flag=True, default=True, flag_value=False,
           help="Schedule a step only when the one before has ended."),
)  # fmt: skip

CELL_OPTIONS = (
    option("--ngl", "gpu_layers", type=int,
           help="llama.cpp: layers on devices, the output counted as one; the processor runs the first others "
                "[default: all]."),
    option("--n-cpu-moe", "cpu_experts", type=int, default=0,
           help="llama.cpp: layers, from the first on, whose experts the processor has (-ot exps=CPU: all)."),
    option("--swa-full", "whole_windows", is_flag=True, help="llama.cpp: windows keep what they no longer see."),
)  # fmt: skip

SPECULATION_OPTIONS = (
    option("--spec", "speculation", metavar="DRAFTER:K",
           help="Draft K tokens a step and verify them: mtp:3, dflash2:15."),
    option("--accept", "accepted", type=float, help="Tokens that a step yields on average, 1 to K + 1."),
    option("--task", help="In place of --accept: a task whose acceptance is published."),
)  # fmt: skip

MAX_LEN = _longest("the context")
SERVED_MAX_LEN = _longest("the model's own limit")

CACHED = option("--cached", "cached_tokens", type=TOKENS, default=0,
                      help="With --prefix-cache: prompt tokens that an earlier request left there.")  # fmt: skip
CACHED_IN = option("--cached-in", type=Choice(["vram", "host"]),
                   help="Where those lie: what the pool gave up is copied from the host [default: vram].")  # fmt: skip

TRACE_OPTIONS = (
    option("--trace-in", type=INPUT,
           help="Serve the requests of a trace, plain, gzip or zstd. JSON lines or CSV with arrival_s (seconds) or "
                "timestamp, prompt_tokens or input_length, output_tokens or output_length; optional are id and, in "
                "JSON, hash_ids, or prefix_id with prefix_tokens. So are Mooncake's and Bailian's. CSV of Azure, "
                "BurstGPT, Splitwise and Vidur. With --rate and --chars-per-token: ShareGPT, batches of OpenAI, vLLM's "
                "custom prompts."),
    option("--time-unit", type=Choice(["s", "ms"]), help="What timestamp counts [default: what the trace shows]."),
    option("--hash-tokens", type=TOKENS, help="Prompt tokens of each of hash_ids [default: what the trace shows]."),
    option("--chars-per-token", type=float,
           help="Estimate tokens of a trace that has text: about 4 in English. Outputs of no length take "
                "--output-tokens."),
)  # fmt: skip

WORKLOAD_OPTIONS = (
    option("--requests", type=int, help="How many requests [default: 1000]."),
    option("--rate", type=float, help="Requests a second [default: all at once]."),
    option("--prompt", type=TOKENS, help="Mean prompt length in tokens [default: 512]."),
    option("--output-tokens", "--output", "output_length", type=OUTPUT_TOKENS,
           help="Mean output length in tokens, no file [default: 256]."),
    option("--lengths", type=Choice(["fixed", "uniform", "exponential", "lognormal"]),
           help="How both lengths are distributed around their means [default: exponential]."),
    option("--cv", type=float, help="Standard deviation over mean, for uniform and lognormal."),
    option("--arrivals", type=Choice(["poisson", "constant", "burst"]),
           help="How requests come in at --rate [default: poisson]."),
    option("--burstiness", type=float, help="Shape of the gaps: 1 is Poisson, less is burstier."),
    option("--prefix", "prefix_tokens", type=TOKENS,
           help="Tokens at the start that all prompts share, beside --prompt."),
    option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same requests."),
)  # fmt: skip

MEASURED_OPTIONS = (
    option("--recorded", is_flag=True, help="Against everything that was ever recorded (the default)."),
    option("--public", is_flag=True, help="Against what strangers published of many machines, engines and models."),
    option("--hw", type=Name("machine"),
           help="Whose measurements [default: all that are recorded]; with --device, the profile to judge."),
    option("--device", help="Run the kernels here and now: cuda, cuda:1 or cpu."),
    option("--quick", is_flag=True, help="With --device: a third of the grid."),
    option("--group", "groups", multiple=True, type=click.Choice(["grid", "long_curve", "formats", "operations"]),
           help="With --device: which cases, more than once for several: sparse attention (grid, the default), "
                "its decode up to 3M tokens, every cache format, all other operations."),
    option("--record", "keep", is_flag=True, help="With --device: add the rows to the profile's measurements."),
)  # fmt: skip

BENCHMARK_OPTIONS = (
    option("--from", "files", multiple=True, type=click.Path(path_type=Path), metavar="FILE...",
           help="Results of an engine's own benchmark: llama-bench -o json or jsonl, vllm bench latency, throughput "
                "and serve, SGLang's bench_one_batch and bench_serving, what exllamav3's eval/perf.py prints."),
    option("--model", type=Name("model"), help="With --from, where the files do not say it: which model was run."),
    *_NAMES[:1],
    option("--engine", type=Name("engine"), help="With --from: the engine, where the files name another or none."),
    option("--kv-dtype", type=Name("format"), help="With --from: the cache's format [default: as the files say]."),
    option("--ctx", "prompt_tokens", type=TOKENS, help="With --from: length of prompts, where files do not say it."),
    option("--output-tokens", type=TOKENS, help="With --from: tokens of each answer, where files do not say it."),
    option("--batch", type=int, help="With --from: sequences at once, where files do not say it."),
    option("--chunk", "chunk_tokens", type=TOKENS, help="With --from: prompt tokens of one prefill pass."),
    option("--tp", type=int, help="With --from: devices that shared every layer, where files do not say it."),
    option("--pp", type=int, help="With --from: stages of layers, where files do not say it."),
    click.argument("more", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]..."),
)  # fmt: skip
"""Of the two commands that take what somebody else measured; `more` are further files after one of --from."""

QUALITY_OPTIONS = (
    option("--kv-dtype", metavar="A,B,...",
           help="Which formats [default: all; of exl3_* k8v8, k6v6, k4v4, k3v3 and k2v2]."),
    option("--tensors", type=click.Path(path_type=Path),
           help="K, V and Q dumped from a model, a safetensors file: k, v, q or layers.N.k and so on."),
    option("--heads", type=Choice(["outliers", "gaussian", "tails", "sinks"]),
           help="Which made-up heads to show in full [default: outliers]."),
    option("--model", type=Name("model"),
           help="Whose shape is made up, and whose published figures are shown [default: qwen3.8-27b]."),
    option("--tokens", type=TOKENS, help="Tokens in the cache [default: 4096, of a file all]."),
    option("--seed", type=int, help="Of what is made up; the same gives the same [default: 0]."),
    option("--device", default="cpu", show_default=True, help="Where to measure: cpu, cuda or cuda:1."),
    option("--explain", is_flag=True, help="Show all heads, or all layers of a file, in full."),
)  # fmt: skip


def benchmarks_of(asked: dict[str, Any], hw: str | None) -> tuple[list[Path], dict[str, Any]]:
    """(files of --from, what is given beside them); UsageError for what goes with --from and stands alone."""
    files, more = list(asked.pop("files")), list(asked.pop("more"))
    if files:
        return [*files, *more], {"hw": hw, **asked}
    if more:
        raise click.UsageError(f"{more[0]}: --from FILE... reads results of a benchmark")
    alone = next((name for name, value in asked.items() if value is not None), None)
    if alone is not None:
        raise click.UsageError(f"--{_BENCHMARK_FLAGS.get(alone, alone).replace('_', '-')} goes with --from")
    return [], {}


_BENCHMARK_FLAGS = {"prompt_tokens": "ctx", "chunk_tokens": "chunk"}
