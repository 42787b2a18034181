"""What the scheduler may do in one step."""

from msgspec import Struct

from twin.errors import BadValue
from twin.units import MAX_TOKENS

MAX_SEQUENCES = 65_536
MAX_SPECULATIVE = 1_024
RATIO_UNIT = 10**6
"""`tokens_per_step` is kept in whole millionths, so that token counts are exact."""


class Limits(Struct, frozen=True, kw_only=True):
    """The scheduler's options, named after what they limit; vLLM's own names stand beside."""

    batched_tokens: int = 2048
    """Query tokens of one step, decodes and prefill chunks together (max_num_batched_tokens)."""
    max_sequences: int = 256
    """Sequences running at once (max_num_seqs)."""
    max_model_tokens: int | None = None
    """Prompt and output together; a longer request is rejected (max_model_len)."""
    speculative: int = 0
    """Draft tokens verified in each decode step beside the one that is certain (num_speculative_tokens)."""
    tokens_per_step: float = 1.0
    """Mean tokens that a sequence gains in a decode step: from 1 to 1 + `speculative`."""
    reserve_prompt: bool = True
    """Admit a request only when its whole prompt would fit now, not merely its first chunk.

    vLLM's default (scheduler_reserve_full_isl, PR 37307); blocks are still taken chunk by chunk.
    """
    reserve_output: bool = False
    """Take the blocks of the whole output at admission: nothing is ever preempted (TensorRT-LLM's no-evict policy)."""
    prefix_cache: bool = True
    """Skip prompt tokens of a shared prefix that is still cached (enable_prefix_caching)."""

    def __post_init__(self) -> None:
        _whole("batched_tokens", self.batched_tokens, 1, MAX_TOKENS)
        _whole("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)
        if self.max_model_tokens is not None:
            _whole("max_model_tokens", self.max_model_tokens, 2, MAX_TOKENS)
        _whole("speculative", self.speculative, 0, MAX_SPECULATIVE)
        if not 1 <= self.tokens_per_step <= 1 + self.speculative:
            raise BadValue(
                f"tokens_per_step is {self.tokens_per_step}, outside the range of 1 to {1 + self.speculative}",
                hint="a step yields one token and at most one more per speculative token",
            )
        if self.batched_tokens <= self.speculative:
            raise BadValue(
                f"batched_tokens is {self.batched_tokens}: one sequence decodes {1 + self.speculative} tokens a step",
                hint=f"at least {1 + self.speculative} with {self.speculative} speculative tokens",
            )

    @property
    def query_tokens(self) -> int:
        """Tokens of the budget that one decoding sequence takes."""
        return 1 + self.speculative

    @property
    def most_running(self) -> int:
        """Sequences that may run at once: the budget must hold a decode of each."""
        return min(self.max_sequences, self.batched_tokens // self.query_tokens)

    @property
    def ratio(self) -> tuple[int, int]:
        """`tokens_per_step` as whole numbers: tokens and steps."""
        if self.tokens_per_step == 1:
            return 1, 1
        return round(self.tokens_per_step * RATIO_UNIT), RATIO_UNIT

    def last_slot(self, prompt_tokens: int, output_tokens: int) -> int:
        """Tokens for which a request may need blocks at once: the last token is never cached, drafts are."""
        return prompt_tokens if output_tokens == 1 else prompt_tokens + output_tokens - 1 + self.speculative


def _whole(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise BadValue(f"{name} is {value}, outside the range of {least:,} to {most:,}")
