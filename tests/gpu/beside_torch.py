"""Decode attention over every cache format beside torch's own over bf16, a call of each by turns.

Run as `python tests/gpu/beside_torch.py report.json`. 24 query heads, 4 KV heads x 256, 131,072 tokens a sequence.
By turns, because kernels are closer to one another than the clocks of one minute are to those of the next.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.probes.formats import KEPT, TOLERANCE

from realkernels.caches.paged import NoKernel
from realkernels.device import open_device
from realkernels.timed.attend_decode import AttendDecode

CTX, QUERY_HEADS, KV_HEADS, HEAD_DIM = 131_072, 24, 4, 256
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""`math` is left out: it writes every score and a copy of the cache for each query head."""

WARM_TURNS, TURNS = 3, 30
Row = dict[str, Any]


def of_torch(batch: int, q_tokens: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Over caches in one piece; unmasked, which costs what a mask of the last tokens does."""

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device).transpose(1, 2)

    query, keys, values = random(q_tokens, QUERY_HEADS), random(CTX, KV_HEADS), random(CTX, KV_HEADS)

    def work(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    for name, backend in BACKENDS.items():
        yield name, lambda backend=backend: work(backend)


def turns(device: Any, batch: int, q_tokens: int, name: str, arrangement: Any) -> Iterator[Row]:
    """Medians of a format's kernel and of torch's, or why there is none."""
    place: Row = {"format": name, "arrangement": arrangement, "batch": batch, "q_tokens": q_tokens}
    try:
        own = AttendDecode(
            name, arrangement=arrangement, batch=batch, ctx_tokens=CTX, q_tokens=q_tokens, caches=1,
            device=device.device,
        )  # fmt: skip
    except NoKernel as missing:
        yield place | {"skipped": str(missing)}
        return
    graphs, samples = {name: device.capture(own.run)}, dict[str, list[float]]()
    for other, work in of_torch(batch, q_tokens, device.device):
        try:
            graphs[other] = device.capture(work)
        except RuntimeError as refused:  # that back end does not take this
            yield place | {"kernel": other, "skipped": str(refused).splitlines()[0][:120]}
    own.poison()
    for _ in range(WARM_TURNS + TURNS):
        for kernel, graph in graphs.items():
            samples.setdefault(kernel, []).extend(device.seconds(graph, repeats=1, warm_up=0))
    right = own.error() < TOLERANCE
    for kernel, seconds in samples.items():
        yield place | {"kernel": kernel, "seconds": statistics.median(seconds[WARM_TURNS:]), "right": right}


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path)
    asked = parser.parse_args()
    device, rows = open_device("cuda"), []
    for batch in (1, 8):
        for q_tokens in (1, 8):
            for name, arrangement in KEPT:
                for row in turns(device, batch, q_tokens, name, arrangement):
                    rows.append(row)
                    print(row, flush=True)
                torch.cuda.empty_cache()
    if asked.report is not None:
        asked.report.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(not all(row.get("right", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
