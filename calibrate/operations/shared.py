"""What rows of the table share: parameters, tolerances, and how points are made.

Calibration takes powers of two and multiples of them that fill a device; validation takes 3 x 2^k, 9 x 2^k and odd
sizes. No point is in both.
"""

from collections.abc import Callable, Iterable
from itertools import product as every

from calibrate.operations.operation import FORMATS, Parameter, Point, Points, Tolerance, Value
from twin.engines.twin import INLINE, PLAIN, QUANTISED

MIB = 2**20
CPU_HEADS = "8x2x64"
"""Query heads x KV heads x elements of a head on a processor; on a GPU the model's."""
CPU_SHAPE = "1024x8x2x128x3584"
"""Hidden, query heads, KV heads, elements of a head and intermediate of a dense layer there."""
KEPT: tuple[Point, ...] = (
    *({"format": name} for name in FORMATS),
    *({"format": name, "arrangement": "inline"} for name in INLINE),
)
"""Formats that are read whole, in the arrangements that have kernels."""
KERNEL = Tolerance(0.12, "twice the spread of repeated runs of such kernels over contexts that were not calibrated")
HOST_PREFILL = Tolerance(
    0.20,
    "another user of the shared server loaded the link in phases: samples of one row alternate between two levels "
    "up to 20 % apart, and the median of some rows fell on the slower one",
)
LIBRARY = Tolerance(0.16, "a library's matrix product and top-k, whose choice of kernel changes with the shape")
FORMAT_RATES = Tolerance(
    0.16,
    "few numbers a format stand for all contexts, batches and query tokens; some calls of two rounds of programs "
    "alternate between two levels up to 10 % apart",
)
OPEN_TILE = Tolerance(
    0.25,
    "tokens of an open tile are read by one program after all of its others, with nothing loaded ahead: 7 us that "
    "show at short contexts, and calibration has whole tiles alone",
)
FLASH = Tolerance(
    0.31,
    "one share a number of rows for all pasts, one for all batches and contexts: 768 rows behind nothing took "
    "30 % longer than that, six sequences of 6,144 tokens 18 % less",
)
SMALL = Tolerance(
    0.28,
    "a launch or two: a latency of a few microseconds that one or two calibrated sizes tell; 96 tokens, where it "
    "ends and bytes begin, took up to 28 % longer",
)
HOST_MEMORY = Tolerance(
    0.50,
    "a disk and a host memory that others use too; images are pageable: of four runs one was up to 51 % off",
)

LONG_CURVE = Tolerance(0.06, "decode of one machine from 8k to 3.1M: what a reader of the curve would notice")
CPU = Tolerance(
    0.40, "a processor shared with others: a run a minute later differs by as much; the median is what counts"
)

TIER = Parameter("tier", choices=("vram", "host", "host4k"))
"""Where K and V lie: in device memory, or in host memory of huge pages or of 4 KiB."""
FORMAT = Parameter("format", choices=(*PLAIN, *QUANTISED))
ARRANGEMENT = Parameter("arrangement", optional=True, choices=("inline",))
HEADS = Parameter("heads", "h{}", optional=True, choices=())
CTX = Parameter("ctx_tokens")
LAYERS = Parameter("layers", "x{}")
DTYPE = Parameter("dtype", choices=("bf16", "fp16", "fp32"))
SHAPE = Parameter("shape", "s{}", optional=True, choices=())
TOKENS = Parameter("tokens")
BATCH, PAST = Parameter("batch", "b{}"), Parameter("past_tokens", "p{}", least=0)
Q_TOKENS = Parameter("q_tokens", "r{}")
BUDGET = Parameter("budget", "t{}", optional=True)


def sizes(*names: str, of: Iterable[Iterable[Value]], **same: Value) -> tuple[Point, ...]:
    """Points from rows of values, with `same` in each."""
    return tuple({**same, **dict(zip(names, row, strict=True))} for row in of)


def alike(gpu: tuple[Point, ...], cpu: tuple[Point, ...] = (), *, quick: tuple[Point, ...] = ()) -> Points:
    """The same points in both modes, but for what is `quick` on a GPU."""
    return Points(gpu, quick or gpu, cpu, cpu)


def powers(first: int, last: int, step: int = 1) -> tuple[int, ...]:
    """2^first, 2^(first + step), ... up to 2^last."""
    return tuple(2**power for power in range(first, last + 1, step))


def of_each(kept: Iterable[Point], points: Iterable[Point]) -> tuple[Point, ...]:
    """Every point of every format."""
    return tuple({**one, **point} for one, point in every(kept, points))


def dealt(
    design: tuple[tuple[int, ...], ...], kept: Iterable[Point], names: tuple[str, ...], *, each: int, step: int,
    first: int = 0,
) -> tuple[Point, ...]:  # fmt: skip
    """`each` rows of one design a format, beginning `step` rows later each time: every size meets several formats."""
    return tuple(
        {**one, **dict(zip(names, design[(number * step + place) % len(design)], strict=True))}
        for number, one in enumerate(kept, start=first)
        for place in range(each)
    )


def exactly(tolerance: Tolerance) -> Callable[[Point], Tolerance]:
    """The same for every point."""
    return lambda _point: tolerance


def lasting(quick_s: float, full_s: float) -> Callable[[Point], tuple[float, float]]:
    """So long for every probe."""
    return lambda _point: (quick_s, full_s)
