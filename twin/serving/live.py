"""A request between its arrival and its last token."""

from twin.serving.prefixes import Piece
from twin.serving.records import RequestRecord
from twin.serving.requests import Request

NEVER = -1.0
NOT_RUNNING = -1
NOT_DECODING = -1


class Live:
    """What the scheduler knows of a request. Compared by identity."""

    __slots__ = (
        "admitted_s",
        "blocks",
        "cached_tokens",
        "computed",
        "end",
        "first_s",
        "held",
        "last_s",
        "outputs",
        "pieces",
        "preemptions",
        "remainder",
        "request",
        "serial",
        "shared_blocks",
        "start",
        "target",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.serial = NOT_RUNNING
        """Rises from admission to admission: who has the highest is preempted first."""
        self.target = request.prompt_tokens
        """Tokens to compute before the next token can be sampled."""
        self.computed = 0
        """Tokens computed by prefill so far; those of decode steps follow from `start`."""
        self.outputs = 0
        """Tokens brought forth before the decode step `start`."""
        self.start = self.end = NOT_DECODING
        """The engine's count of steps at its first decode step, and after its last."""
        self.blocks = self.shared_blocks = 0
        """Blocks held (while it decodes, its `Growth` may know better), and those of them that belong to a prefix."""
        self.pieces: tuple[Piece, ...] | None = None
        self.held = 0
        """How many of `pieces` it holds."""
        self.admitted_s = self.first_s = self.last_s = NEVER
        self.cached_tokens = self.remainder = 0
        self.preemptions = 0

    def record(self, now_s: float) -> RequestRecord:
        """What is left of it after its last token at `now_s`."""
        request = self.request
        arrival_s, output = request.arrival_s, request.output_tokens
        return RequestRecord(
            id=request.id,
            arrival_s=arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=output,
            cached_tokens=self.cached_tokens,
            queue_s=max(0.0, self.admitted_s - arrival_s),
            ttft_s=self.first_s - arrival_s,
            tpot_s=(now_s - self.first_s) / (output - 1) if output > 1 else None,
            e2e_s=now_s - arrival_s,
            preemptions=self.preemptions,
        )
