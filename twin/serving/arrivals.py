"""The queue in front of the engine: first come first served, preempted sequences before all others.

Only one request is read ahead. Those that have arrived but not been admitted stay in their source, so that memory does
not grow with the queue.
"""

from collections import deque
from collections.abc import Iterable
from math import inf

from twin.errors import BadValue
from twin.serving.limits import Limits
from twin.serving.live import Live
from twin.serving.metrics import Metrics
from twin.serving.pool import Ledger
from twin.serving.records import Rejection
from twin.serving.requests import MAX_ARRIVAL_S, Request

SLACK = 1e-9
MOST_SLACK_S = 1e-6
"""An arrival this close after the end of a step counts as before it: rounding must not cost it a step."""


def slack_s(now_s: float) -> float:
    """How much later than `now_s` an arrival may lie and count as there."""
    return min(now_s * SLACK, MOST_SLACK_S)


class Arrivals:
    """Who comes next, and when."""

    __slots__ = ("_latest_s", "_ledger", "_limits", "_metrics", "_preempted", "_source", "_upcoming", "next_s")

    def __init__(self, requests: Iterable[Request], ledger: Ledger, limits: Limits, metrics: Metrics) -> None:
        self._source = iter(requests)
        self._ledger, self._limits, self._metrics = ledger, limits, metrics
        self._preempted: deque[Live] = deque()
        self._upcoming: Live | None = None
        self._latest_s = 0.0
        self.next_s = 0.0
        """When the next request that was never admitted arrives; infinite if there is none."""
        self._read()

    def head(self, now_s: float) -> Live | None:
        """Who is to be admitted next, if anybody waits."""
        if self._preempted:
            return self._preempted[0]
        return self._upcoming if self.next_s <= now_s + slack_s(now_s) else None

    def pop(self) -> None:
        """The head was admitted."""
        if self._preempted:
            self._preempted.popleft()
        else:
            self._read()

    def put_back(self, live: Live) -> None:
        """A preempted sequence is the next to be admitted."""
        self._preempted.appendleft(live)

    def _read(self) -> None:
        """Read on to the next request that can run at all."""
        self._upcoming, self.next_s = None, inf
        for request in self._source:
            if request.arrival_s > MAX_ARRIVAL_S:
                raise BadValue(
                    f"request {request.id} arrives at {request.arrival_s:g} s, the clock ends at {MAX_ARRIVAL_S:g} s",
                    hint="count arrivals from the first one on",
                )
            if not self._latest_s <= request.arrival_s:
                raise BadValue(
                    f"request {request.id} arrives at {request.arrival_s:g} s, after one at {self._latest_s:g} s",
                    hint="requests are taken in the order of their arrival",
                )
            if not (request.output_tokens >= 1 and 0 <= request.prefix_tokens <= request.prompt_tokens >= 1):
                raise BadValue(
                    f"request {request.id} has {request.prompt_tokens} prompt tokens, {request.prefix_tokens} of them "
                    f"a prefix, and {request.output_tokens} output tokens",
                    hint="prompt and output are at least 1, and the prefix is part of the prompt",
                )
            self._latest_s = request.arrival_s
            rejection = self._misfit(request)
            if rejection is None:
                self._upcoming, self.next_s = Live(request), request.arrival_s
                return
            self._metrics.reject(rejection)

    def _misfit(self, request: Request) -> Rejection | None:
        """Why a request can never run."""
        prompt, output = request.prompt_tokens, request.output_tokens
        most = self._limits.max_model_tokens
        if most is not None and prompt + output > most:
            kind, reason = "max_model_tokens", f"{prompt + output:,} tokens, the model takes {most:,}"
        else:
            blocks = self._ledger.blocks_for(self._limits.last_slot(prompt, output))
            if blocks <= self._ledger.total:
                return None
            kind, reason = "pool", f"needs {blocks:,} blocks, the pool has {self._ledger.total:,}"
        return Rejection(
            id=request.id,
            arrival_s=request.arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            kind=kind,
            reason=reason,
            line=request.line,
        )
