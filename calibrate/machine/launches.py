"""What starting a kernel costs, eagerly and as a node of a replayed graph; a GPU's operations a second."""

from functools import partial

import torch

from calibrate.machine.timed import timed
from calibrate.probes.probe import Context, Probe, Sample, cuda_only

NODES = 200


def additions(context: Context, *, name: str, graph: bool) -> list[Sample]:
    """A kernel that does next to nothing, many times: launched back to back, or as dependent nodes of a graph."""
    numbers = torch.zeros(32, dtype=torch.float32, device=context.backend.device)

    def many() -> None:
        for _ in range(NODES):
            numbers.add_(1.0)

    work = context.backend.capture(many) if graph else many

    def right() -> bool:
        before = float(numbers[0])
        work()
        return float(numbers[-1]) == before + NODES

    return [timed(context, name, work, per=NODES, at={"nodes": NODES}, right=right, how="all additions done")]


def instructions(context: Context) -> list[Sample]:
    """Chains of integer and logic operations (lop3, shf) in registers, many a thread, so that none is waited for.

    It is what dequantising codes is made of.
    """
    from calibrate.machine.kernels import CHAINS, Chains  # noqa: PLC0415 - needs triton

    samples = []
    for count in context.points(context.pick(CHAINS[-1:], CHAINS)):
        chains = Chains(chains=count, device=context.backend.device)
        samples.append(timed(
            context, "instructions", context.backend.capture(chains.run), flops=chains.operations,
            at={"chains": count, "programs": chains.programs, "steps": chains.steps},
            right=chains.right, how="every chain as computed on the host",
        ))  # fmt: skip
    return samples


PROBES = (
    *(
        Probe(name=name, run=partial(additions, name=name, graph=graph), supported=cuda_only, quick_s=1, full_s=3)
        for name, graph in (("launch", False), ("graph_node", True))
    ),
    Probe(name="instructions", run=instructions, supported=cuda_only, quick_s=1.5, full_s=3),
)
