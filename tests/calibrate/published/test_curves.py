"""Published times of single kernels as ops with bytes and operations counted on paper, and which are passed over."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.published import curves
from calibrate.published.curves import DECODED, KernelRow
from tests.worlds import at_its_roof, machine
from twin.cost.roofline import Roofs

LINEAR = {"operation": "linear", "implementation": "vllm_default", "format": "bf16", "shape": {"n": 64, "k": 32}}
EXPERTS = {
    "operation": "experts", "implementation": "vllm_fused_moe", "format": "bf16",
    "shape": {"experts": 4, "chosen": 2, "hidden": 8, "intermediate": 16},
}  # fmt: skip
HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 4}
DECODE = {"operation": "attend_decode", "implementation": "triton", "format": "bf16", "shape": HEADS | {"batch": 2}}
DENSE = {"operation": "attend_dense", "implementation": "triton", "format": "bf16", "shape": HEADS}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of a file with one curve, which is like `curve` but for what is told."""

    def rows(curve: dict[str, Any], **changes: Any) -> list[KernelRow]:
        whole = {"id": "c", "machine": "h200", "engine": "vllm", "over": "tokens", "points": [4], "seconds": [1e-3]}
        (tmp_path / "one.json").write_text(json.dumps({"curves": [whole | curve | changes]}), encoding="utf-8")
        monkeypatch.setattr(curves, "PUBLIC", tmp_path)
        monkeypatch.setattr(curves, "FILES", ("one.json",))
        return list(curves.kernel_rows.__wrapped__())

    return rows


@pytest.mark.parametrize(
    ("curve", "changes", "counts"),
    [
        (LINEAR, {}, (2 * 64 * 32, 2 * 64 * 32 * 4, 4)),
        (LINEAR, {"format": "fp8"}, (64 * 32, 2 * 64 * 32 * 4, 4)),
        # one token meets 2 of 4 experts; each has 3 matrices of 8 x 16
        (EXPERTS, {"points": [1]}, (2 * 2 * 3 * 8 * 16, 2 * 2 * 3 * 8 * 16, 1)),
        # of 2 tokens 3 of 4 experts are expected, and each token still meets 2
        (EXPERTS, {"points": [2]}, (2 * 3 * 3 * 8 * 16, 2 * 2 * 3 * 8 * 16 * 2, 2)),
        # K and V of 2 heads x 4 of 10 tokens in each of 2 sequences, which 4 query heads share
        (DECODE, {"points": [10], "over": "context"}, (2 * 10 * 2 * 2 * 2 * 4, 2 * 10 * 2 * 2 * 2 * 4 * 4, 1)),
        (DECODE, {"points": [10], "format": "fp8"}, (10 * 2 * 2 * 2 * 4, 2 * 10 * 2 * 2 * 2 * 4 * 4, 1)),
        # 3 tokens see 1, 2 and 3
        (DENSE, {"points": [3]}, (3 * 2 * 2 * 2 * 4, 4 * 8 * 4 * 6, 3)),
    ],
)
def test_bytes_and_operations_are_those_of_the_shape(
    read: Any, curve: dict[str, Any], changes: dict[str, Any], counts: tuple[float, float, float]
) -> None:
    """Bytes from memory, operations, new tokens."""
    (row,) = read(curve, **changes)
    assert (row.op.vram_bytes, row.op.flops, row.grain) == pytest.approx(counts)
    assert (row.seconds, row.named, row.machine.name) == (1e-3, "one.json h200", "h200")


@pytest.mark.parametrize(
    ("curve", "changes", "kernel", "dtype"),
    [
        (LINEAR, {}, "linear/library/bf16", "bf16"),
        (LINEAR, {"format": "fp8_block", "implementation": "any"}, "linear/vllm/fp8", "fp8"),
        (LINEAR, {"format": "nvfp4", "implementation": "any"}, "linear/vllm/nvfp4", "fp4"),
        (EXPERTS, {"format": "int4_wo", "engine": "sglang"}, "experts/sglang/w4a16", "bf16"),
        (DECODE, {"implementation": "vllm_flash_attn_fa3", "format": "fp8"}, "attend_decode/fa3/fp8", "bf16"),
        (DENSE, {"implementation": "vllm_flashinfer_trtllmprefill"}, "attend_dense/trtllm_mha/bf16", "bf16"),
    ],
)
def test_a_kernel_is_called_as_rulebooks_call_it(
    read: Any, curve: dict[str, Any], changes: dict[str, Any], kernel: str, dtype: str
) -> None:
    (row,) = read(curve, **changes)
    assert (row.op.kernel, row.op.dtype) == (kernel, dtype)


def test_points_whose_operands_were_warm_and_kernels_that_are_another_operation_are_passed_over(read: Any) -> None:
    two = {"points": [1, 8], "seconds": [1, 2]}
    assert [(row.id, row.seconds) for row in read(LINEAR, **two)] == [("c-1", 1), ("c-8", 2)]
    assert [row.id for row in read(LINEAR, **two, cold_from=8)] == ["c-8"]
    assert read(LINEAR, **two, cold_from=None) == []
    assert read(LINEAR, implementation=curves.NOT_TAKEN[0]) == []
    with pytest.raises(ValueError, match="shorter"):
        read(LINEAR, points=[1, 2])
    with pytest.raises(ValueError, match="n of a curve is 'wide', no number"):
        read(LINEAR, shape={"n": "wide", "k": 1})


def test_a_call_of_many_tokens_tells_of_prompts(read: Any) -> None:
    few, many = read(LINEAR, points=[DECODED, DECODED + 1], seconds=[1, 1])
    assert (few.phase, many.phase) == ("decode", "prefill")


def test_a_row_takes_what_its_op_does(read: Any) -> None:
    """4,096 bytes at 1 GB/s."""
    (row,) = read(LINEAR, points=[1])
    key = "linear/library/bf16"
    toy = machine(kernels={key: at_its_roof(key)})
    assert row.breakdown(Roofs(toy, strict=False)).seconds == pytest.approx(4096e-9)


def test_shipped_curves_tell_of_machines_that_are_shipped() -> None:
    rows = curves.kernel_rows()
    assert len({row.id for row in rows}) == len(rows)
    assert {row.file for row in rows} == {*curves.FILES}
    assert all(row.seconds > 0 and row.op.vram_bytes > 0 and row.op.flops > 0 for row in rows)
