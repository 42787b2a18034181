"""Bytes of every part against every memory: parts by hand, the longest context to the page, and what is short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.laws.drawn import questions, with_memory
from tests.worlds import LAWS, case, flash_next, machine, model, rate
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.memory.plan import PAGE_TABLE_SHARE, plan_memory
from twin.operations.counts import state_bytes
from twin.units import GIB, MAX_TOKENS, MIB, format_bytes

BLOG, RTX3090 = load_profile("3x-rtx3090"), load_profile("rtx3090")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("ctx_tokens", "pages"), [(1, 1), (8, 1), (9, 2), (64, 8), (65, 9)])
def test_parts_of_one_device_by_hand(ctx_tokens: int, pages: int, batch: int) -> None:
    """Every sequence has its own state and cache, of whole pages of 8 tokens."""
    asked = case(ctx_tokens, layout="vram", batch=batch)
    plan = plan_memory(asked, machine())
    gpu, host = plan.memories
    spec = asked.model
    (state,) = spec.states
    embedding = spec.parameters["embedding"]
    assert plan.pages == pages
    assert gpu.parts(plan.pages) == {
        "weights": (sum(spec.parameters.values()) - embedding) * 2,
        "recurrent state": 2 * state_bytes(state, 2) * batch,
        "embedding": embedding * 2,
        "workspace": MIB,
        "kv cache": 2 * pages * 8 * (64 + 8 + 2) * batch,  # layers x tokens x (planes, raw key, 1/4 pooled key)
    }
    assert host.parts(plan.pages) == {"reserved": 2**20}
    assert plan.vram_left_bytes() == 2**30 - sum(gpu.parts(plan.pages).values())


def test_offload_keeps_planes_on_the_host_and_page_tables_on_every_device() -> None:
    plan = plan_memory(case(64), machine(gpu_count=2))
    *gpus, host = plan.memories
    on_host = 2 * 64 * (64 + 8)
    assert host.parts(plan.pages)["kv cache"] == on_host
    for gpu in gpus:
        parts = gpu.parts(plan.pages)
        assert (parts["page tables"], parts["kv cache"]) == (on_host * PAGE_TABLE_SHARE, 64 * 2)
        assert gpu.fixed["staging"] == 1024


def test_the_blogs_machine_holds_what_was_published() -> None:
    """27.75 KiB a token in VRAM, or 0.75 with offload; 64.35 GiB loaded and 6.33 free."""
    in_vram, offload = (plan_memory(flash_next(1024, layout=layout), BLOG) for layout in ("vram", "offload"))
    used = [
        [sum(memory.parts(4).get("kv cache", 0) for memory in memories) for memories in (plan.devices(), plan.host())]
        for plan in (in_vram, offload)
    ]
    assert used == [[27.75 * MIB, 0], [0.75 * MIB, 27 * MIB]]
    loaded = sum(sum(memory.fixed.values()) for memory in in_vram.devices())
    assert loaded / GIB == pytest.approx(64.35, abs=0.01)
    assert sum(memory.free_bytes() for memory in in_vram.devices()) / GIB == pytest.approx(6.33, abs=0.01)
    assert [plan.limit().name for plan in (in_vram, offload)] == ["gpu0", "host"]
    assert all(plan.limit().max_pages() * 256 == plan.max_ctx_tokens() for plan in (in_vram, offload))


SIZES = st.integers(min_value=2**28, max_value=2**34)


@LAWS
@given(st.sampled_from(["vram", "offload"]), st.integers(1, 2), SIZES, SIZES, SIZES)
def test_the_longest_context_is_whole_pages_and_longer_on_a_larger_machine(
    layout: str, gpu_count: int, vram_bytes: int, host_bytes: int, more: int
) -> None:
    profile = machine(gpu_count=gpu_count, vram_bytes=vram_bytes, host_bytes=host_bytes)
    larger = machine(gpu_count=gpu_count, vram_bytes=vram_bytes + more, host_bytes=host_bytes + more)
    few, many = (plan_memory(case(1, layout=layout), each).max_ctx_tokens() for each in (profile, larger))
    assert 0 < few < many
    assert few % 8 == many % 8 == 0


def test_a_larger_capacity_by_its_spread_holds_more_and_a_smaller_less() -> None:
    asked = case(1, layout="vram", rules={"workspace": rate(2**20, "B", spread=0.1)})
    plan = plan_memory(asked, machine())
    low, middle, high = (plan.max_ctx_tokens(sigmas=sigmas) for sigmas in (-1, 0, 1))
    assert [middle - low, high - middle] == pytest.approx([0.1 * 2**20 / 148] * 2, abs=8)


VRAM, HOST, HAS = "needs %s of VRAM", "needs %s of host memory", ", the machine has 256.0 MiB (%s short)"


@pytest.mark.parametrize(
    ("ctx_tokens", "layout", "sizes", "text"),
    [
        (2**22, "offload", {}, ""),
        (2**22, "vram", {"vram_bytes": 2**28}, (VRAM + HAS) % ("593.0 MiB", "337.0 MiB")),
        (2**22, "offload", {"host_bytes": 2**28}, (HOST + HAS) % ("577.0 MiB", "321.0 MiB")),
        (2**28, "offload", {"vram_bytes": 2**28, "host_bytes": 2**28},
         f"{VRAM}{HAS}; {HOST}{HAS}" % ("1.07 GiB", "841.0 MiB", "36.00 GiB", "35.75 GiB")),
    ],
)  # fmt: skip
def test_a_shortage_names_what_is_needed_and_what_is_there(
    ctx_tokens: int, layout: str, sizes: dict[str, float], text: str
) -> None:
    """4 Mi tokens: 592 MiB of VRAM, or 576 MiB of host memory; of 256 Mi page tables take a 512th."""
    assert plan_memory(case(ctx_tokens, layout=layout), machine(**sizes)).shortage() == text  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [5, 13, 14, 48])
def test_more_devices_hold_at_least_as_many_tokens_and_the_short_one_is_named(count: int) -> None:
    """Also where some of them run no attention layer at all."""
    few, many = (replace(RTX3090, gpu_count=number) for number in (count - 1, count))
    less, longest = (plan_memory(flash_next(1, layout="vram"), each).max_ctx_tokens() for each in (few, many))
    assert 0 < less <= longest
    assert "VRAM on gpu" in plan_memory(flash_next(longest + 256, layout="vram"), many).shortage()


@pytest.mark.parametrize("ctx_tokens", [MAX_TOKENS - 256, MAX_TOKENS - 255, MAX_TOKENS])
def test_the_longest_question_fits_a_machine_without_end(ctx_tokens: int) -> None:
    plan = plan_memory(flash_next(ctx_tokens), with_memory(BLOG, 2.0**50))
    assert plan.fits
    assert plan.max_ctx_tokens() == MAX_TOKENS


def unified(memory_bytes: float, *, told: bool = True) -> HardwareProfile:
    """A machine with one memory, which its profile says or which follows from its being a CPU."""
    apart = machine(vram_bytes=memory_bytes, host_bytes=memory_bytes)
    changes = {"unified_memory": True} if told else {"compute_capability": "0.0"}
    return replace(apart, gpu=replace(apart.gpu, **changes))


@pytest.mark.parametrize("told", [True, False], ids=["unified_memory", "a CPU"])
@pytest.mark.parametrize("layout", ["vram", "offload"])
def test_parts_of_device_and_host_take_from_one_memory(layout: str, told: bool) -> None:
    """No byte is lost and none is there twice: all parts of both against the bytes of one."""
    asked = case(640, layout=layout, spec=model(ngram=True))
    apart = plan_memory(asked, machine(vram_bytes=2**30, host_bytes=2**30))
    plan = plan_memory(asked, unified(2**30, told=told))
    (memory,) = plan.memories
    assert memory.capacity_bytes == 2**30
    assert memory.used_bytes(plan.pages) == sum(each.used_bytes(plan.pages) for each in apart.memories)
    assert memory.parts(plan.pages).keys() == {part for each in apart.memories for part in each.parts(plan.pages)}
    assert (plan.host(), plan.tiers()) == ([], [("memory", [memory])])
    assert plan.max_ctx_tokens() < apart.max_ctx_tokens()
    short = plan_memory(replace(asked, question=replace(asked.question, ctx_tokens=10**8)), unified(2**30, told=told))
    needed = format_bytes(short.memories[0].used_bytes(short.pages))
    assert short.shortage().startswith(f"needs {needed} of memory, the machine has 1.00 GiB (")


@LAWS
@given(questions(), st.floats(1, 4 * 2**40), st.booleans())
def test_no_answer_takes_more_than_one_memory_has(question: Question, more: float, told: bool) -> None:
    one = unified(2.0**30 + more, told=told)
    plan = plan_memory(resolve(question), one)
    pages = plan.max_ctx_tokens() // plan.page_tokens
    assert sum(memory.capacity_bytes for memory in plan.memories) == pytest.approx(one.host.memory.value)
    if pages:
        assert sum(memory.used_bytes(pages) for memory in plan.memories) <= one.host.memory.value * (1 + 1e-12)
