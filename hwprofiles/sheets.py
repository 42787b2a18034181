"""The short form of a machine: what a data sheet says of a device, filled up to a whole profile.

Peaks are the sheet's. What a device reaches of them nobody measured there, so it is assumed: the shares below, each
with the pairs of measured and promised figures that it comes from. No kernel has a rate on such a machine: memory is
answered and speeds are not, until a measurement or a file of one's own brings them.
"""

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, ValidationError, convert

from hwprofiles.files import Table
from hwprofiles.links import PCIE, PEER_LATENCIES, PEER_SHARES, link_bytes_per_s, peer_kind
from hwprofiles.rates import Efficiency, IsoDate, Positive

GIB, GB, GHZ, TERA = 2.0**30, 1e9, 1e9, 1e12


class Share(NamedTuple):
    """What a device reaches of a peak where nobody measured it."""

    value: float
    spread: float
    because: str


REACHED = {
    "vram": Share(0.9, 0.05, "835 of 936 GB/s on an RTX 3090, 4.36 to 4.65 of 4.8 TB/s on an H200"),
    "tensor": Share(0.7, 0.2, "63 of 71.2 TFLOP/s on an RTX 3090 held at 250 W, 774 and 807 of 989 on an H200; less on "
                              "cards that their power limit slows down"),
    "link": Share(0.85, 0.05, "26.5 of 31.5 GB/s on an RTX 3090, 53.7 of 63 GB/s on an H200"),
    "instructions": Share(0.9, 0.1, "7.24 of 8.92 Top/s on an RTX 3090 held at 250 W, 16.65 of 16.73 on an H200"),
}  # fmt: skip
"""By roof; a sheet's `reached` sets others, also by operand type."""

KEPT_SHARE = Share(0.98, 0.01, "the driver keeps the rest: 23.64 of 24 GiB are left on an RTX 4090, 31.37 of 32 GiB on "
                               "an RTX 5090, 15.48 of 16 GiB on an RTX 5080, as torch reports them")  # fmt: skip
"""Of the memory as it is sold, where no usable figure is published."""
PUBLISHED_SPREAD = 0.005  # of a usable figure that is published: drivers differ by some hundred MiB

REQUESTS_PER_S = 42e6
"""Random runs a second over a link, whatever their length: 40 to 45 million on an H200, beyond 1 GiB of region."""
RUN_BYTES = (64, 128, 256, 512, 1024, 2048, 4096)
LINK_LATENCY_S, LINK_LATENCY_SPREAD = 9e-6, 0.8  # 3.8 us measured on an H200, 20 us carried to an RTX 3090: between

LANES_OF_AN_SM = {7: 64, 8: 64, 9: 64, 10: 64, 12: 128}
"""32-bit integer operations that a multiprocessor begins each clock, by major compute capability."""

HOST_GIB, HOST_SPREAD = 64.0, 0.5
RESERVED_GIB, RESERVED_SPREAD = 4.0, 0.5
DRAM_BYTES_PER_S, DRAM_SHARE = 89.6 * GB, 0.7  # two channels of DDR5-5600
DISK_BYTES_PER_S, DISK_PEAK = 3.0 * GB, 7.0 * GB
NOBODYS = "a default: the sheet is of a card and names no host"

PIN_BITS_PER_S = (0.4 * GB, 64 * GB)
"""What one data pin of a memory may carry: HBM2 has 1.75 Gbit/s, GDDR7 28."""


class Sheet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a data sheet says of one device; numbers in the units that sheets are written in."""

    device: str  # as its driver calls it
    compute_capability: Annotated[str, Meta(pattern=r"\A\d+\.\d+\Z")]  # 0.0: a CPU, 0.1: a device without CUDA
    multiprocessors: Annotated[int, Meta(ge=1, le=2**20)]  # compute units, cores of a GPU, or logical cores of a CPU
    memory_gib: Positive  # as it is sold; with `unified` the host's memory, too
    memory_gb_per_s: Positive
    tensor_tflops: dict[str, Positive]  # dense, by operand type
    link: str = ""  # to the host, such as "PCIe 4.0 x16"; none where memory is unified
    peer: str = (
        ""  # to another such device, such as "NVLink 4", or "PCIe": its link to the host; none: through the host
    )
    peer_gb_per_s: Positive | None = None  # of it, one direction, all lanes; not of PCIe, which has the link's own
    sources: Annotated[tuple[str, ...], Meta(min_length=1)]
    date: IsoDate
    memory_bits: Annotated[int, Meta(ge=32, le=2**16)] | None = (
        None  # width of the memory's bus: the rate is held to it
    )
    usable_gib: Positive | None = None  # published, in place of an assumed share
    clock_ghz: Positive | None = None  # boost
    reached: dict[str, Efficiency] = {}  # other shares than REACHED, by roof or operand type
    unified: bool = False
    host_gib: Positive | None = None
    reserved_gib: Positive | None = None

    def __post_init__(self) -> None:
        if self.unified == bool(self.link):
            raise ValueError("a device has a link, or with 'unified' the host's memory and none")
        if self.link:
            link_bytes_per_s(self.link)
        known = {*REACHED, "peer", *self.tensor_tflops}
        if unknown := sorted(set(self.reached) - known):
            raise ValueError(f"reached: {unknown[0]!r} is none of {', '.join(sorted(known))}")
        if self.peer and (peer_kind(self.peer) == PCIE) == (self.peer_gb_per_s is not None):
            raise ValueError(f"peer_gb_per_s: needed of any peer but PCIe, whose rate is the link's, not {self.peer!r}")
        if self.usable_gib is not None and self.usable_gib > self.memory_gib:
            raise ValueError(f"usable_gib: {self.usable_gib:g} is above memory_gib, {self.memory_gib:g}")
        if self.memory_bits is not None:
            low, high = PIN_BITS_PER_S
            pin = self.memory_gb_per_s * GB * 8 / self.memory_bits
            if not low <= pin <= high:
                raise ValueError(f"memory_gb_per_s: {pin / GB:.3g} Gbit/s over each of {self.memory_bits} bits")


class _Short(Struct, frozen=True):
    datasheet: Sheet


def expanded(raw: Table) -> Table:
    """What a short file's `datasheet` stands for: devices and host. Raises ValidationError."""
    sheet = convert(raw, _Short).datasheet
    try:
        return {"gpu_count": 1, "gpu": _gpu(sheet), "host": _host(sheet)}
    except ValueError as wrong:
        raise ValidationError(f"{wrong} - at `$.datasheet`") from None


def _said(sheet: Sheet, more: str = "") -> str:
    return "; ".join((*((more,) if more else ()), *sheet.sources))


def _rate(sheet: Sheet, value: float, unit: str, *, spread: float = 0.0, note: str) -> Table:
    known = {"spread": spread, "n": 1, "source": "datasheet", "date": sheet.date, "note": note}
    return {"value": value, "unit": unit, **known}


def _roof(
    sheet: Sheet, kind: str, peak: float, unit: str, *, key: str = "", what: str = "", share: Share | None = None
) -> Table:
    """A peak, and the share of it that is assumed to be reached; `key`: the operand type."""
    share = share or REACHED[kind]
    own = sheet.reached.get(key, sheet.reached.get(kind))
    because = f"told by the sheet: {own:g}" if own is not None else f"assumed, {share.value:g}: {share.because}"
    rate = _rate(sheet, peak * (own or share.value), unit, spread=share.spread, note=f"share of the peak {because}")
    return {"rate": rate, "datasheet": _rate(sheet, peak, unit, note=_said(sheet, what))}


def _gpu(sheet: Sheet) -> Table:
    clock = {"instructions": roof} if (roof := _instructions(sheet)) else {}
    tensor = {
        dtype: _roof(sheet, "tensor", tflops * TERA, "FLOP/s", key=dtype)
        for dtype, tflops in sheet.tensor_tflops.items()
    }
    both = _unified_link(sheet) if sheet.unified else _link(sheet)
    return {
        "name": sheet.device,
        "compute_capability": sheet.compute_capability,
        "sm_count": sheet.multiprocessors,
        "vram": _memory(sheet),
        "vram_read": _roof(sheet, "vram", sheet.memory_gb_per_s * GB, "B/s", what=_width(sheet)),
        "tensor": tensor,
        "h2d": both,
        "d2h": both,
        "link": sheet.link,
        "unified_memory": sheet.unified,
        **(_peer(sheet) if sheet.peer else {}),
        **clock,
    }


def _width(sheet: Sheet) -> str:
    return f"{sheet.memory_bits} bit" if sheet.memory_bits else ""


def _memory(sheet: Sheet) -> Table:
    if sheet.usable_gib is None and sheet.unified:  # what the system keeps is the host's `reserved`
        return _rate(sheet, sheet.memory_gib * GIB, "B", note=_said(sheet, "all of it; the system's part is reserved"))
    if sheet.usable_gib is not None:
        return _rate(sheet, sheet.usable_gib * GIB, "B", spread=PUBLISHED_SPREAD, note=_said(sheet, "usable"))
    note = f"{KEPT_SHARE.value:g} of {sheet.memory_gib:g} GiB: {KEPT_SHARE.because}"
    return _rate(sheet, sheet.memory_gib * GIB * KEPT_SHARE.value, "B", spread=KEPT_SHARE.spread, note=note)


def _instructions(sheet: Sheet) -> Table | None:
    lanes = LANES_OF_AN_SM.get(int(sheet.compute_capability.partition(".")[0]))
    if sheet.clock_ghz is None or lanes is None:
        return None
    what = f"{sheet.multiprocessors} multiprocessors x {lanes} lanes x {sheet.clock_ghz:g} GHz"
    peak = sheet.multiprocessors * lanes * sheet.clock_ghz * GHZ
    return _roof(sheet, "instructions", peak, "op/s", what=what)


def _link(sheet: Sheet) -> Table:
    roof = _roof(sheet, "link", link_bytes_per_s(sheet.link), "B/s", what=sheet.link)
    return roof | _runs(sheet, roof["rate"]["value"])


def _unified_link(sheet: Sheet) -> Table:
    """A copy inside one memory reads and writes it: half its rate."""
    roof = _roof(sheet, "vram", sheet.memory_gb_per_s * GB / 2, "B/s", what="a copy reads and writes the one memory")
    return roof | _runs(sheet, roof["rate"]["value"])


def _peer(sheet: Sheet) -> Table:
    """The link between two such devices, and what it is called."""
    kind = peer_kind(sheet.peer)
    name = f"PCIe peer to peer, {sheet.link}" if kind == PCIE else sheet.peer
    peak = link_bytes_per_s(sheet.link) if sheet.peer_gb_per_s is None else sheet.peer_gb_per_s * GB
    roof = _roof(sheet, "peer", peak, "B/s", share=Share(*PEER_SHARES[kind]), what=name)
    assumed = PEER_LATENCIES[kind]
    latency = _rate(sheet, assumed.value, "s", spread=assumed.spread, note=assumed.because)
    whole = {"spread": 0.0, "n": 1, "source": "datasheet", "date": sheet.date, "note": "messages are one run each"}
    return {
        "peer": {
            **roof,
            "latency": latency,
            "run_length": {"over": "run_bytes", "at": [1], "efficiency": [1], **whole},
        },
        "peer_link": name,
    }


def _runs(sheet: Sheet, bytes_per_s: float) -> Table:
    """Latency of a copy, and the share of the rate by the length of runs: so many requests a second."""
    latency = "one copy of a queue: 3.8 us measured on an H200, 20 us taken for an RTX 3090"
    shares = [min(1.0, REQUESTS_PER_S * run / bytes_per_s) for run in RUN_BYTES]
    known = {"spread": 0.2, "n": 1, "source": "datasheet", "date": sheet.date}
    note = f"{REQUESTS_PER_S:.3g} random runs a second, as measured on an H200"
    curve = {"over": "run_bytes", "at": list(RUN_BYTES), "efficiency": shares, **known, "note": note}
    return {
        "latency": _rate(sheet, LINK_LATENCY_S, "s", spread=LINK_LATENCY_SPREAD, note=latency),
        "run_length": curve,
    }


def _host(sheet: Sheet) -> Table:
    """The host that a sheet names, or a default that says so."""
    memory_gib = sheet.memory_gib if sheet.unified else sheet.host_gib
    told = memory_gib is not None
    note = _said(sheet, "installed") if told else f"{HOST_GIB:g} GiB: {NOBODYS}; --ram sets another"
    memory = _rate(sheet, (memory_gib or HOST_GIB) * GIB, "B", spread=0.0 if told else HOST_SPREAD, note=note)
    kept = "operating system, drivers and the engine's process: an allowance, not a measurement"
    if sheet.reserved_gib is not None:
        kept = _said(sheet, "what the system leaves to nobody")
    reserved = _rate(sheet, (sheet.reserved_gib or RESERVED_GIB) * GIB, "B", spread=RESERVED_SPREAD, note=kept)
    return {"memory": memory, "reserved": reserved, "dram": _dram(sheet), "disk": _disk(sheet)}


def _curve(sheet: Sheet, at: list[int], efficiency: list[float], note: str) -> Table:
    known = {"spread": 0.3, "n": 1, "source": "datasheet", "date": sheet.date, "note": note}
    return {"over": "run_bytes", "at": at, "efficiency": efficiency, **known}


def _dram(sheet: Sheet) -> Table:
    peak, what = DRAM_BYTES_PER_S, f"two channels of DDR5-5600: {NOBODYS}"
    if sheet.unified:
        peak, what = sheet.memory_gb_per_s * GB, "the one memory"
    rate = _rate(sheet, peak * DRAM_SHARE, "B/s", spread=0.3, note=f"{DRAM_SHARE:g} of the peak, assumed")
    return {
        "rate": rate,
        "datasheet": _rate(sheet, peak, "B/s", note=what),
        "latency": _rate(sheet, 1e-7, "s", spread=0.5, note="one random access, assumed"),
        "run_length": _curve(sheet, [64, 4096], [0.25, 1.0], "one 64-byte line opens a row of several KiB"),
    }


def _disk(sheet: Sheet) -> Table:
    note = f"an NVMe disk on PCIe 4.0 x4: {NOBODYS}"
    return {
        "rate": _rate(sheet, DISK_BYTES_PER_S, "B/s", spread=0.5, note=note),
        "datasheet": _rate(sheet, DISK_PEAK, "B/s", note=note),
        "latency": _rate(sheet, 1e-4, "s", spread=0.5, note="one random 4 KiB read of such a disk"),
        "run_length": _curve(
            sheet, [4096, 131072], [0.7, 1.0], "random 4 KiB reads at a deep queue against sequential"
        ),
    }
