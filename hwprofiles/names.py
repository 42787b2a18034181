"""What people call a machine, and the shipped one that is meant: one without a memory size is the one that is usual."""

import re
from collections.abc import Iterable

from hwprofiles.spelling import match, plain, without_vendor

USUAL = {
    "rtx3060": "rtx3060-12gb", "rtx3080": "rtx3080-10gb", "v100": "v100-32gb", "v100-sxm": "v100-32gb",
    "a100": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb", "a100-sxm": "a100-sxm-80gb",
    "a100-pcie": "a100-pcie-80gb", "h100": "h100-sxm", "h100-80gb": "h100-sxm", "h100-sxm-80gb": "h100-sxm",
    "h100-pcie-80gb": "h100-pcie", "h200-sxm": "h200", "b200-sxm": "b200", "dgx-spark": "gb10", "spark": "gb10",
    "a6000": "rtx-a6000", "6000-ada": "rtx-6000-ada", "rtx-6000-ada-generation": "rtx-6000-ada",
    "pro-6000": "rtx-pro-6000", "rtx-pro-6000-blackwell": "rtx-pro-6000", "grace-hopper": "gh200",
    "4090-mobile": "rtx4090-laptop", "5090-mobile": "rtx5090-laptop", "9950x": "ryzen-9950x",
    "ryzen-9-9950x": "ryzen-9950x", "14900k": "core-i9-14900k", "i9-14900k": "core-i9-14900k",
}  # fmt: skip

SERIES = "rtx"
"""What a bare number of a GeForce card goes without."""

_SEVERAL = re.compile(r"([1-9]\d{0,2})\s*x[\s_.-]*(\S.*)", re.IGNORECASE)


def known_as(name: str, known: Iterable[str]) -> str | None:
    """The known machine that `name` is usually used for; None where it is none."""
    names = list(known)
    exact = match(name, names)
    if exact is not None:
        return exact
    bare = without_vendor(name)
    for asked in (bare, f"{SERIES}{bare}"):
        if (found := match(asked, names) or _usual(asked)) in names:
            return found
    return None


def _usual(name: str) -> str | None:
    called = match(name, USUAL)
    return USUAL[called] if called is not None and plain(name) else None


def several_of(name: str) -> tuple[int, str] | None:
    """(count, machine) of names like 4x-rtx4090."""
    found = _SEVERAL.fullmatch(name.strip())
    return (int(found[1]), found[2]) if found else None
