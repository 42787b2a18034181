"""`vllm bench latency|throughput|serve` with `--output-json` or `--save-result`.

Source: `vllm/benchmarks/{latency,throughput,serve}.py` of vLLM 0.11 to 0.33. Latencies and throughputs are all that the
first two write: options say the rest.
"""

from msgspec import Struct

from calibrate.benchmarks.points import (
    MOST_REQUESTS,
    Given,
    Left,
    Point,
    Read,
    Reading,
    Seconds,
    Times,
    Told,
    needed,
    spread_of,
)
from calibrate.benchmarks.serving import Served, served_points

LATENCY_MARKS = ("avg_latency", "latencies")
THROUGHPUT_MARKS = ("elapsed_time", "num_requests", "total_num_tokens")
SERVE_MARKS = ("model_id", "num_prompts", "request_throughput")

ENGINE = "vllm"


class Latency(Struct, frozen=True, kw_only=True):
    """Whole batches, from their prompts to their last tokens."""

    avg_latency: Seconds
    latencies: tuple[Seconds, ...]
    std_latency: float | None = None


class Throughput(Struct, frozen=True, kw_only=True):
    """Requests that were all there at once."""

    elapsed_time: Seconds
    num_requests: Times
    total_num_tokens: Times


class Serve(Served, frozen=True, kw_only=True):
    """A server's."""

    model_id: str
    spec_decode_acceptance_length: float | None = None


def latency_points(row: Latency, where: str, given: Given) -> Read:
    """One time of a prompt and its tokens: the mean of its runs."""
    prompt = needed(given.prompt_tokens, where, "--ctx", "how long its prompts are (--input-len)")
    output = needed(given.output_tokens, where, "--output-tokens", "how many tokens it generates (--output-len)")
    batch = needed(given.batch, where, "--batch", "how many prompts it runs at once (--batch-size)")
    n = len(row.latencies)
    mean = sum(row.latencies) / n if n else row.avg_latency
    deviation = (sum((each - mean) ** 2 for each in row.latencies) / n) ** 0.5 if n else row.std_latency or 0.0
    point = Point(
        id=f"{where} {batch}x{prompt}+{output}", metric="ttft" if output == 1 else "latency", seconds=row.avg_latency,
        spread=spread_of(mean, deviation, n), n=max(1, n), prompt_tokens=prompt, steps=output - 1, batch=batch,
    )  # fmt: skip
    return [Reading(Told(engine=ENGINE), point)]


def throughput_points(row: Throughput, where: str, given: Given) -> Read:
    """How long all requests took; of their lengths the sum is told, one option says the other."""
    each = row.total_num_tokens / row.num_requests
    output = needed(given.output_tokens, where, "--output-tokens", "how many tokens each request generates")
    prompt = given.prompt_tokens or round(each) - output
    if row.num_requests > MOST_REQUESTS:
        return [Left(where, f"{row.num_requests:,} requests, more than the {MOST_REQUESTS:,} that are simulated")]
    if prompt < 1 or abs(prompt + output - each) > 0.02 * each:
        return [Left(where, f"{prompt:,} and {output:,} tokens are not the {each:,.0f} of each of its requests")]
    point = Point(
        id=f"{where} {row.num_requests}x{prompt}+{output}", metric="served", seconds=row.elapsed_time,
        n=row.num_requests, prompt_tokens=prompt, steps=output, batch=given.batch or 0, requests=row.num_requests,
    )  # fmt: skip
    return [Reading(Told(engine=ENGINE), point)]


def serve_points(row: Serve, where: str, given: Given) -> Read:
    """As `served_points`; what a drafter was in yields steps of several tokens."""
    del given
    if row.spec_decode_acceptance_length is not None:
        return [Left(where, "speculation: a step yields several tokens")]
    return served_points(row, Told(engine=ENGINE, model=row.model_id), where)
