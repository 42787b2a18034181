"""Which ops a pass is made of, on which device, and that merging equal layers changes nothing."""

import pytest
from msgspec.structs import replace

from tests.twin.cost.programs import ops, same
from tests.worlds import case, flash_next, machine, model, step
from twin.ask.case import Case
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.operations.counts import layer_active_parameters, layer_parameters, parameters, state_bytes, weight_bytes
from twin.operations.lower import decode_program, layer_groups, prefetch_program, prefill_program, split_layers
from twin.operations.ops import HOST_DEVICE, Engine


@pytest.mark.parametrize(
    ("layers", "devices", "split"),
    [(4, 1, (0, 0, 0, 0)), (4, 2, (0, 0, 1, 1)), (4, 3, (0, 0, 1, 2)), (2, 4, (0, 1))],
)
def test_layers_are_split_in_order_and_evenly(layers: int, devices: int, split: tuple[int, ...]) -> None:
    assert split_layers(case(spec=model(layers=layers)), devices) == split


def test_flash_next_puts_sixteen_layers_on_each_of_three_devices() -> None:
    split = split_layers(flash_next(), 3)
    assert [split.count(device) for device in range(3)] == [16, 16, 16]


def test_groups_hold_every_layer_once() -> None:
    asked = flash_next()
    single = layer_groups(asked, 3, grouped=False)
    assert [(group.index, group.kind) for group in single] == list(enumerate(asked.model.layer_kinds))
    merged = layer_groups(asked, 3, grouped=True, alone=1)
    assert [(group.kind, group.count) for group in merged] == [("recurrent", 1), ("recurrent", 35), ("attention", 12)]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_reads_all_weights_and_moves_all_states(merged: bool, batch: int) -> None:
    asked, at_step = case(), step(100, batch=batch)
    program = decode_program(asked, at_step, 2, grouped=merged)
    weights = (
        sum(layer_parameters(asked.model, kind) for kind in asked.model.layer_kinds) + parameters(asked.model).head
    )
    assert sum(op.vram_bytes * times for op, times in ops(program, "weights")) == weight_bytes(asked.model, weights)
    assert sum(op.flops * times for op, times in ops(program, "weights")) == 2 * weights * batch
    assert (
        sum(op.vram_bytes * times for op, times in ops(program, "state")) == 2 * 2 * state_bytes(asked.model, 2) * batch
    )


def test_a_chunk_runs_every_token_through_every_layer_and_computes_no_logits() -> None:
    asked = case()
    program = prefill_program(asked, step(32, 16, batch=2), 1)
    active = sum(layer_active_parameters(asked.model, kind) for kind in asked.model.layer_kinds)
    assert sum(op.flops * times for op, times in ops(program, "weights")) == 2 * active * 32
    assert {op.grain for op, _ in ops(program, "weights")} == {32}


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(("devices", "crossings"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_the_residual_stream_hops_from_device_to_device(devices: int, crossings: int, merged: bool) -> None:
    """1 stream x 8 elements x 4 bytes a token, down to the host and up again."""
    program = prefill_program(case(), step(0, 16), devices, grouped=merged)
    hops = ops(program, "hop")
    assert sum(times for _, times in hops) == 2 * crossings
    assert {op.link_bytes for op, _ in hops} == ({16 * 8 * 4} if crossings else set())
    assert {op.engine for op, _ in hops} == ({Engine.D2H, Engine.H2D} if crossings else set())


def test_the_true_order_of_layers_visits_devices_in_order() -> None:
    program = decode_program(case(), step(100), 4, grouped=False)
    assert [block.ops[0].device for block in program if block.ops[0].part != "hop"] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(("where", "engine", "row_bytes"), [("ram", Engine.HOST, 100), ("disk", Engine.DISK, 4096)])
def test_ngram_rows_are_fetched_from_where_they_lie(where: str, engine: Engine, row_bytes: int) -> None:
    """2 rows a token of 100 bytes; a disk reads no less than a page for each."""
    asked = replace(case(spec=model(ngram=True)), ngram=where)
    (block,) = prefetch_program(asked, step(0, 16, batch=2))
    fetch, send = block.ops
    assert (fetch.engine, fetch.device, fetch.host_bytes, fetch.run_bytes) == (
        engine,
        HOST_DEVICE,
        64 * row_bytes,
        row_bytes,
    )
    assert (send.engine, send.device, send.link_bytes, send.after) == (Engine.H2D, 0, 64 * 100, (0,))


def test_a_row_longer_than_a_page_is_read_from_a_disk_as_it_is() -> None:
    table = model(ngram=True).ngram
    assert table is not None
    long = replace(model(), ngram=replace(table, row_bytes=5000))
    (block,) = prefetch_program(replace(case(spec=long), ngram="disk"), step(0, 16))
    assert (block.ops[0].host_bytes, block.ops[0].run_bytes) == (32 * 5000, 5000)


def test_a_model_without_a_table_prefetches_nothing() -> None:
    assert prefetch_program(case(), step(0, 16)) == ()


@pytest.mark.parametrize(("before_layer", "position"), [(0, 0), (1, 0), (2, 1)])
def test_a_decode_step_fetches_rows_beside_the_layer_before_their_use(before_layer: int, position: int) -> None:
    table = model(ngram=True).ngram
    assert table is not None
    asked = case(spec=replace(model(), ngram=replace(table, before_layer=before_layer)))
    program = decode_program(asked, step(100), 1)
    holding = [index for index, block in enumerate(program) if any(op.part == "ngram" for op in block.ops)]
    assert holding == [position]
    block = program[position]
    fetch = next(index for index, op in enumerate(block.ops) if op.part == "ngram")
    assert block.ops[fetch].after == ()
    assert block.ops[fetch + 1].after == (fetch,)
    assert (len(block.ops) == 2) is (before_layer == 0)


@pytest.mark.parametrize("layout", ["vram", "offload"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("ngram", [True, False])
@pytest.mark.parametrize("past", [0, 16, 4000])
def test_merged_layers_take_as_long_as_layers_one_by_one(layout: str, devices: int, ngram: bool, past: int) -> None:
    asked = case(layout=layout, spec=model(layers=6, every=3, ngram=ngram))
    roofs = Roofs(machine(gpu_count=devices))
    for lower, at_step in (
        (decode_program, step(past)),
        (prefill_program, step(past, 16)),
    ):
        merged, single = (
            Breakdown().run(lower(asked, at_step, devices, grouped=each), roofs) for each in (True, False)
        )
        assert same(merged, single)


@pytest.mark.parametrize(
    "asked", [{"layout": "vram"}, {}, {"copies": "overlapped"}, {"prefill": "naive"}, {"batch": 2}]
)
def test_merged_layers_of_the_published_model_too(asked: dict[str, str]) -> None:
    of_case: Case = flash_next(200_000, **asked)
    batch = of_case.question.batch
    roofs = Roofs(machine(gpu_count=3))
    for lower, at_step in (
        (decode_program, step(200_000, batch=batch)),
        (prefill_program, step(196_608, 2048, batch=batch)),
    ):
        merged, single = (Breakdown().run(lower(of_case, at_step, 3, grouped=each), roofs) for each in (True, False))
        assert same(merged, single)
