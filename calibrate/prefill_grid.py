"""Which prefill chunks over cache formats validate a machine: none of a context or rows that calibration takes.

Calibration takes 64, 192, 512 and 2,048 rows and, on 132 multiprocessors, 1,472, behind 0, 16,384, 32,768 and 65,536
tokens. Each format gets some of one design, each a different part of it.
"""

from collections.abc import Iterator

from calibrate.format_grid import CPU_HEADS, FORMATS
from calibrate.kernel_cases import KernelCase

DESIGN = ((24_576, 768), (98_304, 1_536), (49_153, 3_072), (12_290, 1_536), (98_306, 768), (36_865, 3_072))
"""Context, the chunk's rows included, and rows."""

OF_A_FORMAT = 3
QUICK_OF_A_FORMAT = 1
STEP = 2
"""By how many places the part of one format lies behind that of the one before."""

CPU_DESIGN = ((1_537, 96), (3_073, 48))


def prefill_grid(*, quick: bool, device: str) -> list[KernelCase]:
    """Cases of all formats in their default arrangement, for a GPU or for the CPU (smaller), quick or whole."""
    return list(_cases(quick=quick, device=device))


def _cases(*, quick: bool, device: str) -> Iterator[KernelCase]:
    for number, name in enumerate(FORMATS):
        for ctx, rows in _part(number, quick=quick, device=device):
            yield KernelCase(
                metric="prefill_format",
                tier="vram",
                ctx_tokens=ctx,
                layers=1,
                rows=rows,
                format=name,
                heads=CPU_HEADS if device == "cpu" else "",
            )


def _part(number: int, *, quick: bool, device: str) -> list[tuple[int, int]]:
    if device == "cpu":
        return list(CPU_DESIGN[: 1 if quick else 2])
    count = QUICK_OF_A_FORMAT if quick else OF_A_FORMAT
    return [DESIGN[(number * STEP + place) % len(DESIGN)] for place in range(count)]
