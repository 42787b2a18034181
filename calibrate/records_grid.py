"""Which gathers over records in host memory validate a machine: none at a context that calibration takes.

Calibration takes powers of two. Ends of blocks differ, so that open tails of every length are met.
"""

from calibrate.kernel_cases import KernelCase
from twin.engines.twin import INTERLEAVED

CONTEXTS = (6_145, 49_154, 196_608, 786_435)
CPU_CONTEXTS = (6_145, 24_578, 98_304)
QUICK = 2
LAYERS, CPU_LAYERS = 12, 2


def records_grid(*, quick: bool, device: str) -> list[KernelCase]:
    """Cases of all formats in records, for a GPU or for the CPU (smaller), quick or whole."""
    contexts, layers = (CPU_CONTEXTS, CPU_LAYERS) if device == "cpu" else (CONTEXTS, LAYERS)
    return [
        KernelCase(metric="decode_gather", tier="host", ctx_tokens=ctx, layers=layers, format=name)
        for name in INTERLEAVED
        for ctx in (contexts[:QUICK] if quick else contexts)
    ]
