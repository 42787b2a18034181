"""What the measurements are made on: the device, its driver and clocks, the host and its limits. Reads, never sets."""

import contextlib
import hashlib
import os
import platform
import re
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hwprofiles.profile import CPU_CAPABILITY
from twin.errors import BadValue, TwinError

if TYPE_CHECKING:
    from realkernels.device import Device

DEVICES = re.compile(r"cpu|cuda(:\d{1,3})?")

_SMI_FIELDS = (
    "driver_version", "memory.used", "utilization.gpu", "temperature.gpu", "power.limit",
    "clocks.sm", "clocks.max.sm", "clocks.mem",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
_UNLIMITED = -1


class Machine(Struct, frozen=True, kw_only=True):
    """One device and its host, as they were before the first probe."""

    device: str
    """"cpu" or "cuda:0"."""
    name: str
    compute_capability: str
    sm_count: int
    """Multiprocessors, or logical cores."""
    device_bytes: int
    device_free_bytes: int
    host_bytes: int
    host_free_bytes: int
    dtype: str = ""
    """Of the cache planes that this device's kernels work on: fp16, bf16 or fp32."""
    device_id: str = ""
    """The GPU's UUID."""
    driver: str = ""
    versions: dict[str, str] = {}
    huge_pages: str = ""
    """The kernel's mode: always, madvise, never, or empty where it has none."""
    memlock_bytes: int = _UNLIMITED
    cpu: str = ""
    cpu_count: int = 1
    governor: str = ""
    code: str = ""
    """Hash of the sources of kernels and probes: a change of what is timed is another measurement."""
    commit: str = ""
    smi: dict[str, str] = {}

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def identity(self) -> dict[str, Any]:
        """What must be equal for two measurements to belong to one calibration."""
        return {
            "device": self.name,
            "device_id": self.device_id,
            "cpu": f"{self.cpu} x{self.cpu_count}",
            "driver": self.driver,
            "versions": dict(sorted(self.versions.items())),
            "code": self.code,
        }


def check_device(device: str) -> None:
    """Raise BadValue for what names no device, before torch is loaded to say so."""
    if DEVICES.fullmatch(device) is None:
        raise BadValue(f"unknown device {device!r}", hint="known: cpu, cuda, cuda:0, cuda:1, ...")


def open_checked(device: str, refusal: type[TwinError]) -> "Device":
    """The device and its kernels; `refusal` in one line where there are none."""
    check_device(device)
    try:
        from realkernels.device import open_device  # noqa: PLC0415

        return open_device(device)
    except ImportError as missing:
        what = missing.name or first_line(missing)
        raise refusal(f"{what} is not installed", hint="pip install 'kv-twin[kernels]'") from None
    except RuntimeError as refused:
        raise refusal(first_line(refused)) from None


def first_line(error: Exception) -> str:
    """Of what an error says, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe(device: str, *, dtype: str = "") -> Machine:
    """The machine as it is now. A CUDA device must be usable (see `open_checked`)."""
    host_bytes, host_free = host_memory()
    common: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "host_bytes": host_bytes,
        "host_free_bytes": host_free,
        "versions": _versions(),
        "huge_pages": huge_pages(),
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "cpu": cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "governor": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "code": code_hash(),
        "commit": commit(),
    }
    if device != "cpu":
        return Machine(**common, **_gpu(device))
    return Machine(
        **common, name=common["cpu"], compute_capability=CPU_CAPABILITY, sm_count=common["cpu_count"],
        device_bytes=host_bytes, device_free_bytes=host_free,
    )  # fmt: skip


def _gpu(device: str) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(torch.device(device))
    free, total = torch.cuda.mem_get_info(torch.device(device))
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    smi = query_smi(device, uuid)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "device_bytes": total,
        "device_free_bytes": free,
        "device_id": uuid,
        "driver": smi.get("driver_version", ""),
        "smi": smi,
    }


def query_smi(device: str, uuid: str) -> dict[str, str]:
    """What nvidia-smi says about one GPU; empty where it is missing or does not answer.

    It is asked by the UUID where that is known, because CUDA may number devices otherwise than nvidia-smi.
    """
    gpu = f"GPU-{uuid}" if uuid else device.rpartition(":")[2] or "0"
    fields = ",".join(_SMI_FIELDS)
    told = output_of("nvidia-smi", "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    values = [value.strip() for value in told.partition("\n")[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=True)) if len(values) == len(_SMI_FIELDS) else {}


def output_of(program: str, *arguments: str) -> str:
    """What a program prints; empty where it is missing, fails or does not end."""
    path = shutil.which(program)
    if path is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
            return done.stdout.strip()
    return ""


def host_memory() -> tuple[int, int]:
    """(installed, available) bytes of host memory, or of the control group that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _told("/proc/meminfo", "MemAvailable:")
    free = total // 2 if available is None else available * 1024  # told in KiB
    limit, used = text_of("/sys/fs/cgroup/memory.max"), text_of("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        reclaimable = _told("/sys/fs/cgroup/memory.stat", "inactive_file") or 0
        free = min(free, total - int(used or 0) + reclaimable)
    return total, free


def _told(path: str, name: str) -> int | None:
    """The number behind `name` in a file of such lines."""
    found = (line.split()[1] for line in text_of(path).splitlines() if line.startswith(f"{name} "))
    return next(map(int, found), None)


def huge_pages() -> str:
    """The kernel's mode: always, madvise, never, or empty where it has none."""
    return text_of("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]


def cpu_name() -> str:
    """The processor as the operating system calls it: a CPU profile's gpu.name."""
    for line in text_of("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release().split("-")[0]}
    for package in ("torch", "triton", "kv-twin"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def code_hash() -> str:
    """Short hash of the kernels and probes: figures made by other code are not to be mixed."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    folders = (sorted((root / folder).rglob("*.py")) for folder in ("realkernels", "calibrate/machine"))
    for path in (*chain.from_iterable(folders), root / "calibrate" / "probes.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Revision that the figures were made by; empty where there is no repository."""
    return output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD")


def text_of(path: str) -> str:
    """What a file of the system says; empty where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""
