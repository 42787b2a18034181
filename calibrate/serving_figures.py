"""How each recorded figure of many requests at once is predicted: the workload is served, step by step."""

from collections.abc import Callable

from msgspec.structs import replace

from calibrate.estimates import Asked, Estimate, NoAnswer, count
from twin.answers.service import Service, serve
from twin.serving.metrics import ServingResult
from twin.serving.requests import Lengths, Workload
from twin.units import MS


def total_time(asked: Asked) -> Estimate:
    """Seconds from the first arrival to the last token."""
    return _of(asked, lambda result: result.total_s)


def throughput(asked: Asked) -> Estimate:
    """Output tokens a second over the whole run."""
    return _of(asked, lambda result: result.output_tokens / result.total_s)


def inter_token(asked: Asked) -> Estimate:
    """Median milliseconds between tokens of one request; NoAnswer where each has one token."""
    if asked.workload is not None and asked.workload.output_tokens == 1:
        raise NoAnswer("a request of one token has no time between tokens")
    return _of(asked, lambda result: result.itl_s.quantile(0.5) / MS)


def residents(asked: Asked) -> Estimate:
    """Most requests in the pool at once."""
    return count(_served(asked, intervals=False).result.resident_max)


def _of(asked: Asked, figure: Callable[[ServingResult], float]) -> Estimate:
    service = _served(asked, intervals=asked.intervals)
    low, high = service.ends(figure)
    return Estimate(value=figure(service.result), low=low, high=high)


def _served(asked: Asked, *, intervals: bool) -> Service:
    """All requests at once, each as long as the workload says."""
    load = asked.workload
    if load is None:
        raise NoAnswer("a figure of many requests needs a workload")
    longest = asked.question.max_model_tokens or asked.case.model.native_ctx_tokens
    question = replace(asked.question, ctx_tokens=longest, max_model_tokens=longest)
    workload = Workload(
        count=load.requests, prompt=Lengths(mean=load.prompt_tokens), output=Lengths(mean=load.output_tokens)
    )
    service = serve(question, workload.requests, profile=asked.profile, intervals=intervals)
    if service.result.rejections:
        raise NoAnswer(service.result.rejections[0].reason)
    return service
