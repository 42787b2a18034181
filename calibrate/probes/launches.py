"""What starting a kernel costs: eagerly, and as a node of a replayed graph."""

import torch

from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only

NODES = 200


def launch(context: Context) -> list[Sample]:
    """Eager launches of a kernel that does next to nothing, back to back."""
    return [_additions(context, graph=False)]


def graph_node(context: Context) -> list[Sample]:
    """Dependent nodes of a replayed graph."""
    return [_additions(context, graph=True)]


def _additions(context: Context, *, graph: bool) -> Sample:
    numbers = torch.zeros(32, dtype=torch.float32, device=context.backend.device)

    def many() -> None:
        for _ in range(NODES):
            numbers.add_(1.0)

    work = context.backend.capture(many) if graph else many
    seconds = context.seconds(work, per=NODES)
    before = float(numbers[0])
    work()
    how = check("graph_node" if graph else "launch", float(numbers[-1]) == before + NODES, "all additions done")
    return Sample(at={"nodes": NODES}, seconds=seconds, checked=how)


PROBES = (
    Probe(name="launch", run=launch, supported=cuda_only, quick_s=1, full_s=3),
    Probe(name="graph_node", run=graph_node, supported=cuda_only, quick_s=1, full_s=3),
)
