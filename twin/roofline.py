"""How long one op takes on one machine: latency + the slowest of its roofs, over the kernel's efficiency."""

from typing import NamedTuple

from hwprofiles.profile import HardwareProfile, Link
from hwprofiles.rates import Curve, Provenance
from twin.errors import MissingRate
from twin.ops import Engine, Op

WALLS = {"vram": "VRAM bandwidth", "tensor": "tensor cores", "h2d": "host link (H2D)", "d2h": "host link (D2H)"}
WALLS |= {"dram": "host DRAM", "disk": "disk", "latency": "launch and link latency"}


PRODUCTS = ("attend_sparse/", "attend_dense/", "score/")
"""Operations whose efficiency is a share of the tensor roof alone."""

VRAM_RATES: tuple[str, ...] = ("vram",)
NO_RATES: tuple[str, ...] = ()


class Cost(NamedTuple):
    """Seconds of one op (all its calls), and which rates they hang on."""

    seconds: float
    latency_s: float
    bound_s: float
    """Seconds beyond the latency."""
    sol_s: float
    """Speed of light: the same bytes and operations at the calibrated roofs, no latency, efficiency 1."""
    floor_s: float
    """The same at the datasheet's peaks: no machine of this kind can be faster."""
    wall: str
    """Key in WALLS of the roof that sets bound_s."""
    bound_rates: tuple[str, ...]
    latency_rates: tuple[str, ...]


class _KernelRates(NamedTuple):
    """A kernel's rates with their names, ready to be charged."""

    efficiency: Curve | None
    efficiency_rates: tuple[str, ...]
    latency_s: float
    latency_rates: tuple[str, ...]
    of_products: bool


class Roofs:
    """A machine's rates, ready to be asked; `cost` is the one place where counts become seconds."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.rates: dict[str, Provenance] = {}
        self.extrapolated: set[str] = set()
        gpu, host = profile.gpu, profile.host
        self._links: dict[Engine, tuple[str, Link]] = {
            Engine.H2D: ("h2d", gpu.h2d),
            Engine.D2H: ("d2h", gpu.d2h),
            Engine.HOST: ("dram", host.dram),
            Engine.DISK: ("disk", host.disk),
        }
        self._vram = (gpu.vram_read.rate.value, gpu.vram_read.datasheet.value)
        self._tensor = {name: (roof.rate.value, roof.datasheet.value) for name, roof in gpu.tensor.items()}
        self._kernels: dict[str, _KernelRates] = {}
        self._name_rates()

    def _name_rates(self) -> None:
        gpu = self.profile.gpu
        self.rates["vram"] = gpu.vram_read.rate
        self.rates |= {f"tensor.{name}": roof.rate for name, roof in gpu.tensor.items()}
        for name, link in self._links.values():
            self.rates |= {name: link.rate, f"{name}.latency": link.latency, f"{name}.run_length": link.run_length}
        for key, kernel in self.profile.kernels.items():
            if kernel.efficiency is not None:
                self.rates[f"{key}#efficiency"] = kernel.efficiency
            if kernel.latency is not None:
                self.rates[f"{key}#latency"] = kernel.latency

    def kernel(self, key: str) -> "_KernelRates":
        """Rates of the kernel `key`, looked up once; MissingRate where the profile has none."""
        if key not in self._kernels:
            self._kernels[key] = self._looked_up(key)
        return self._kernels[key]

    def _looked_up(self, key: str) -> "_KernelRates":
        kernel = self.profile.kernels.get(key)
        if kernel is None:
            raise MissingRate(
                f"machine {self.profile.name} has no rate for {key}",
                hint=f"it has {', '.join(sorted(self.profile.kernels)) or 'no kernel rates'}",
            )
        return _KernelRates(
            efficiency=kernel.efficiency,
            efficiency_rates=(f"{key}#efficiency",) if kernel.efficiency is not None else (),
            latency_s=kernel.latency.value if kernel.latency is not None else 0.0,
            latency_rates=(f"{key}#latency",) if kernel.latency is not None else (),
            of_products=key.startswith(PRODUCTS),
        )

    def cost(self, op: Op) -> Cost:
        """Seconds of all calls of `op`: on each call a latency, then the slowest roof over the kernel's efficiency.

        The efficiency of a kernel of products (PRODUCTS) is a share of the tensor roof alone: such a kernel is held by
        the instructions around its products, and its bytes stream beside them. Any other lowers every roof.
        """
        efficiency, efficiency_rates, of_products = 1.0, NO_RATES, False
        if op.kernel:
            kernel = self.kernel(op.kernel)
            efficiency_rates, of_products = kernel.efficiency_rates, kernel.of_products
            latency_s, latency_rates = kernel.latency_s, kernel.latency_rates
            if kernel.efficiency is not None:
                efficiency = self._efficiency(op, kernel.efficiency)
        else:
            latency_s, latency_rates = self._link_latency(op)
        wall, bound_s, rates = "vram", op.vram_bytes / self._vram[0], VRAM_RATES
        sol_s, floor_s = bound_s, op.vram_bytes / self._vram[1]
        if op.flops:
            rate, peak = self._tensor_rate(op.dtype)
            sol_s, floor_s = max(sol_s, op.flops / rate), max(floor_s, op.flops / peak)
            tensor_s = op.flops / (rate * efficiency if of_products else rate)
            if tensor_s > bound_s:
                wall, bound_s, rates = "tensor", tensor_s, (f"tensor.{op.dtype}",)
        moved = op.link_bytes + op.host_bytes
        if moved:
            name, link = self._link(op)
            share = link.run_length(op.run_bytes) if op.run_bytes else 1.0
            if op.run_bytes and op.run_bytes < link.run_length.at[0]:
                self.extrapolated.add(f"{name} at runs of {op.run_bytes:g} B")
            rate, peak = link.rate.value, link.datasheet.value
            sol_s, floor_s = max(sol_s, moved / rate), max(floor_s, moved / peak)
            if moved / (rate * share) > bound_s:
                wall, bound_s = name, moved / (rate * share)
                rates = (name, f"{name}.run_length") if share < 1 else (name,)
        if not of_products:
            bound_s /= efficiency
        if bound_s and (wall == "tensor" or not of_products):
            rates += efficiency_rates
        calls = op.calls
        return Cost(
            (latency_s + bound_s) * calls,
            latency_s * calls,
            bound_s * calls,
            sol_s * calls,
            floor_s * calls,
            wall,
            rates,
            latency_rates,
        )

    def _efficiency(self, op: Op, curve: Curve) -> float:
        if not curve.covers(op.grain):
            self.extrapolated.add(f"{op.kernel} at {op.grain:g} {curve.over}")
        return curve(op.grain)

    def _link(self, op: Op) -> tuple[str, Link]:
        """The link that an op's bytes cross; a kernel that reads host memory holds the SMs and pulls over H2D."""
        return self._links[Engine.H2D if op.engine is Engine.SM else op.engine]

    def _link_latency(self, op: Op) -> tuple[float, tuple[str, ...]]:
        """Latency of a plain copy or read; work without a kernel or a link has none."""
        if op.engine not in self._links:
            return 0.0, NO_RATES
        name, link = self._links[op.engine]
        return link.latency.value, (f"{name}.latency",)

    def _tensor_rate(self, dtype: str) -> tuple[float, float]:
        try:
            return self._tensor[dtype]
        except KeyError:
            raise MissingRate(f"machine {self.profile.name} has no {dtype} tensor rate") from None
