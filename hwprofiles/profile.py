"""The schema of a machine: its devices, links, host and kernel rates, checked when it is read."""

import re
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr, replace

from hwprofiles.links import FULL_LANES, PCIE, PEER_LATENCIES, PEER_SHARES, THROUGH_HOST, peer_kind, share_of
from hwprofiles.rates import Counts, Curve, Rate, Unit

SCHEMA = "twin.hardware/1"
CPU_CAPABILITY = "0.0"  # what the profile of a CPU has for a compute capability

_OVER_CTX = ("scan", "select", "score", "gather_vram", "gather_host", "gather_host_4k", "gather_rows_host")
KERNEL_AXES = {
    **dict.fromkeys(("linear", "experts", "recurrent", "append", "dequantise", "sample", "elementwise"), "tokens"),
    **dict.fromkeys(_OVER_CTX, "ctx_tokens"),
    **dict.fromkeys(("attend_dense", "combine"), "rows"),
    **dict.fromkeys(("all_reduce", "all_gather"), "message_bytes"),
    "attend_decode": "query_tokens",
    "attend_sparse": "region_tokens",
}
"""What a kernel's efficiency depends on: tokens of the pass or of context, rows, or tokens that one call may read."""

RESIDENT_PROGRAMS = "resident_programs"  # thread blocks that a multiprocessor holds in each wave of a call
OTHER_AXES = {"attend_dense": (RESIDENT_PROGRAMS,)}  # what it may depend on instead
Allowed = tuple[Unit, float, float]  # unit, lowest, highest: wide for any machine, too narrow for GB/s written as B/s

_VRAM_BYTES_PER_S: Allowed = ("B/s", 1e9, 1e14)
_LINK_BYTES_PER_S: Allowed = ("B/s", 1e8, 1e12)
_PEER_BYTES_PER_S: Allowed = ("B/s", 1e8, 1e13)
_OP_PER_S: Allowed = ("op/s", 1e9, 1e16)
_OPS_AN_ELEMENT = ("operations an element", 1e-3, 1e4)
_COMBINE: Allowed = ("1", 1e-3, 1e3)
_FLOP_PER_S: Allowed = ("FLOP/s", 1e10, 1e17)
LEAST_LATENCY_S = 1e-8
_LATENCY_S: Allowed = ("s", LEAST_LATENCY_S, 1.0)
_CAPACITY_BYTES: Allowed = ("B", 2.0**28, 2.0**50)


class Roof(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A calibrated rate under the datasheet peak that bounds it."""

    rate: Rate
    datasheet: Rate

    def check(self, path: str, allowed: Allowed) -> None:
        """Raise ValueError where a unit or range is wrong or the rate beats its datasheet."""
        _check(self.rate, f"{path}.rate", allowed)
        _check(self.datasheet, f"{path}.datasheet", allowed)
        rate, peak = self.rate.value, self.datasheet.value
        if rate > peak:
            raise ValueError(f"{path}: the rate {rate:g} is above its datasheet peak {peak:g} {self.datasheet.unit}")


class Link(Roof, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One direction between two memories: seconds = latency + bytes / (rate x efficiency of the run length)."""

    latency: Rate
    run_length: Curve

    def check(self, path: str, allowed: Allowed = _LINK_BYTES_PER_S) -> None:
        """The same of a link."""
        super().check(path, allowed)
        _check(self.latency, f"{path}.latency", _LATENCY_S)
        _check_axis(self.run_length, f"{path}.run_length", "run_bytes")

    def narrowed(self, share: float) -> "Link":
        """The same link at a share of its rate."""
        rate, peak = (replace(each, value=each.value * share) for each in (self.rate, self.datasheet))
        return replace(self, rate=rate, datasheet=peak)


WHOLE_RUNS = Curve(
    over="run_bytes", at=(1.0,), efficiency=(1.0,), spread=0.0, n=1, source="datasheet", date="2026-12-01",
    note="messages between devices are one run each",
)  # fmt: skip


def _through_host(slower: Link) -> Link:
    """What a sum over devices reaches whose messages go to the host's memory and back."""
    share, latency = PEER_SHARES[THROUGH_HOST], PEER_LATENCIES[THROUGH_HOST]
    known: dict[str, Any] = {"n": 1, "source": "published", "date": WHOLE_RUNS.date, "fitted_on": ()}
    rate = replace(slower.rate, value=slower.rate.value * share.value, spread=share.spread, note=share.because, **known)
    wait = replace(slower.latency, value=latency.value, spread=latency.spread, note=latency.because, **known)
    return replace(slower, rate=rate, latency=wait, run_length=WHOLE_RUNS)


class Gpu(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device with a memory of its own and its links to the host."""

    name: str
    compute_capability: Annotated[str, Meta(pattern=r"\A\d+\.\d+\Z")]
    sm_count: Annotated[int, Meta(ge=1, le=2**20)]
    vram: Rate  # usable bytes
    vram_read: Roof
    tensor: dict[str, Roof]  # FLOP/s of dense matrix products, by operand type
    h2d: Link
    d2h: Link
    instructions: Roof | None = None  # integer and logic operations a second, which dequantising is made of
    unified_memory: bool = False  # whether `vram` is of the host's memory itself: an APU, a superchip, a CPU
    link: str = ""  # what `h2d` and `d2h` are, such as "PCIe 4.0 x16"; empty where nobody says
    peer: Link | None = None  # one direction to another such device; None: through the host's memory
    peer_link: str = ""  # what `peer` is, such as "NVLink 4"

    @property
    def peer_kind(self) -> str:
        """Of the link between devices, as kernels' names have it: nvlink, xgmi, pcie, or host where there is none."""
        return peer_kind(self.peer_link) if self.peer is not None else THROUGH_HOST

    @property
    def between(self) -> Link:
        """That link; without one of its own messages go to the host's memory and back, at the slower one's rate."""
        if self.peer is not None:
            return self.peer
        return _through_host(min(self.h2d, self.d2h, key=lambda link: link.rate.value))

    @property
    def runs_cuda(self) -> bool:
        """Whether CUDA kernels start there at all: a CPU has 0.0, a device of another maker 0.1."""
        return not self.compute_capability.startswith("0.")

    @property
    def shares_memory(self) -> bool:
        """Whether what lies on the device and on the host takes from one memory; a CPU need not say so."""
        return self.unified_memory or self.compute_capability == CPU_CAPABILITY

    def check(self, path: str) -> None:
        """Raise ValueError naming the key that is out of range."""
        _check(self.vram, f"{path}.vram", _CAPACITY_BYTES)
        if self.instructions is not None:
            self.instructions.check(f"{path}.instructions", _OP_PER_S)
        self.vram_read.check(f"{path}.vram_read", _VRAM_BYTES_PER_S)
        for dtype, roof in self.tensor.items():
            roof.check(f"{path}.tensor.{dtype}", _FLOP_PER_S)
        self.h2d.check(f"{path}.h2d")
        self.d2h.check(f"{path}.d2h")
        if self.peer is not None:
            self.peer.check(f"{path}.peer", _PEER_BYTES_PER_S)
            peer_kind(self.peer_link)


class Host(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory and disk behind the links."""

    memory: Rate  # installed bytes
    reserved: Rate  # bytes that the operating system and the engine's process keep
    dram: Link
    disk: Link

    @property
    def is_assumed(self) -> bool:
        """Whether nobody named this host: what a data sheet of a card leaves open."""
        return self.memory.source == "datasheet" and self.memory.spread > 0

    def check(self, path: str) -> None:
        """Raise ValueError naming the key that is out of range."""
        _check(self.memory, f"{path}.memory", _CAPACITY_BYTES)
        _check(self.reserved, f"{path}.reserved", ("B", 1.0, self.memory.value))
        self.dram.check(f"{path}.dram")
        self.disk.check(f"{path}.disk")


class Kernel(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one implementation makes of the roof above it: an efficiency curve, a latency per call, or both."""

    efficiency: Curve | None = None  # over the quantity that KERNEL_AXES names for the operation
    latency: Rate | None = None
    combine: Rate | None = None  # share of the memory's rate at which splits' partial results are written and read
    operations: Counts | None = None
    """Operations, of `Gpu.instructions`, that each stored element costs a program, over the query rows it holds."""
    machine: str = ""  # where it was measured: filled when a profile is read, empty for a kernel that was just fitted

    def __post_init__(self) -> None:
        if self.efficiency is None and self.latency is None:
            raise ValueError("a kernel needs an efficiency, a latency or both")

    @property
    def is_fitted(self) -> bool:
        """Whether recorded figures set it, not a calibration's samples."""
        rates = (self.efficiency, self.latency, self.combine, self.operations)
        return any(rate is not None and rate.source == "fitted" for rate in rates)

    def check(self, key: str) -> None:
        """Raise ValueError where the kernel's name, an axis or a range is wrong."""
        path, (operation, *named) = f"$.kernels.{key}", key.split("/")
        if len(named) != 2 or not all((operation, *named)):
            raise ValueError(f"{path}: a kernel is named operation/implementation/format")
        if self.efficiency is not None:
            axes = (KERNEL_AXES.get(operation, "tokens"), *OTHER_AXES.get(operation, ()))
            _check_axis(self.efficiency, f"{path}.efficiency", *axes)
        if self.operations is not None:
            _check_axis(self.operations, f"{path}.operations", "program_rows")
            for count in self.operations.counts:
                _check_range(count, f"{path}.operations", _OPS_AN_ELEMENT)
        if self.combine is not None:
            _check(self.combine, f"{path}.combine", _COMBINE)
        if self.latency is not None:
            _check(self.latency, f"{path}.latency", _LATENCY_S)


Split = int | tuple[float, ...]
"""How layers are split over devices: evenly over so many, or by the memory of each."""


class HardwareProfile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a prediction may ask of a machine. Devices are alike, each with its own links, unless named."""

    schema: str
    name: str
    summary: str
    gpu_count: Annotated[int, Meta(ge=1, le=1024)]
    gpu: Gpu
    host: Host
    devices: tuple["HardwareProfile", ...] = ()
    """A machine of one device each, where they are of several kinds; `gpu` and `host` are the first one's."""
    kernels: dict[str, Kernel] = field(default_factory=dict)  # by `<operation>/<implementation>/<format>`

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA!r}, not {self.schema!r}")
        self.gpu.check("$.gpu")
        self.host.check("$.host")
        self._check_one_memory()
        for key, kernel in self.kernels.items():
            kernel.check(key)

    def gpu_of(self, device: int) -> Gpu:
        """The device of that number."""
        return self.devices[device].gpu if self.devices else self.gpu

    def stages(self, ranks: int) -> Split:
        """How layers are split, each of them over so many ranks."""
        if self.devices:
            return tuple(each.gpu.vram.value for each in self.devices)
        return max(1, self.gpu_count // ranks)

    def _check_alike(self, option: str) -> None:
        if self.devices:
            raise ValueError(f"its devices are of several kinds: {option} is of one kind")

    def _check_one_memory(self) -> None:
        if not self.gpu.unified_memory:
            return
        if self.gpu_count > 1:
            devices = f"{self.gpu_count} devices cannot each be the one memory of the host"
            raise ValueError(f"$.gpu.unified_memory: {devices}")
        device, host = self.gpu.vram.value, self.host.memory.value
        if device > host:
            more = f"$.gpu.vram: {device:.0f} B is more than $.host.memory, {host:.0f} B"
            raise ValueError(f"{more}: with unified_memory it is a part of that, or all of it")

    def with_link(self, lanes: int = FULL_LANES, generation: int | None = None) -> "HardwareProfile":
        """The same machine on a link of that width and generation: a what-if, so that no range is checked again.

        Raises ValueError for a link that is faster than the machine's own, and where there is none.
        """
        self._check_alike("--pcie")
        gpu = self.gpu
        if gpu.shares_memory and (generation is not None or lanes != FULL_LANES):
            raise ValueError("device and host have one memory and no link")
        share = share_of(gpu.link, gpu.h2d.datasheet.value, lanes=lanes, generation=generation)
        peer = gpu.peer.narrowed(share) if gpu.peer is not None and gpu.peer_kind == PCIE else gpu.peer
        return self._with_gpu(replace(gpu, h2d=gpu.h2d.narrowed(share), d2h=gpu.d2h.narrowed(share), peer=peer))

    @property
    def device_name(self) -> str:
        """What the machine is called with one of its devices, as kernels name it."""
        return self.name.partition("x-")[2] if re.match(r"\d+x-", self.name) else self.name

    def repeated(self, count: int) -> "HardwareProfile":
        """So many of its device, each on a link of its own. Raises ValueError where its memory is the host's."""
        self._check_alike("a number of devices")
        one = self.device_name
        name = f"{count}x-{one}" if count > 1 else one
        summary = self.summary if count == self.gpu_count else f"{count} x {one}: {self.summary}"
        return replace(self, name=name, summary=summary, gpu_count=count)

    def with_ram(self, memory_bytes: float) -> "HardwareProfile":
        """With other memory on the host; of a memory that is the device's, too, it has the same share as before."""
        gpu, host = self.gpu, self.host
        memory = _asked(host.memory, memory_bytes, "--ram")
        if gpu.shares_memory:
            vram = gpu.vram.value / host.memory.value * memory_bytes
            gpu = replace(gpu, vram=_asked(gpu.vram, vram, "--ram"))
        return replace(self, gpu=gpu, host=replace(host, memory=memory))

    def with_free_vram(self, free_bytes: float) -> "HardwareProfile":
        """With so much memory left on each device, as if it had no more. ValueError for more than there is."""
        self._check_alike("--vram-free")
        gpu = self.gpu
        if gpu.shares_memory:
            raise ValueError("device and host have one memory: --ram says how much")
        if free_bytes > gpu.vram.value:
            raise ValueError(f"a device has {gpu.vram.value:,.0f} B of VRAM, fewer than {free_bytes:,.0f} B")
        return replace(self, gpu=replace(gpu, vram=_asked(gpu.vram, free_bytes, "--vram-free")))

    def _with_gpu(self, gpu: Gpu) -> "HardwareProfile":
        """Another device, unchecked."""
        other = copy(self)
        force_setattr(other, "gpu", gpu)
        return other


def mixed(profiles: Sequence[HardwareProfile]) -> HardwareProfile:
    """One machine with the devices of several, on the first one's host; ValueError where a memory is a host's."""
    each = tuple(one for profile in profiles for one in [profile.repeated(1)] * profile.gpu_count)
    if len({one.name for one in each}) == 1:
        return each[0].repeated(len(each))
    shared = [one.name for one in each if one.gpu.shares_memory]
    if shared:
        raise ValueError(f"the memory of {shared[0]} is its host's")
    name = "+".join(profile.name for profile in profiles)
    summary = f"devices at the rates of their own machines, on the host of {each[0].name}"
    return replace(each[0], name=name, summary=summary, gpu_count=len(each), devices=each, kernels={})


def _asked(rate: Rate, value: float, option: str) -> Rate:
    """A number that a question sets in place of the machine's: known exactly."""
    return replace(rate, value=value, spread=0.0, source="published", fitted_on=(), note=f"as asked for by {option}")


def _check(rate: Rate, path: str, allowed: Allowed) -> None:
    if rate.unit != allowed[0]:
        raise ValueError(f"{path}: unit must be {allowed[0]!r}, not {rate.unit!r}")
    _check_range(rate.value, path, allowed)


def _check_range(value: float, path: str, allowed: tuple[str, float, float]) -> None:
    unit, low, high = allowed
    if not low <= value <= high:
        raise ValueError(f"{path}: {value:g} {unit} is outside the range of {low:g} to {high:g} {unit}")


def _check_axis(curve: Curve | Counts, path: str, *axes: str) -> None:
    if curve.over not in axes:
        raise ValueError(f"{path}: 'over' must be {' or '.join(repr(axis) for axis in axes)}, not {curve.over!r}")
