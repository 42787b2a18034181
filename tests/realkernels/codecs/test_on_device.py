"""On a GPU: the same bytes as on the host, and appends that a graph can hold."""

import pytest
import torch

from realkernels.codecs import Planes, codec_named
from tests.realkernels.codecs.kept import ALL, CPU, KVARN, normal, outliers

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def planes_on(name: str, arrangement: str, device: torch.device) -> Planes:
    fmt = codec_named(name, arrangement=arrangement)
    more = {"sinks": ()} if name.startswith("kvarn") else {}
    return fmt.allocate(4, 128, 2, 128, device, **more)


def fraction_apart(one: Planes, other: Planes) -> float:
    """Of bytes."""
    apart = sum(
        int((one.tensors[name].cpu().view(torch.uint8) != other.tensors[name].cpu().view(torch.uint8)).sum())
        for name in one.tensors
    )
    return apart / one.nbytes


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_a_gpu_writes_the_bytes_that_the_host_writes(name: str, arrangement: str) -> None:
    """But for KVarN, whose logarithms differ in their last bit: another of two nearly equal states may be kept."""
    fmt = codec_named(name, arrangement=arrangement)
    here, there = planes_on(name, arrangement, CPU), planes_on(name, arrangement, GPU)
    keys, values = outliers(300, 2, 128)
    fmt.append(here, range(100, 400), keys, values)
    fmt.append(there, range(100, 400), keys.to(GPU), values.to(GPU))
    apart = fraction_apart(here, there)
    assert apart < 0.05 if name in KVARN else apart == 0, apart
    for one, other in zip(fmt.restore(here, range(100, 400)), fmt.restore(there, range(100, 400)), strict=True):
        assert float((one - other.cpu()).norm() / one.norm()) < 1e-2


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_one_at_a_time_is_the_same_on_a_gpu(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    one, other = planes_on(name, arrangement, GPU), planes_on(name, arrangement, GPU)
    keys, values = (rows.to(GPU) for rows in outliers(150, 2, 128))
    fmt.append(one, range(150), keys, values)
    for at in range(150):
        fmt.append(other, [at], keys[at : at + 1], values[at : at + 1])
    assert fraction_apart(one, other) == 0


@pytest.mark.parametrize(("name", "arrangement"), ALL)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_graph_appends_and_reads(name: str, arrangement: str, rows: int) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    captured, eager = planes_on(name, arrangement, GPU), planes_on(name, arrangement, GPU)
    slots = torch.zeros(rows, dtype=torch.int64, device=GPU)
    keys, values = (torch.zeros(rows, 2, 128, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fmt.append(captured, slots, keys, values, checked=False)
        held = fmt.restore(captured, slots, dtype=torch.bfloat16, checked=False)
    all_keys, all_values = (tensor.to(GPU).bfloat16() for tensor in normal(130, 2, 128))
    for first in range(0, 130, rows):
        keys.copy_(all_keys[first : first + rows])
        values.copy_(all_values[first : first + rows])
        slots.copy_(torch.arange(first, first + rows))
        graph.replay()
        fmt.append(eager, range(first, first + rows), keys, values)
        for got, expected in zip(held, fmt.restore(eager, range(first, first + rows), torch.bfloat16), strict=True):
            assert torch.equal(got, expected)
    assert fraction_apart(captured, eager) == 0


@pytest.mark.parametrize(
    ("name", "arrangement"), [("int8_per_token_head", "inline"), *((name, "aligned") for name in KVARN)]
)
def test_slots_are_checked_on_the_host_and_not_within_a_graph(name: str, arrangement: str) -> None:
    fmt, planes = codec_named(name, arrangement=arrangement), planes_on(name, arrangement, GPU)
    keys, values = (rows.to(GPU) for rows in normal(1, 2, 128))
    with pytest.raises(ValueError, match="slot 512 does not lie in"):
        fmt.append(planes, torch.tensor([512], device=GPU), keys, values)
    slots, graph = torch.zeros(1, dtype=torch.int64, device=GPU), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="give checked=False"):
            fmt.append(planes, slots, keys, values)
        fmt.append(planes, slots, keys, values, checked=False)
