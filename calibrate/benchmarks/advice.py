"""What one more run would teach most: the question that the engine's own benchmark can ask and that is known least."""

from typing import NamedTuple

from msgspec.structs import replace

from calibrate.benchmarks.asking import Asked, Evidence
from calibrate.benchmarks.points import Point
from calibrate.benchmarks.predicted import told_of
from hwprofiles import HardwareProfile
from twin.ask.case import Case
from twin.errors import Impossible
from twin.memory.plan import plan_memory

DEPTHS = (512, 4096, 16384, 32768, 65536, 131072)
ENOUGH = 0.05
"""Relative half-width of an interval below which another run is not worth while."""
STEPS = 128

COMMANDS = {
    "llama.cpp": ("llama-bench -p 0 -n {steps} -d {tokens}", "llama-bench -p {tokens} -n 0"),
    "vllm": ("vllm bench latency --input-len {tokens} --output-len {steps} --batch-size 1",) * 2,
    "sglang": ("python -m sglang.bench_one_batch --batch-size 1 --input-len {tokens} --output-len {steps}",) * 2,
    "exllamav3": ("python eval/perf.py -max_length {tokens}",) * 2,
}
"""By engine, of steps after so many tokens and of prompts of so many."""
ANY = ("decode after {tokens} tokens", "a prompt of {tokens} tokens")


class Advice(NamedTuple):
    """A run, and how well its outcome is known now: relative, half the width of the 90 % interval."""

    command: str
    width: float

    @property
    def worth_while(self) -> bool:
        """Whether it would teach anything."""
        return self.width > ENOUGH


def advice(found: Evidence, machine: HardwareProfile) -> Advice | None:
    """Of steps and prompts at contexts that fit; None where none does."""
    case = found.asked[0].case
    engine = case.rules.name
    runs = []
    for tokens in DEPTHS:
        question = replace(case.question, ctx_tokens=tokens + STEPS, batch=1, max_sequences=None)
        asked = replace(case, question=question)
        if tokens + STEPS > case.model.native_ctx_tokens or not _fits(asked, machine):
            continue
        step = Point(id="", metric="step", seconds=1.0, kv_tokens=tokens, steps=STEPS)
        prompt = Point(id="", metric="prefill", seconds=1.0, prompt_tokens=tokens)
        for point, command in zip((step, prompt), COMMANDS.get(engine, ANY), strict=True):
            one = Asked(point, asked)
            told = told_of(one, machine)
            width = (told.high / told.low) ** 0.5 - 1
            runs.append(Advice(command.format(tokens=tokens, steps=STEPS), width))
    return max(runs, key=lambda each: each.width, default=None)


def _fits(case: Case, machine: HardwareProfile) -> bool:
    """Whether it is known to: what its rulebook does not count there is not advised."""
    try:
        return plan_memory(case, machine).fits
    except Impossible:
        return False
