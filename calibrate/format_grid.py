"""Which format cases validate a machine: none at a context that a format is calibrated at.

Calibration takes contexts, batches and query tokens of powers of two. Each format gets most
of one design, each a different part of it, so that every size is met by several formats.
"""

from collections.abc import Iterator

from calibrate.kernel_cases import KernelCase
from twin.engines.twin import INLINE, QUANTISED

FORMATS = ("bf16", "fp16", *QUANTISED)
DESIGN = (
    (6_145, 1, 1), (98_306, 3, 6), (24_576, 6, 2), (196_608, 1, 12), (49_153, 12, 1),
    (6_145, 12, 12), (98_306, 1, 1), (24_576, 1, 32), (196_608, 6, 1), (49_153, 3, 2),
    (6_145, 3, 6), (98_306, 12, 2), (24_576, 3, 1), (196_608, 3, 32), (49_153, 6, 12),
)  # fmt: skip
"""Context, batch, query tokens."""

OF_A_FORMAT = 11
QUICK_OF_A_FORMAT = 4
STEP = 4
"""By how many places the part of one format lies behind that of the one before."""

CPU_DESIGN = ((1_537, 1, 1), (769, 3, 2), (3_073, 1, 1), (1_537, 2, 3))
CPU_HEADS = "8x2x64"


def format_grid(*, quick: bool, device: str) -> list[KernelCase]:
    """Cases of all formats, for a GPU or for the CPU (smaller), quick or whole."""
    return list(_cases(quick=quick, device=device))


def _cases(*, quick: bool, device: str) -> Iterator[KernelCase]:
    kept = [(name, False) for name in FORMATS] + [(name, True) for name in INLINE]
    for number, (name, inline) in enumerate(kept):
        for ctx, batch, rows in _part(number, quick=quick, device=device):
            yield KernelCase(
                metric="decode_format",
                tier="vram",
                ctx_tokens=ctx,
                layers=1,
                rows=rows,
                format=name,
                inline=inline,
                batch=batch,
                heads=CPU_HEADS if device == "cpu" else "",
            )


def _part(number: int, *, quick: bool, device: str) -> list[tuple[int, int, int]]:
    if device == "cpu":
        return list(CPU_DESIGN[: 2 if quick else 4])
    first = number * STEP
    count = QUICK_OF_A_FORMAT if quick else OF_A_FORMAT
    return [DESIGN[(first + place) % len(DESIGN)] for place in range(count)]
