"""Everything that is counted while a simulation runs, in constant memory."""

from collections.abc import Callable

from twin.serving.histogram import Histogram
from twin.serving.records import Rejection, RequestRecord
from twin.serving.residency import Residency

KEPT_RECORDS = 1000
KEPT_REJECTIONS = 100


class Metrics:
    """Counters, histograms and the first records; whole records leave through the callbacks."""

    __slots__ = (
        "busy_s",
        "cached_tokens",
        "completed",
        "e2e_s",
        "itl_s",
        "on_finish",
        "on_reject",
        "output_tokens",
        "peak_blocks",
        "preemptions",
        "prompt_tokens",
        "queue_s",
        "recomputed_tokens",
        "records",
        "rejected",
        "rejections",
        "residency",
        "steps",
        "tpot_s",
        "ttft_s",
    )

    def __init__(
        self,
        on_finish: Callable[[RequestRecord], None] | None = None,
        on_reject: Callable[[Rejection], None] | None = None,
    ) -> None:
        self.on_finish, self.on_reject = on_finish, on_reject
        self.ttft_s, self.itl_s, self.tpot_s = Histogram(), Histogram(), Histogram()
        self.e2e_s, self.queue_s = Histogram(), Histogram()
        self.residency = Residency()
        self.busy_s = 0.0
        self.steps = self.completed = self.preemptions = self.peak_blocks = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = self.recomputed_tokens = 0
        self.records: list[RequestRecord] = []
        self.rejected: dict[str, int] = {}
        self.rejections: list[Rejection] = []

    def finished(self, record: RequestRecord) -> None:
        """A request got its last token."""
        self.completed += 1
        self.prompt_tokens += record.prompt_tokens
        self.output_tokens += record.output_tokens
        self.cached_tokens += record.cached_tokens
        self.queue_s.add(record.queue_s)
        self.ttft_s.add(record.ttft_s)
        self.e2e_s.add(record.e2e_s)
        if record.tpot_s is not None:
            self.tpot_s.add(record.tpot_s)
        if len(self.records) < KEPT_RECORDS:
            self.records.append(record)
        if self.on_finish is not None:
            self.on_finish(record)

    def reject(self, rejection: Rejection) -> None:
        """A request can never run."""
        self.rejected[rejection.kind] = self.rejected.get(rejection.kind, 0) + 1
        if len(self.rejections) < KEPT_REJECTIONS:
            self.rejections.append(rejection)
        if self.on_reject is not None:
            self.on_reject(rejection)
