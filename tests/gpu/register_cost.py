"""Knows what registering host memory with CUDA costs: bytes of memory on each GPU, seconds in, seconds out.

Run as `python register_cost.py [report.json]` on a Linux machine with idle NVIDIA GPUs and 80 GiB of free host memory;
`--help` tells how to choose other cases. Every visible GPU gets a CUDA context, and the first one registers. Free
memory is a figure of the whole device, so anything else that runs on a GPU spoils the reading. Every case runs in its
own process, so that page tables a driver keeps after one case cannot make the next look cheap.
"""

import argparse
import ctypes
import itertools
import json
import mmap
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypedDict

import torch

Pages = Literal["4KiB", "huge"]
Flags = Literal["default", "mapped", "portable+mapped"]

GIB = 1024**3
REGION_BYTES = (8 * GIB, 24 * GIB, 64 * GIB)
PAGES: tuple[Pages, ...] = ("4KiB", "huge")
ADVICE: dict[Pages, int] = {"4KiB": mmap.MADV_NOHUGEPAGE, "huge": mmap.MADV_HUGEPAGE}

REGISTER: dict[Flags, int] = {"default": 0, "mapped": 0x02, "portable+mapped": 0x01 | 0x02}
REGISTERING_GPU = 0
TOUCH_THREADS = 8
THP_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Case(TypedDict):
    """What one registration cost; the `vram` figures hold one number per visible GPU, in device order.

    `anon_huge_bytes` says how much of the region the kernel did back by huge pages.
    """

    region_bytes: int
    pages: Pages
    flags: Flags
    anon_huge_bytes: int
    vram_cost_bytes: list[int]
    vram_kept_bytes: list[int]
    touch_s: float
    register_s: float
    unregister_s: float


def create_contexts() -> None:
    """Make a CUDA context exist on every visible GPU, so that its own memory is gone before the first reading."""
    for gpu in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{gpu}")
        torch.cuda.synchronize(gpu)
    torch.cuda.set_device(REGISTERING_GPU)


def free_vram() -> list[int]:
    """Bytes of memory that the driver calls free on each visible GPU once all work has finished."""
    free = []
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)
        free.append(int(torch.cuda.mem_get_info(gpu)[0]))
    return free


def taken(before: list[int], after: list[int]) -> list[int]:
    """Bytes that became used on each GPU between two readings of `free_vram`."""
    return [earlier - later for earlier, later in zip(before, after, strict=True)]


def anon_huge_bytes() -> int:
    """Bytes of this process that the kernel backs by transparent huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def mapped_region(size: int, pages: Pages) -> Iterator[int]:
    """Address of a private anonymous mapping that was advised but not yet touched; unmapped at the end."""
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(ADVICE[pages])
        yield address_of(region)
    finally:
        region.close()


def address_of(region: mmap.mmap) -> int:
    """Address of a mapping; the view that tells it is dropped at once, because it would keep the mapping open."""
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def touch(address: int, size: int) -> None:
    """Write every byte of a region, a slice per thread (memset runs without the interpreter lock)."""
    step = size // TOUCH_THREADS
    with ThreadPoolExecutor(TOUCH_THREADS) as pool:
        list(pool.map(lambda index: ctypes.memset(address + index * step, 1, step), range(TOUCH_THREADS)))


def register(address: int, size: int, flags: Flags) -> None:
    """Pin a region, with the GPU current that `create_contexts` left current."""
    check(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER[flags]))


def unregister(address: int) -> None:
    """Undo `register`."""
    check(torch.cuda.cudart().cudaHostUnregister(address))


def check(code: object) -> None:
    """Raise unless a CUDA runtime call answered success."""
    torch.cuda.check_error(int(code))  # type: ignore[call-overload]


def seconds(action: Callable[[], None]) -> float:
    """Wall-clock seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(size: int, pages: Pages, flags: Flags) -> Case:
    """Cost of registering one region of touched memory."""
    create_contexts()
    with mapped_region(size, pages) as address:
        huge_before = anon_huge_bytes()
        touch_s = seconds(lambda: touch(address, size))
        huge = anon_huge_bytes() - huge_before
        before = free_vram()
        register_s = seconds(lambda: register(address, size, flags))
        try:
            cost = taken(before, free_vram())
        finally:
            unregister_s = seconds(lambda: unregister(address))
        kept = taken(before, free_vram())
    return Case(
        region_bytes=size, pages=pages, flags=flags, anon_huge_bytes=huge, vram_cost_bytes=cost, vram_kept_bytes=kept,
        touch_s=touch_s, register_s=register_s, unregister_s=unregister_s,
    )  # fmt: skip


def measure_alone(size: int, pages: Pages, flags: Flags) -> Case:
    """`measure` in a process of its own; forked, so this process must never have used CUDA."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, size, pages, flags).result()


def nvidia_smi(field: str) -> str:
    """One field about the first GPU, asked outside this process so that no CUDA context is made here."""
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    query = [program, f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str]) -> None:
    """Measure every case, smallest region first, and keep the report on disk up to date after each."""
    parser = argparse.ArgumentParser(description="Measure what registering host memory with CUDA costs.")
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--region-bytes", type=int, nargs="+", default=REGION_BYTES)
    parser.add_argument("--pages", choices=PAGES, nargs="+", default=PAGES)
    parser.add_argument("--flags", choices=tuple(REGISTER), nargs="+", default=("portable+mapped",))
    chosen = parser.parse_args(arguments)
    cases: list[Case] = []
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": nvidia_smi("name"),
        "driver": nvidia_smi("driver_version"),
        "torch": torch.__version__,
        "transparent_hugepage": THP_MODE.read_text(encoding="ascii").strip() if THP_MODE.exists() else "unknown",
        "cases": cases,
    }
    for size, pages, flags in itertools.product(sorted(chosen.region_bytes), chosen.pages, chosen.flags):
        cases.append(measure_alone(size, pages, flags))
        sys.stderr.write(f"{json.dumps(cases[-1])}\n")
        if chosen.report:
            chosen.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
