"""SGLang's `bench_one_batch`, `bench_one_batch_server` and `bench_serving`: a run a line.

Source: `python/sglang/bench_one_batch.py`, `test/bench_one_batch_server_internal.py`, `bench_one_batch_server.py` and
`bench_serving.py` of github.com/sgl-project/sglang, 0.4 to 0.5.15.
"""

from msgspec import Struct

from calibrate.benchmarks.points import Given, Left, Point, Read, Reading, Seconds, Sequences, Times, Told
from calibrate.benchmarks.serving import Served, served_points

BATCH_MARKS = ("prefill_latency", "batch_size", "input_len")
SERVER_MARKS = ("latency", "overall_throughput", "batch_size", "input_len")
SERVING_MARKS = ("backend", "total_output_tokens", "total_output_tokens_retokenized")

ENGINE = "sglang"
FORMATS = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "float16": "fp16", "auto": ""}
"""Cache types whose names differ here."""


class Batch(Struct, frozen=True, kw_only=True):
    """One batch in the engine's own process, without a server: the whole prompt is one pass."""

    batch_size: Sequences
    input_len: Times
    output_len: Times
    prefill_latency: Seconds
    run_name: str = ""
    median_decode_latency: Seconds | None = None


class Server(Struct, frozen=True, kw_only=True):
    """One batch sent to a server; older ones told the whole latency alone."""

    batch_size: Sequences
    input_len: Times
    output_len: Times
    latency: Seconds
    run_name: str = ""
    last_ttft: Seconds | None = None
    acc_length: float | None = None
    cache_hit_rate: float | None = None


class Serving(Served, frozen=True, kw_only=True):
    """Many requests to a server of any kind: `backend` says which."""

    backend: str
    accept_length: float | None = None
    server_info: dict[str, object] | None = None


def batch_points(row: Batch, where: str, given: Given) -> Read:
    """The prompts' pass, and the median of the steps after it."""
    del given
    name = f"{where} {row.batch_size}x{row.input_len}+{row.output_len}"
    told = Told(engine=ENGINE, chunk_tokens=row.input_len)
    found: Read = [
        Reading(told, Point(
            id=f"{name} prefill", metric="prefill", seconds=row.prefill_latency, prompt_tokens=row.input_len,
            batch=row.batch_size,
        ))
    ]  # fmt: skip
    if row.median_decode_latency is not None and row.output_len > 1:
        steps = row.output_len - 1
        found.append(Reading(told, Point(
            id=f"{name} step", metric="step", seconds=row.median_decode_latency, n=steps, kv_tokens=row.input_len,
            steps=steps, batch=row.batch_size,
        )))  # fmt: skip
    return found


def server_points(row: Server, where: str, given: Given) -> Read:
    """First token and the steps after it, or both as one."""
    del given
    if (row.acc_length or 0.0) > 1.0:
        return [Left(where, "speculation: a step yields several tokens")]
    if row.cache_hit_rate:
        return [Left(where, f"{100 * row.cache_hit_rate:.3g} % of its prompts were in the prefix cache")]
    name = f"{where} {row.batch_size}x{row.input_len}+{row.output_len}"
    told = Told(engine=ENGINE)
    prompt, steps, batch = row.input_len, row.output_len - 1, row.batch_size
    if row.last_ttft is None:
        point = Point(
            id=name, metric="latency" if steps else "ttft", seconds=row.latency, prompt_tokens=prompt, steps=steps,
            batch=batch,
        )  # fmt: skip
        return [Reading(told, point)]
    if row.last_ttft > row.latency:
        return [Left(where, f"its first tokens took {row.last_ttft} s of {row.latency} s")]
    first = Point(id=f"{name} ttft", metric="ttft", seconds=row.last_ttft, prompt_tokens=prompt, batch=batch)
    found: Read = [Reading(told, first)]
    if steps and row.latency > row.last_ttft:
        step_s = (row.latency - row.last_ttft) / steps
        step = Point(
            id=f"{name} step", metric="step", seconds=step_s, n=steps, kv_tokens=prompt, steps=steps, batch=batch
        )
        found.append(Reading(told, step))
    return found


def serving_points(row: Serving, where: str, given: Given) -> Read:
    """As `served_points`, of the engine behind the server."""
    del given
    if (row.accept_length or 0.0) > 1.0:
        return [Left(where, "speculation: a step yields several tokens")]
    return served_points(row, _told(row), where)


def _told(row: Serving) -> Told:
    engine = row.backend.split("-")[0].lower()
    info = row.server_info or {}

    def text(key: str) -> str:
        value = info.get(key)
        return value if isinstance(value, str) else ""

    chunk, cards = info.get("chunked_prefill_size"), info.get("tp_size")
    kv_dtype = text("kv_cache_dtype")
    return Told(
        engine=engine, version=text("version"), model=text("model_path"), kv_dtype=FORMATS.get(kv_dtype, kv_dtype),
        chunk_tokens=chunk if type(chunk) is int and chunk > 0 else 0,
        flags=(("tp", cards),) if type(cards) is int and cards > 1 else (),
    )  # fmt: skip
