"""How long one op takes on one machine: latency + the slowest of its roofs, over the kernel's efficiency."""

from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from hwprofiles.ladder import LATENCIES, MANY, Borrowed, Ladder, Rung, borrowed, shipped_ladder
from hwprofiles.links import PEER_STEPS
from hwprofiles.profile import RESIDENT_PROGRAMS, HardwareProfile, Kernel, Link
from hwprofiles.rates import Counts, Curve, Provenance
from twin.errors import MissingRate
from twin.operations.occupancy import RESIDENT, FlashGrid
from twin.operations.ops import PEER, Engine, Op

WALLS = {"vram": "VRAM bandwidth", "tensor": "tensor cores", "h2d": "host link (H2D)", "d2h": "host link (D2H)"}
WALLS |= {
    "peer": "link between devices",
    "decode": "dequantisation",
    "dram": "host DRAM",
    "disk": "disk",
    "latency": "launch and link latency",
}
"""What can hold an op, by key."""

ATTENTION_OPS = ("attend_sparse/", "attend_dense/", "score/")
"""Operations whose efficiency is a share of the tensor roof alone: instructions around their products hold them."""

MOSTLY_PRODUCTS = 2
"""Operations an element over those of the narrowest thread block, from which on most belong to products of its rows."""

WIDER = {"bf16": ("fp16", "fp32"), "fp16": ("fp32",), "fp32": ()}
"""What products are computed in on a device without their operand type; 8 and 4 bits: in 16."""

KERNEL_RATES = ("efficiency", "latency", "combine", "operations")
VRAM_RATES: tuple[str, ...] = ("vram",)


class Cost(NamedTuple):
    """Seconds of one op (all its calls), and which rates they depend on."""

    seconds: float
    latency_s: float
    bound_s: float  # seconds beyond the latency
    sol_s: float  # speed of light: the same bytes and operations at the calibrated roofs, no latency, efficiency 1
    floor_s: float  # the same at the datasheet's peaks: no machine of this kind can be faster
    wall: str  # key in WALLS of the roof that sets bound_s
    bound_rates: tuple[str, ...]
    latency_rates: tuple[str, ...]
    is_borrowed: bool = False  # whether its kernel was not measured on this machine


class _Rungs(NamedTuple):
    """Names of what more a borrowed kernel hangs on: spreads of its rung, off with all that stands on it."""

    bound: tuple[str, ...] = ()
    products: tuple[str, ...] = ()  # where products hold it
    latency: tuple[str, ...] = ()


NO_RUNGS = _Rungs()


class _KernelRates(NamedTuple):
    """A kernel's rates with their names, ready to be charged."""

    efficiency: Curve | None
    efficiency_rates: tuple[str, ...]
    latency_s: float
    latency_rates: tuple[str, ...]
    of_attention: bool
    operations: Counts | None = None  # operations that an element costs; None: free, or inside the efficiency
    operations_rates: tuple[str, ...] = ()
    combine: float = 0.0  # share of the memory's rate for partial results; 0: combining is inside the latency
    rungs: _Rungs = NO_RUNGS


NO_KERNEL = _KernelRates(efficiency=None, efficiency_rates=(), latency_s=0.0, latency_rates=(), of_attention=False)


class _Bound(NamedTuple):
    """What holds an op, before its kernel's efficiency."""

    wall: str
    seconds: float
    rates: tuple[str, ...]
    sol_s: float
    floor_s: float


class Roofs:
    """A machine's rates, ready to be asked; `cost` is the one place where counts become seconds."""

    def __init__(self, profile: HardwareProfile, *, strict: bool = True, ladder: Ladder | None = None) -> None:
        """strict: whether a kernel that was not measured on this machine is refused, not borrowed from `ladder`.

        ladder: where rates are borrowed from, the shipped one unless given.
        """
        self.profile, self.strict, self.ladder = profile, strict, ladder
        self.rates: dict[str, Provenance] = {}
        self.rungs: dict[str, Rung] = {}  # of the rates of borrowed kernels, by name; all others are measured
        self.extrapolated: set[str] = set()
        gpu, host = profile.gpu, profile.host
        self._links: dict[Engine, tuple[str, Link]] = {
            Engine.H2D: ("h2d", gpu.h2d),
            Engine.D2H: ("d2h", gpu.d2h),
            Engine.HOST: ("dram", host.dram),
            Engine.DISK: ("disk", host.disk),
            Engine.PEER: ("peer", gpu.between),
        }
        self._vram = (gpu.vram_read.rate.value, gpu.vram_read.datasheet.value)
        self._tensor = {name: (roof.rate.value, roof.datasheet.value) for name, roof in gpu.tensor.items()}
        self._instructions = gpu.instructions.rate.value if gpu.instructions else None
        self._kernels: dict[str, _KernelRates] = {}
        # a plain copy or read has the latency of its link
        self._plain_of = {
            engine: NO_KERNEL._replace(latency_s=link.latency.value, latency_rates=(f"{name}.latency",))
            for engine, (name, link) in self._links.items()
        }
        self.rates["vram"] = gpu.vram_read.rate
        self.rates |= {f"tensor.{name}": roof.rate for name, roof in gpu.tensor.items()}
        if gpu.instructions is not None:
            self.rates["instructions"] = gpu.instructions.rate
        for name, link in self._links.values():
            self.rates |= {name: link.rate, f"{name}.latency": link.latency, f"{name}.run_length": link.run_length}
        self.rates |= {
            f"{key}#{name}": rate
            for key, kernel in profile.kernels.items()
            for name in KERNEL_RATES
            if (rate := getattr(kernel, name)) is not None
        }

    def kernel(self, key: str) -> _KernelRates:
        """Rates of the kernel `key`, looked up once; MissingRate where it has none, nor any to borrow."""
        if key not in self._kernels:
            self._kernels[key] = self._looked_up(key)
        return self._kernels[key]

    def _looked_up(self, key: str) -> _KernelRates:
        kernel, rungs = self.profile.kernels.get(key), NO_RUNGS
        if kernel is None:
            found = None if self.strict else borrowed(self.profile, key, self.ladder)
            if found is None:
                raise MissingRate(f"machine {self.profile.name} has no rate for {key}", hint=self._alike(key))
            kernel, rungs = self._taken(key, found)
        efficiency, latency, combine, operations = (
            (f"{key}#{name}",) if getattr(kernel, name) is not None else () for name in KERNEL_RATES
        )
        return _KernelRates(
            efficiency=kernel.efficiency,
            efficiency_rates=efficiency,
            latency_s=kernel.latency.value if kernel.latency is not None else 0.0,
            latency_rates=(*latency, *combine, *rungs.latency),
            of_attention=key.startswith(ATTENTION_OPS),
            operations=kernel.operations,
            operations_rates=("instructions", *operations),
            combine=kernel.combine.value if kernel.combine is not None else 0.0,
            rungs=rungs,
        )

    def _taken(self, key: str, found: Borrowed) -> tuple[Kernel, _Rungs]:
        """A borrowed kernel with its rates entered, and the spreads of its rung that they hang on beside their own.

        A device whose instructions nobody counted is taken to issue as many as its kernels need.
        """
        kernel = found.kernel
        if kernel.operations is not None and self._instructions is None:
            kernel = replace(kernel, operations=None)
            self.extrapolated.add(f"{key} without a rate of instructions")
        for name in KERNEL_RATES:
            if (rate := getattr(kernel, name)) is not None:
                self.rates[f"{key}#{name}"] = rate
                self.rungs[f"{key}#{name}"] = found.rung
        if not found.spreads:
            return kernel, NO_RUNGS
        of = {f"{found.rung} {group}": group for group in (found.group, f"{found.group}{MANY}", LATENCIES)}
        for name, group in of.items():
            self.rates[name], self.rungs[name] = found.spreads.get(group, found.spreads[found.group]), found.rung
        return kernel, _Rungs(*((name,) for name in of))

    @property
    def whole_spread(self) -> float:
        """Of whole steps whose kernels were all borrowed, beside their rates' own; of others it is a share."""
        return (self.ladder or shipped_ladder()).whole.spread if self.rungs else 0.0

    def has(self, key: str) -> bool:
        """Whether the kernel `key` has rates here, its own or borrowed ones."""
        return key in self.profile.kernels or (not self.strict and borrowed(self.profile, key, self.ladder) is not None)

    def _alike(self, key: str) -> str:
        """What the profile has of the same operation."""
        operation = key.split("/", maxsplit=1)[0]
        alike = [known for known in sorted(self.profile.kernels) if known.split("/", maxsplit=1)[0] == operation]
        return f"it has {', '.join(alike)}" if alike else f"it has none of {operation}; twin profiles lists its rates"

    def cost(self, op: Op) -> Cost:
        """Seconds of all calls of `op`: on each call a latency, then the slowest roof over the kernel's efficiency.

        A split-KV kernel fills the device by whole rounds of thread blocks. The operations that each element costs them
        (dequantisation, softmax, products) run beside the reads: a roof of its own, which no efficiency lowers, and
        which is no part of the speed of light or the floor, since another kernel may need fewer. Partial results are
        written and combined after it, which counts as latency.
        The efficiency of ATTENTION_OPS is a share of the tensor roof alone: their bytes stream beside the products. Any
        other efficiency lowers every roof.
        """
        op = self._as_run_here(op)
        kernel = self.kernel(op.kernel) if op.kernel else self._plain_of.get(op.engine, NO_KERNEL)
        efficiency = self._efficiency(op, kernel.efficiency) if kernel.efficiency is not None else 1.0
        bound = self._slowest_roof(op, efficiency if kernel.of_attention else 1.0)
        wall, bound_s, rates = bound.wall, bound.seconds, bound.rates
        if op.row_tile and kernel.efficiency is not None:
            bound_s = self._in_order(op, kernel.efficiency)
        elif not kernel.of_attention:
            bound_s /= efficiency
        if bound_s and (wall == "tensor" or not kernel.of_attention):
            rungs = kernel.rungs.products if wall == "tensor" else kernel.rungs.bound
            rates = self._with_efficiency(rates, op, kernel) + rungs
        latency_s = kernel.latency_s * (1 + PEER_STEPS[self.profile.gpu.peer_kind] * op.hops)
        if op.flash_grid is not None and kernel.combine:
            latency_s += op.flash_grid.on(self.profile.gpu.sm_count).combined_bytes / (self._vram[0] * kernel.combine)
        if op.split_kv is not None and (kernel.operations is not None or kernel.combine):
            occupancy = op.split_kv.on(self.profile.gpu.sm_count)
            if kernel.combine:
                latency_s += occupancy.combined_bytes / (self._vram[0] * kernel.combine)
            if kernel.operations is not None:
                each = self._read(op.kernel, kernel.operations, op.split_kv.q_rows)
                work_s = occupancy.elements * each / self._instructions_per_s()
                if work_s > bound_s:
                    dequantising = op.dequantised_elements and each < MOSTLY_PRODUCTS * kernel.operations.counts[0]
                    wall, bound_s = "decode" if dequantising else "tensor", work_s
                    rates = kernel.operations_rates
        calls = op.calls
        times = ((latency_s + bound_s) * calls, latency_s * calls, bound_s * calls)
        return Cost(
            *times, bound.sol_s * calls, bound.floor_s * calls, wall, rates, kernel.latency_rates,
            is_borrowed=bool(op.kernel) and op.kernel not in self.profile.kernels,
        )  # fmt: skip

    def _as_run_here(self, op: Op) -> Op:
        """The op with its kernel's whole name; as a plain copy where it may be one and this machine lacks the rates."""
        if op.engine is Engine.PEER:
            op = replace(op, kernel=op.kernel.replace(f"/{PEER}", f"/{self.profile.gpu.peer_kind}"))
        if op.or_plain:
            return replace(op, run_bytes=0) if op.kernel in self.profile.kernels else replace(op, kernel="")
        return op

    def products_floor_s(self, op: Op) -> float:
        """Seconds of the products of all calls at the tensor cores' datasheet peak."""
        return op.flops * op.calls / self._tensor_rate(op.dtype)[1] if op.flops else 0.0

    def _slowest_roof(self, op: Op, of_tensor: float) -> _Bound:
        """The slowest of bytes, products and link; products at `of_tensor` of their roof."""
        wall, bound_s, rates = "vram", op.vram_bytes / self._vram[0], VRAM_RATES
        sol_s, floor_s = bound_s, op.vram_bytes / self._vram[1]
        if op.flops:
            operands = self._operands(op.dtype)
            rate, peak = self._tensor[operands]
            sol_s, floor_s = max(sol_s, op.flops / rate), max(floor_s, op.flops / peak)
            if op.flops / (rate * of_tensor) > bound_s:
                wall, bound_s, rates = "tensor", op.flops / (rate * of_tensor), (f"tensor.{operands}",)
        moved = op.link_bytes + op.host_bytes
        if moved:
            # a kernel that reads host memory holds the SMs and pulls over H2D
            name, link = self._links[Engine.H2D if op.engine is Engine.SM else op.engine]
            share = link.run_length(op.run_bytes) if op.run_bytes else 1.0
            if op.run_bytes and op.run_bytes < link.run_length.at[0]:
                self.extrapolated.add(f"{name} at runs of {op.run_bytes:g} B")
            rate, peak = link.rate.value, link.datasheet.value
            sol_s, floor_s = max(sol_s, moved / rate), max(floor_s, moved / peak)
            if moved / (rate * share) > bound_s:
                wall, bound_s = name, moved / (rate * share)
                rates = (name, f"{name}.run_length") if share < 1 else (name,)
        return _Bound(wall, bound_s, rates, sol_s, floor_s)

    def _in_order(self, op: Op, curve: Curve) -> float:
        """Seconds of products with the same weights, in the order of their tokens.

        Efficiency is interpolated between the tokens that it was calibrated at, roofs are not: inside a tile, or where
        bytes bound, they stay while efficiency rises. So a tile takes as long as its first token, and between two
        calibrated sizes nothing is quicker than the smaller or, where these are in order, slower than the larger.
        """
        below, above = curve.around(op.grain)
        first = (op.grain - 1) // op.row_tile * op.row_tile + 1
        smaller_s, larger_s = self._products_s(op, curve, below), self._products_s(op, curve, above)
        seconds = max(self._products_s(op, curve, op.grain), self._products_s(op, curve, first))
        if below <= op.grain:
            seconds = max(seconds, smaller_s)
        if above >= op.grain and larger_s >= smaller_s:
            seconds = min(seconds, larger_s)
        return seconds

    def _products_s(self, op: Op, curve: Curve, tokens: float) -> float:
        """Seconds of the same products of another number of tokens, at the efficiency of that many."""
        tiles = -(-tokens // op.row_tile) / -(-op.grain // op.row_tile)
        roof_s = max(op.vram_bytes / self._vram[0], op.flops * tiles / self._tensor_rate(op.dtype)[0])
        return roof_s / curve(tokens)

    def _with_efficiency(self, roofs: tuple[str, ...], op: Op, kernel: _KernelRates) -> tuple[str, ...]:
        """What an op hangs on: the roof and the kernel's share of it, or both as one where they were measured so."""
        curve = kernel.efficiency
        spread = curve.spread_with_roof(op.grain) if curve is not None else None
        if curve is None or spread is None:
            return roofs + kernel.efficiency_rates
        name = f"{op.kernel}#efficiency with its roof, {100 * spread:.2g} %"  # places known alike err together
        self.rates[name] = replace(curve, spread=spread, spreads=UNSET)
        if (rung := self.rungs.get(f"{op.kernel}#efficiency")) is not None:
            self.rungs[name] = rung
        return (name,)

    def _efficiency(self, op: Op, curve: Curve) -> float:
        if curve.over == RESIDENT_PROGRAMS and op.flash_grid is not None:
            return self._in_waves(op.kernel, op.flash_grid, curve)
        return self._read(op.kernel, curve, op.grain)

    def _read(self, key: str, curve: Curve | Counts, at: float) -> float:
        if not curve.covers(at):
            self.extrapolated.add(f"{key} at {at:g} {curve.over}")
        return curve(at)

    def _in_waves(self, key: str, grid: FlashGrid, curve: Curve) -> float:
        """Of the whole device: each wave lasts as long as the thread blocks of its fullest multiprocessor."""
        multiprocessors = self.profile.gpu.sm_count
        waves = grid.on(multiprocessors)
        lasting = waves.full * RESIDENT / self._read(key, curve, RESIDENT) if waves.full else 0.0
        lasting += waves.alone / self._read(key, curve, 1) if waves.alone else 0.0
        return waves.thread_blocks / multiprocessors / lasting

    def _instructions_per_s(self) -> float:
        if self._instructions is None:
            raise MissingRate(f"machine {self.profile.name} has no rate of instructions, which decoding needs")
        return self._instructions

    def _tensor_rate(self, dtype: str) -> tuple[float, float]:
        """Rate and peak of products of that operand type."""
        return self._tensor[self._operands(dtype)]

    def _operands(self, dtype: str) -> str:
        """The operand type; where a device has none, the next wider that it has, in which engines compute then."""
        wider = () if self.strict else WIDER.get(dtype, ("fp16", "bf16", "fp32"))
        for name in (dtype, *wider):
            if name in self._tensor:
                return name
        raise MissingRate(f"machine {self.profile.name} has no {dtype} tensor rate")
