"""The one loop: verified before, fresh where it must be, checked again after; what is shared is opened once."""

import gc
import math
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from calibrate.operations import timing
from calibrate.operations.operation import Point
from calibrate.operations.table import BY_NAME
from calibrate.operations.timing import Measured, fitting, measured
from calibrate.probes import Context, Pace, WrongData
from tests.calibrate import probe_worlds as worlds
from tests.calibrate.call_worlds import FakeCall, FakeDevice

SELECT, FORMAT, CHUNK = BY_NAME["decode_select"], BY_NAME["decode_format"], BY_NAME["prefill_attention"]
STEP: Point = {"tier": "vram", "ctx_tokens": 6_145, "layers": 12}
CODED: Point = {"format": "q8_0", "ctx_tokens": 8_192, "batch": 1, "q_tokens": 1}


def context(device: Any = None, **changes: Any) -> Context:
    fields: dict[str, Any] = {"machine": worlds.machine(), "folder": Path(), "quick": True, "estimate_s": 60.0}
    return Context(backend=device or FakeDevice(), **fields | changes)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[Point]]:
    """Points for which something was opened together; all of it is closed again."""
    found: list[list[Point]] = []
    closed: list[int] = []

    @contextmanager
    def planes(_context: Context, pairs: Any) -> Iterator[str]:
        found.append([point for _, point in pairs])
        try:
            yield "cache"
        finally:
            closed.append(1)

    monkeypatch.setattr(timing, "_opened", planes)
    return found


def with_call(monkeypatch: pytest.MonkeyPatch, call: FakeCall) -> FakeCall:
    monkeypatch.setattr(timing, "_call", lambda *_given: call)
    return call


def only(device: FakeDevice, point: Point = STEP, *, whole: bool = False, **changes: Any) -> Measured:
    operation = FORMAT if "format" in point else SELECT
    (made,) = measured(context(device, **changes), [(operation, point)], whole=whole)
    return made


@pytest.mark.usefixtures("opened")
def test_a_right_result_is_a_sample_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with_call(monkeypatch, FakeCall(calls=12, link_bytes=3.0))
    made = only(FakeDevice(lambda repeat: 0.012 + 0.0012 * repeat))
    assert made.sample.at == STEP
    assert made.sample.seconds[:3] == pytest.approx((0.001, 0.0011, 0.0012))
    assert (made.sample.moved_bytes, made.sample.flops, made.error, made.link_bytes) == (7.0, 5.0, 1e-4, 3)
    assert "relative error 1.0e-04" in made.sample.checked


@pytest.mark.usefixtures("opened")
def test_a_case_of_several_layers_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_call(monkeypatch, FakeCall(calls=12, link_bytes=3.0))
    made = only(FakeDevice(lambda _repeat: 0.012), whole=True)
    assert (made.sample.median_s, made.link_bytes) == (0.012, 36)
    with_call(monkeypatch, FakeCall(calls=16))
    assert only(FakeDevice(lambda _repeat: 0.016), CODED, whole=True).sample.median_s == pytest.approx(0.001)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("error", [2.1e-2, 1.0, math.inf, math.nan])
def test_a_wrong_result_is_never_timed(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    with_call(monkeypatch, FakeCall(error=error))
    monkeypatch.setattr(Context, "seconds", lambda *_given, **_named: pytest.fail("timed"))
    with pytest.raises(WrongData, match=r"decode_select\.vram\.6145\.x12"):
        only(FakeDevice())


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("point", [STEP, CODED])
def test_what_does_nothing_once_captured_is_noticed(monkeypatch: pytest.MonkeyPatch, point: Point) -> None:
    with_call(monkeypatch, FakeCall())
    with pytest.raises(WrongData, match="relative error inf"):
        only(FakeDevice(captures=False), point)


@pytest.mark.usefixtures("opened")
def test_a_selection_is_fresh_in_every_repeat_and_a_whole_cache_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = with_call(monkeypatch, FakeCall())
    only(FakeDevice())
    assert len(set(call.seen)) == len(call.seen)
    call = with_call(monkeypatch, FakeCall())
    only(FakeDevice(), CODED)
    assert len(set(call.seen)) == 2  # of the check, and of all repeats


@pytest.mark.usefixtures("opened")
def test_short_calls_are_repeated_more_often_at_the_pace_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_call(monkeypatch, FakeCall())
    assert len(only(FakeDevice(), pace=Pace(0.25, 30, 5)).sample.seconds) == 30
    assert len(only(FakeDevice(), pace=Pace(0.25, 30, 5), rounds=3).sample.seconds) == 10
    assert len(only(FakeDevice()).sample.seconds) == 9


def test_points_over_one_cache_open_it_once_and_the_longest_holds_them(
    monkeypatch: pytest.MonkeyPatch, opened: list[list[Point]]
) -> None:
    with_call(monkeypatch, FakeCall())
    points = [STEP, {**STEP, "ctx_tokens": 4_096}, {**STEP, "layers": 2}, {**STEP, "tier": "host"}]
    assert [
        made.sample.at for made in measured(context(), [(SELECT, point) for point in points], whole=False)
    ] == points
    assert opened == [points[:2], points[2:3], points[3:]]


def test_a_late_probe_leaves_points_out_and_counts_them(
    monkeypatch: pytest.MonkeyPatch, opened: list[list[Point]]
) -> None:
    with_call(monkeypatch, FakeCall())
    late, told = context(estimate_s=-1.0), list[Any]()
    late.begins = told.append
    made = list(measured(late, [(FORMAT, CODED), (FORMAT, {**CODED, "batch": 2})], whole=False))
    assert ([one.sample.at for one in made], late.left_out) == ([CODED], 1)
    assert told == [(FORMAT, CODED)]
    assert len(opened) == 1


def sized(operation: Any, points: Any, **changes: Any) -> list[Point]:
    return [point for _, point in fitting(context(machine=worlds.machine(**changes)), operation, points)]


def test_layers_go_before_contexts_where_memory_is_short() -> None:
    points = SELECT.calibration(cuda=True, quick=False, multiprocessors=132)
    assert sized(SELECT, points, device_free_bytes=140 * 2**30) == list(points)
    short = sized(SELECT, points, device_free_bytes=24 * 2**30)
    assert [point["ctx_tokens"] for point in short] == [point["ctx_tokens"] for point in points]
    assert len({point["layers"] for point in short}) == 1
    assert 2 <= int(short[0]["layers"]) < 12
    tiny = sized(SELECT, points, device_free_bytes=2**30)
    assert max(int(point["ctx_tokens"]) for point in tiny) < 2**18


def test_caches_that_do_not_fit_are_left_out() -> None:
    for name in ("decode_format", "decode_dense", "prefill_format"):
        operation = BY_NAME[name]
        points = operation.calibration(cuda=True, quick=False, multiprocessors=132)
        few = sized(operation, points, device_free_bytes=2**28)
        assert 0 < len(few) < len(points) == len(sized(operation, points)), name


def test_kernels_of_formats_are_compiled_ahead_each_in_its_arrangement(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    found: list[Any] = []
    given = timing.loaded

    def loaded(module: str, name: str) -> Any:
        if name == "compile_ahead":
            return lambda kernels, device: found.extend([device, *map(tuple, kernels)])
        return given(module, name)

    monkeypatch.setattr(timing, "loaded", loaded)
    inline: Point = {"format": "int8_per_token_head", "arrangement": "inline", "tokens": 512}
    wanted = [
        (FORMAT, {**CODED, "q_tokens": 4}), (BY_NAME["append_format"], {"format": "fp8", "tokens": 96}),
        (BY_NAME["dequantise_format"], inline), (SELECT, STEP),
    ]  # fmt: skip
    timing.compiled("cuda:0", wanted)
    kernels = [
        ("q8_0", "aligned", 4, "decode"), ("fp8", "aligned", 96, "append"),
        ("int8_per_token_head", "inline", 8192, "dequantise"),
    ]  # fmt: skip
    assert found == ["cuda:0", *(tuple(given("timed.compile_ahead", "Wanted")(*kernel)) for kernel in kernels)]


@pytest.mark.parametrize(("device", "mib"), [("cuda:0", 256), ("cpu", 64)])
def test_images_of_whole_pages_are_more_than_caches_hold_and_a_part_of_a_page_is_alone(device: str, mib: int) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")
    made = context(machine=worlds.machine(device=device))
    for layers in (1, 4, 16):
        pages, tokens = timing._imaged(made, {"tier": "vram", "layers": layers})
        image_bytes = layers * 256 * (2 * 2 * 256 + 128 + 128 // 4) * 2
        assert pages * image_bytes >= mib * 2**20 > (pages - 1) * image_bytes
        assert tokens == 256 * pages
    assert timing._imaged(made, {"tier": "vram", "layers": 4, "rows": 96}) == (1, 96)


def test_what_is_loaded_is_set_aside_and_what_comes_later_is_released() -> None:
    pytest.importorskip("torch")

    class Cache:
        """One that only a collection ends."""

        def __init__(self) -> None:
            self.owner = self

    timing.settle([SELECT, FORMAT])
    assert {"realkernels.timed.sparse", "realkernels.timed.attend_decode"} <= sys.modules.keys()
    assert gc.get_freeze_count() > len(gc.get_objects())
    held = weakref.ref(Cache())
    timing.release()
    assert held() is None
