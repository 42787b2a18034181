"""Links between devices: sums and gathers over all ranks, copies between two, and layers that ranks share.

A command of its own, one process a device: `python -m calibrate.machine.collectives -o links.json`. It needs torch
alone. What is checked comes before what is timed: sums against float64, copies and gathers bit by bit, a shared layer
against the whole one. Points of the two roles, `fit` and `held_out`, are disjoint. NVLink multicast stays off.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from realkernels.shape import DenseShape
from realkernels.timed.library import DenseLayers, LayerWeights

SCHEMA = "twin.collectives/1"
KIB, MIB = 2**10, 2**20
SETTINGS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Of every process: multicast may put a host's devices out of service for those who share it."""
START_S = 120  # for all ranks to find each other, and for any one collective
SPIN_CYCLES = 400_000  # that a device waits before a timed run, so that all of it is queued by then: 0.2 ms

Role = Literal["fit", "held_out"]
Sizes = dict[Role, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is timed, and how often."""

    reduced: Sizes  # bytes of a message
    gathered: Sizes  # bytes of what every rank has in the end
    copied: Sizes
    steps: dict[Role, tuple[tuple[int, int, int], ...]]  # (sequences, new tokens of each, tokens before them)
    shape: DenseShape = field(default_factory=DenseShape)
    layers: int = 4
    repeats: int = 21
    most_calls: int = 20  # in one timed run


GPU_GRID = Grid(
    reduced={
        "fit": tuple(8 * KIB * 2**power for power in range(14)),
        "held_out": tuple(12 * KIB * 4**power for power in range(7)),
    },
    gathered={
        "fit": tuple(64 * KIB * 4**power for power in range(6)),
        "held_out": (384 * KIB, 6 * MIB, 24 * MIB),
    },
    copied={"fit": (64 * KIB, MIB, 16 * MIB, 256 * MIB), "held_out": (256 * KIB, 4 * MIB, 64 * MIB)},
    steps={
        "fit": ((1, 1, 8191), (64, 1, 1023), (8, 1, 16383)),
        "held_out": (
            (1, 1, 1535), (1, 1, 12287), (1, 1, 65535), (6, 1, 6143), (24, 1, 3071), (96, 1, 1535), (1, 768, 0),
            (1, 3072, 4096),
        ),
    },
)  # fmt: skip
CPU_GRID = Grid(
    reduced={"fit": (4 * KIB, 64 * KIB), "held_out": (16 * KIB,)},
    gathered={"fit": (4 * KIB,), "held_out": (16 * KIB,)},
    copied={"fit": (), "held_out": ()},
    steps={"fit": ((1, 1, 31),), "held_out": ((2, 1, 15), (1, 8, 0))},
    shape=DenseShape(hidden=64, query_heads=8, kv_heads=4, head_dim=16, intermediate=128),
    layers=2,
    repeats=3,
    most_calls=2,
)
"""A trial of the command where there is no device: nothing about links."""


class WrongData(RuntimeError):
    """A collective or a shared layer gave something else than it should: its time is worth nothing."""


class Ranks:
    """One process among all: its device, how it waits for the others, how it times and what has been found so far."""

    def __init__(self, rank: int, count: int, grid: Grid, output: Path) -> None:
        self.rank, self.count, self.grid, self.output = rank, count, grid, output
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_S))
        """For words between processes: no kernel waits on a device meanwhile."""
        self.started = time.monotonic()
        self.samples: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}

    def meet(self) -> None:
        """Wait for every rank, with no kernel in flight."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.talk)

    def worst(self, value: float) -> float:
        """The largest over all ranks."""
        values: list[float] = [0.0] * self.count
        dist.all_gather_object(values, value, group=self.talk)
        return max(values)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Of each repeat that of the rank that took longest."""
        ranks: list[list[float]] = [[]] * self.count
        dist.all_gather_object(ranks, seconds, group=self.talk)
        return [max(repeat) for repeat in zip(*ranks, strict=True)]

    def seconds(
        self, work: Callable[[], object], *, calls: int, before: Callable[[], object], graph: bool
    ) -> list[float]:
        """Seconds of a call, of each repeat: all ranks begin together; `before` comes before a repeat, untimed."""
        for _ in range(2):
            before()
            work()
        self.meet()
        run = self._captured(work) if graph and self.cuda else work
        taken = []
        for _ in range(self.grid.repeats):
            before()
            self.meet()
            taken.append(self._once(run) / calls)
        del run
        return self.slowest(taken)

    def _captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """All of it as one launch."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the library's watchdog asks meanwhile
            work()
        replay: Callable[[], object] = graph.replay
        replay()
        self.meet()
        return replay

    def _once(self, run: Callable[[], object]) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)  # nothing public holds a stream for a while
        dist.all_reduce(torch.zeros(1, device=self.device))  # all ranks are past their wait
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def keep(
        self, operation: str, implementation: str, role: Role, at: dict[str, int], seconds: list[float], **more: Any
    ) -> None:
        """A sample, written at once, so that an interruption loses none."""
        sample = {"operation": operation, "implementation": implementation, "role": role, "at": at}
        self.samples.append({**sample, **more, "median_s": statistics.median(seconds), "seconds": seconds})
        if self.rank == 0:
            took = f"{self.samples[-1]['median_s'] * 1e6:.2f} us"
            sys.stderr.write(f"{operation} {implementation} {role} {at} {took}\n")

    def write(self, *, whole: bool) -> None:
        """What has been found so far, of rank 0, into the file."""
        if self.rank:
            return
        found = {
            **described(self.count, cuda=self.cuda),
            "whole": whole,
            "took_s": time.monotonic() - self.started,
            "skipped": self.skipped,
            "samples": self.samples,
        }
        beside = self.output.with_name(self.output.name + ".part")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        beside.replace(self.output)

    def attempt(self, name: str, probe: Callable[["Ranks"], None]) -> None:
        """A probe; what this machine or its software cannot do is skipped, in one line. WrongData goes on."""
        self.meet()
        try:
            probe(self)
        except (RuntimeError, AttributeError, ImportError, NotImplementedError, TypeError) as refused:
            if isinstance(refused, WrongData):
                raise
            self.skipped[name] = str(refused).splitlines()[0][:300]
        self.write(whole=False)


def described(count: int, *, cuda: bool) -> dict[str, Any]:
    """The machine, its links and all settings that a collective depends on."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    prefixes = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "CUDA_VISIBLE", "CUDA_DEVICE_MAX_CONNECTIONS")
    reach = (
        [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
        if cuda
        else []
    )
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "ranks": count,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)]
        if cuda
        else [platform.processor()] * count,
        "backend": "nccl" if cuda else "gloo",
        "nccl": nccl,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "peer_access": reach,
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)},
        "topology": _told("topo", "-m") if cuda else "",
        "nvlink": _told("nvlink", "--status", "-i", "0") if cuda else "",
        "driver": _told("--query-gpu=driver_version,name,clocks.max.sm,power.limit", "--format=csv") if cuda else "",
    }


def _told(*words: str) -> str:
    """What nvidia-smi says, or why nothing."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return "no nvidia-smi"
    try:
        return subprocess.run([path, *words], capture_output=True, text=True, timeout=20, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as wrong:
        return str(wrong)


def by_role(sizes: dict[Role, tuple[Any, ...]]) -> Iterator[tuple[Role, Any]]:
    """Every point with its role."""
    for role, points in sizes.items():
        for point in points:
            yield role, point


# Sums over all ranks


def all_reduce(ranks: Ranks, *, graph: bool) -> None:
    """Sums of 16-bit elements, one call after the other: launched each, or all in one graph."""
    if graph and not ranks.cuda:
        raise NotImplementedError("no graphs without a device")
    name = ("nccl_graph" if graph else "nccl") if ranks.cuda else "gloo"
    for role, size in by_role(ranks.grid.reduced):
        _time_sum(ranks, role, size, implementation=name, reduce=dist.all_reduce, graph=graph)


def _time_sum(
    ranks: Ranks, role: Role, size: int, *, implementation: str, reduce: Callable[[torch.Tensor], object], graph: bool,
    tensor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Check one sum, then time many."""
    elements = size // ranks.dtype.itemsize
    total = torch.empty(elements, dtype=ranks.dtype, device=ranks.device) if tensor is None else tensor[:elements]
    own = torch.empty_like(total).normal_(generator=_dice(ranks, seed=ranks.rank))
    total.copy_(own)
    ranks.meet()
    reduce(total)
    error = ranks.worst(_sum_error(ranks, total, own))
    if error > 1e-2:
        raise WrongData(f"a sum of {size} B by {implementation} is off by {error:.2g}")
    calls = ranks.grid.most_calls if size <= 4 * MIB else max(1, ranks.grid.most_calls // 4)
    many = partial(_often, partial(reduce, total), calls)  # sums of sums: 16-bit exponents hold 120 doublings
    seconds = ranks.seconds(many, calls=calls, before=lambda: total.copy_(own), graph=graph)
    ranks.keep("all_reduce", implementation, role, {"bytes": size}, seconds, calls=calls, error=error)


def _dice(ranks: Ranks, *, seed: int) -> torch.Generator:
    return torch.Generator(device=ranks.device).manual_seed(seed)


def _sum_error(ranks: Ranks, total: torch.Tensor, own: torch.Tensor) -> float:
    """Relative, of the result against the sum in float64 of what all ranks drew."""
    truth = torch.zeros(own.numel(), dtype=torch.float64, device=ranks.device)
    for rank in range(ranks.count):
        truth += torch.empty_like(own).normal_(generator=_dice(ranks, seed=rank)).double()
    return float((total.double() - truth).norm() / truth.norm())


def one_sided(ranks: Ranks) -> None:
    """Sums by kernels that read the other ranks' memory, as serving engines' own do for short messages."""
    if not ranks.cuda:
        raise NotImplementedError("no device whose memory others may read")
    import torch.distributed._symmetric_memory as shared  # noqa: PLC0415 - younger than the oldest torch here

    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no group")
    shared.enable_symm_mem_for_group(group.group_name)
    most = 4 * MIB
    buffer = shared.empty(most // ranks.dtype.itemsize, dtype=ranks.dtype, device=ranks.device)
    shared.rendezvous(buffer, group.group_name)
    operations = torch.ops.symm_mem

    def one_shot(total: torch.Tensor) -> None:
        total.copy_(operations.one_shot_all_reduce(total, "sum", group.group_name))

    def two_shot(total: torch.Tensor) -> None:
        operations.two_shot_all_reduce_(total, "sum", group.group_name)

    for name, reduce in (("one_shot", one_shot), ("two_shot", two_shot)):
        for role, size in by_role(ranks.grid.reduced):
            if size <= most:
                _time_sum(ranks, role, size, implementation=f"{name}_graph", reduce=reduce, graph=True, tensor=buffer)


# Gathers and copies


def all_gather(ranks: Ranks) -> None:
    """Every rank's share to every rank, as logits of a divided vocabulary are."""
    for role, size in by_role(ranks.grid.gathered):
        elements = size // ranks.dtype.itemsize // ranks.count
        own = torch.full((elements,), ranks.rank + 1, dtype=ranks.dtype, device=ranks.device)
        whole = torch.zeros(elements * ranks.count, dtype=ranks.dtype, device=ranks.device)
        gather = partial(dist.all_gather_into_tensor, whole, own)
        gather()
        wanted = torch.arange(1, ranks.count + 1, dtype=ranks.dtype, device=ranks.device).repeat_interleave(elements)
        if ranks.worst(float(not torch.equal(whole, wanted))):
            raise WrongData(f"a gather of {size} B is not what the ranks gave")
        calls = max(1, ranks.grid.most_calls // 4)
        many = partial(_often, gather, calls)
        for graph in (False, True) if ranks.cuda else (False,):
            seconds = ranks.seconds(many, calls=calls, before=own.clone, graph=graph)
            name = ("nccl_graph" if graph else "nccl") if ranks.cuda else "gloo"
            ranks.keep("all_gather", name, role, {"bytes": size}, seconds, calls=calls, error=0.0)


def _often(work: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        work()


def peer_copies(ranks: Ranks) -> None:
    """Copies between the first two devices by their copy engines, one way and both ways at once."""
    if not ranks.cuda:
        raise NotImplementedError("no two devices")
    if ranks.rank == 0:
        for role, size in by_role(ranks.grid.copied):
            first, second = (
                torch.randint(0, 256, (size,), dtype=torch.uint8, device=f"cuda:{index}") for index in (0, 1)
            )
            back, forth = torch.empty_like(first), torch.empty_like(second)
            ways = {"forth": [(forth, first)], "back": [(back, second)], "both": [(forth, first), (back, second)]}
            for name, pairs in ways.items():
                seconds = _copies(ranks, pairs)
                if not all(torch.equal(target.cpu(), source.cpu()) for target, source in pairs):
                    raise WrongData(f"a copy of {size} B {name} is not equal")
                ranks.keep("peer_copy", name, role, {"bytes": size}, seconds, calls=1, error=0.0)
    ranks.meet()


def _copies(ranks: Ranks, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Seconds from when both devices are idle until all copies are done, by the host's clock."""
    streams = [torch.cuda.Stream(device=source.device) for _, source in pairs]
    taken = []
    for repeat in range(ranks.grid.repeats + 2):
        for index in (0, 1):
            torch.cuda.synchronize(index)
        begin = time.perf_counter()
        for (target, source), stream in zip(pairs, streams, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        if repeat >= 2:
            taken.append(time.perf_counter() - begin)
    return taken


# Layers that all ranks share


def shared_weights(whole: LayerWeights, shape: DenseShape, rank: int, count: int) -> LayerWeights:
    """What a rank has of a layer: its heads' rows of queries, keys and values, its intermediates; norms whole."""

    def rows(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.chunk(count, dim=0)[rank]

    queries, keys, values = whole.qkv.split([shape.query_width, shape.kv_width, shape.kv_width])
    gate, up = whole.gate_up.chunk(2)
    return whole._replace(
        qkv=torch.cat([rows(queries), rows(keys), rows(values)]),
        output=whole.output.chunk(count, dim=1)[rank].contiguous(),
        gate_up=torch.cat([rows(gate), rows(up)]),
        down=whole.down.chunk(count, dim=1)[rank].contiguous(),
    )


def shared_layers(ranks: Ranks) -> None:
    """Whole layers on each device alone, then the same shared by all ranks with two sums a layer."""
    for role, (batch, q_tokens, past_tokens) in by_role(ranks.grid.steps):
        at = {"batch": batch, "q_tokens": q_tokens, "past_tokens": past_tokens, "layers": ranks.grid.layers}
        sizes = {"layers": ranks.grid.layers, "batch": batch, "q_tokens": q_tokens, "past_tokens": past_tokens}
        torch.manual_seed(0)  # the same whole layers on every rank
        given = {**sizes, "dtype": ranks.dtype, "device": ranks.device}
        whole = DenseLayers(ranks.grid.shape, **given)
        part = DenseLayers(ranks.grid.shape.shared_by(ranks.count), **given, reduce=dist.all_reduce)
        error = ranks.worst(_share(ranks, whole, part))
        if error > 3e-2:
            raise WrongData(f"layers shared by {ranks.count} ranks are off by {error:.2g} at {at}")
        kept = [
            (layers, layers.activations.residual.clone(), layers.activations.branch.clone()) for layers in (whole, part)
        ]
        for ranks_of, (layers, residual, branch) in zip((1, ranks.count), kept, strict=True):

            def before(layers: DenseLayers = layers, residual: Any = residual, branch: Any = branch) -> None:
                layers.activations.residual.copy_(residual)
                layers.activations.branch.copy_(branch)

            seconds = ranks.seconds(layers.run, calls=ranks.grid.layers, before=before, graph=True)
            ranks.keep("layer", f"tp{ranks_of}", role, at, seconds, calls=ranks.grid.layers, error=error)
        del whole, part, kept, before, layers, residual, branch


def _share(ranks: Ranks, whole: DenseLayers, part: DenseLayers) -> float:
    """Give `part` this rank's share of weights and caches; error of its result beside that of the whole."""
    shape, heads = ranks.grid.shape, part.shape.kv_heads
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    part.weights = [shared_weights(each, shape, ranks.rank, ranks.count) for each in whole.weights]
    part.caches = [cache[:, :, :, own].contiguous() for cache in whole.caches]
    for name in ("residual", "branch"):
        getattr(part.activations, name).copy_(getattr(whole.activations, name))
    whole.run()
    part.run()
    found, truth = part.activations.branch.double(), whole.activations.branch.double()
    return float((found - truth).norm() / truth.norm())


PROBES: dict[str, Callable[[Ranks], None]] = {
    "all_reduce": partial(all_reduce, graph=False),
    "all_reduce_graph": partial(all_reduce, graph=True),
    "shared_layers": shared_layers,
    "all_gather": all_gather,
    "peer_copies": peer_copies,
    "one_sided": one_sided,
}


def _process(rank: int, count: int, port: int, grid: Grid, output: Path) -> None:
    """One rank, from meeting the others until the file is whole."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=count, timeout=timedelta(seconds=START_S))
    ranks = Ranks(rank, count, grid, output)
    for name, probe in PROBES.items():
        ranks.attempt(name, probe)
    ranks.write(whole=True)
    ranks.meet()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def measure(output: Path, *, ranks: int | None = None, grid: Grid | None = None) -> None:
    """Time collectives over all devices (without any over two processes of this one) and write the samples."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = ranks or devices or 2
    if devices and count > devices:
        raise SystemExit(f"{count} ranks need as many devices, there are {devices}")
    if count < 2:
        raise SystemExit("one device has no other to talk to")
    given = (count, _free_port(), grid or (GPU_GRID if devices else CPU_GRID), output)
    mp.start_processes(_process, args=given, nprocs=count, start_method="spawn")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m calibrate.machine.collectives", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, help="so many of the devices [default: all]")
    asked = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    measure(asked.output, ranks=asked.ranks)


if __name__ == "__main__":
    main()
