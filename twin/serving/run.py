"""The door: requests, costs, blocks and limits in, a `ServingResult` out."""

from collections.abc import Callable, Iterable

from twin.serving.engine import Engine
from twin.serving.limits import Limits
from twin.serving.metrics import Metrics
from twin.serving.protocols import BlockPool, StepCosts
from twin.serving.records import Rejection, RequestRecord, ServingResult, Steps
from twin.serving.requests import Request
from twin.serving.scheduler import Scheduler


def simulate_serving(
    requests: Iterable[Request],
    costs: StepCosts,
    pool: BlockPool,
    limits: Limits,
    *,
    jump: bool = True,
    on_finish: Callable[[RequestRecord], None] | None = None,
    on_reject: Callable[[Rejection], None] | None = None,
    on_steps: Callable[[Steps], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> ServingResult:
    """Serve `requests`, read one ahead in the order of their arrival; memory does not grow with their number.

    `jump=False` takes every decode step by itself, for the same result. `on_finish` gets each record as it ends,
    `on_reject` what can never run, `on_steps` what the engine did, `progress` now and then the completed requests and
    the simulated seconds. BadValue for requests out of order; whatever `requests` raises passes through.
    """
    metrics = Metrics(on_finish, on_reject)
    scheduler = Scheduler(requests, pool, limits, metrics)
    engine = Engine(scheduler, costs, metrics, jump=jump, on_steps=on_steps, progress=progress)
    engine.run()
    return _result(limits, metrics, scheduler, engine.now_s)


def _result(limits: Limits, metrics: Metrics, scheduler: Scheduler, total_s: float) -> ServingResult:
    residency = metrics.residency
    return ServingResult(
        limits=limits,
        total_s=total_s,
        busy_s=metrics.busy_s,
        steps=metrics.steps,
        completed=metrics.completed,
        prompt_tokens=metrics.prompt_tokens,
        output_tokens=metrics.output_tokens,
        cached_tokens=metrics.cached_tokens,
        recomputed_tokens=metrics.recomputed_tokens,
        preemptions=metrics.preemptions,
        resident_max=residency.most,
        resident_mean=residency.area / total_s if total_s else 0.0,
        pool_blocks=scheduler.ledger.total,
        pool_peak_blocks=metrics.peak_blocks,
        ttft_s=metrics.ttft_s,
        itl_s=metrics.itl_s,
        tpot_s=metrics.tpot_s,
        e2e_s=metrics.e2e_s,
        queue_s=metrics.queue_s,
        timeline=residency.points(total_s),
        timeline_bin_s=residency.bin_s,
        requests=tuple(metrics.records),
        rejected=dict(metrics.rejected),
        rejections=tuple(metrics.rejections),
    )
