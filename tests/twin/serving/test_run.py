"""Whole simulations: memory that does not grow, and the same answer every time."""

import subprocess
import sys
import tracemalloc

from tests.twin.serving.worlds import Affine, serve
from twin.serving.blocks import PagedPool
from twin.serving.metrics import ServingResult
from twin.serving.requests import Lengths, Workload

SHORT, LONG = 2_000, 10_000
FEW_BYTES = 100_000
"""Room for buckets that only a longer run fills; 13 bytes for each further request are more."""
COSTS = Affine(fixed_s=6e-3, sequence_s=2e-5, token_s=1e-7, row_s=3e-5, pair_s=1e-9)
POOL = PagedPool(blocks=6_000, block_tokens=16)


def chat(count: int, *, rate_per_s: float | None = 10.0, seed: int = 0) -> Workload:
    return Workload(
        count=count,
        rate_per_s=rate_per_s,
        prompt=Lengths(mean=512, distribution="exponential"),
        output=Lengths(mean=256, distribution="exponential"),
        prefix_tokens=64,
        seed=seed,
    )


def peak_bytes(count: int, rate_per_s: float | None) -> int:
    """Largest traced size while so many requests are served."""
    tracemalloc.start()
    result = serve(chat(count, rate_per_s=rate_per_s).requests(), costs=COSTS, pool=POOL)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.completed == count
    return peak


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    assert peak_bytes(LONG, 10.0) < peak_bytes(SHORT, 10.0) + FEW_BYTES


def test_memory_does_not_grow_with_the_queue() -> None:
    assert peak_bytes(LONG, None) < peak_bytes(SHORT, None) + FEW_BYTES


def answers(result: ServingResult) -> tuple[object, ...]:
    return (result.total_s, result.requests, result.itl_s.buckets(), result.timeline, result.preemptions)


def test_the_same_seed_gives_the_same_answer() -> None:
    runs = [serve(chat(500, seed=seed).requests(), costs=COSTS, pool=POOL) for seed in (1, 1, 2)]
    assert answers(runs[0]) == answers(runs[1])
    assert answers(runs[0]) != answers(runs[2])


def test_decode_costs_are_asked_once_for_each_number_of_sequences() -> None:
    asked: list[int] = []

    class Counted(Affine, frozen=True):
        def decode(self, sequences: int, ctx_tokens: float) -> tuple[float, float]:
            asked.append(sequences)
            return COSTS.decode(sequences, ctx_tokens)

        def mixed(self, *_: object) -> float:
            return 0.01

    serve(chat(500).requests(), costs=Counted(), pool=POOL)
    assert len(asked) == len(set(asked)) <= 256


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nimport twin.serving.engine, twin.serving.traces\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"numpy", "scipy", "torch", "simpy", "rich", "click"}
