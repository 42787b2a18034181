"""Programmatic dependent launch (PDL): launches that begin while the one before still runs; on Hopper and later only.

The rule inside a call of several launches on one stream. The first begins when everything before it is complete. Every
later one may use PDL: it reads what no launch of the call writes, then waits once, on every path, and only then reads
or writes anything that a launch of the call writes. A launch with a later one behind it lets it begin at once.

Why that is safe. A wait returns when the whole launch before is complete and its writes are seen. That launch, unless
it is the first, has waited itself, so that all before it are complete too; and the first began after all earlier calls.
So from its wait on, a launch sees what it would see without any of this, and no write overtakes a read of a buffer that
calls share: all writes come after the wait, and the next call begins with a launch without PDL.
"""

import torch

from realkernels.jit import JITFunction, tl, triton


@triton.jit
def let_next_begin(FOLLOWED: tl.constexpr):
    """The next launch may begin once every thread block has come here; nothing else follows from it."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Until the launch before is complete."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def has_pdl(device: torch.device) -> bool:
    """Whether launches there can use it: NVIDIA's compute capability 9.0 or later, kernels not interpreted."""
    return (
        isinstance(wait_for_last, JITFunction)
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def launch_options(*, pdl: bool) -> dict[str, bool]:
    """What a launch is given beside its arguments."""
    return {"launch_pdl": True} if pdl else {}
