"""Schedules worked out on paper, closed forms of pipelines, and what any schedule must obey."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.cost.schedule import Timeline, schedule
from twin.operations.ops import Carried, Engine, Op, OpGraph

SM, H2D, D2H = Engine.SM, Engine.H2D, Engine.D2H
SERVICE = st.floats(min_value=1e-6, max_value=1.0)


def op(engine: Engine = SM, *after: int, part: str = "", device: int = 0) -> Op:
    return Op(part=part, engine=engine, device=device, after=after)


def play(graph: OpGraph, *seconds: float, spans: bool = False) -> Timeline:
    return schedule((graph,), [seconds], spans=spans)


def pipeline(iterations: int, *, buffers: int, combine: bool = False, in_order: bool = False) -> OpGraph:
    """Copies into one of `buffers` buffers, each read by a kernel and on request combineed by a second one."""
    ops = (op(H2D), op(SM, 0), op(SM, 1)) if combine else (op(H2D), op(SM, 0))
    carried = [Carried(0, len(ops) - 1, buffers)]
    if in_order:
        carried.append(Carried(1, len(ops) - 1, 1))
    return OpGraph(ops=ops, iterations=iterations, carried=tuple(carried))


def critical_s(timeline: Timeline, *seconds: float) -> float:
    """Critical-path counts times seconds."""
    return sum(count * own for count, own in zip(timeline.runs[0].critical, seconds, strict=True))


@pytest.mark.parametrize(
    ("ops", "seconds", "total", "critical"),
    [
        ((op(),), (3,), 3, (1,)),
        ((op(SM), op(H2D, 0), op(SM, 1)), (1, 2, 4), 7, (1, 1, 1)),
        ((op(SM), op(H2D)), (3, 5), 5, (0, 1)),
        ((op(SM), op(SM)), (3, 5), 8, (1, 1)),
        ((op(SM, device=0), op(SM, device=1)), (3, 5), 5, (0, 1)),
        ((op(SM), op(SM, 0), op(H2D, 0)), (1, 2, 4), 5, (1, 0, 1)),
        ((op(SM), op(H2D), op(SM, 0, 1)), (1, 4, 2), 6, (0, 1, 1)),
        ((op(SM), op(H2D, 0), op(D2H, 0), op(SM, 1, 2)), (1, 2, 5, 1), 7, (1, 0, 1, 1)),
        ((op(H2D), op(SM, 0), op(H2D)), (2, 1, 4), 6, (1, 0, 1)),
    ],
    ids=["one", "chain", "two engines", "one engine", "two devices", "fork", "join", "diamond", "queue"],
)
def test_small_schedules(
    ops: tuple[Op, ...], seconds: tuple[float, ...], total: float, critical: tuple[float, ...]
) -> None:
    timeline = play(OpGraph(ops=ops), *seconds)
    assert timeline.total_s == total
    assert timeline.runs[0].critical == critical


def test_an_engine_serves_in_the_order_of_readiness() -> None:
    """Op 2 is ready at 1 and op 1 at 2; both want the copy engine, which is busy until 3."""
    late, early = op(H2D, 0, part="late"), op(H2D, 4, part="early")
    ops = (op(SM, part="first"), late, early, op(H2D, part="long"), op(D2H, part="gate"))
    timeline = play(OpGraph(ops=ops), 2, 1, 1, 3, 1, spans=True)
    starts = {span.op.part: span.start_s for span in timeline.spans()}
    assert starts == {"first": 0, "gate": 0, "long": 0, "early": 3, "late": 4}


@pytest.mark.parametrize("iterations", [1, 2, 3, 10, 11, 64, 1000])
@pytest.mark.parametrize(("copy", "kernel"), [(1, 4), (4, 1), (3, 3), (5, 10), (10, 10), (12, 10)])
def test_one_buffer_makes_copies_and_kernels_take_turns_and_two_hide_the_shorter(
    iterations: int, copy: float, kernel: float
) -> None:
    """A kernel of one stream waits for the combination before it: the longer of copy and kernels sets the pace."""
    one, two = (play(pipeline(iterations, buffers=buffers), copy, kernel) for buffers in (1, 2))
    assert (one.total_s, one.runs[0].critical) == (iterations * (copy + kernel), (iterations, iterations))
    hidden_s = copy + (iterations - 1) * max(copy, kernel) + kernel
    assert two.total_s == hidden_s
    stream = pipeline(iterations, buffers=2, combine=True, in_order=True)
    assert play(stream, copy, kernel - 0.5, 0.5).total_s == hidden_s


BOOL = st.booleans()
PIPELINES = st.builds(pipeline, st.integers(1, 70), buffers=st.sampled_from([1, 2]), combine=BOOL, in_order=BOOL)


@LAWS
@given(PIPELINES, st.tuples(SERVICE, SERVICE, SERVICE))
def test_an_extrapolated_pipeline_is_as_long_as_one_played_to_the_end(
    graph: OpGraph, drawn: tuple[float, float, float]
) -> None:
    seconds = drawn[: len(graph.ops)]
    extrapolated, played = play(graph, *seconds), play(graph, *seconds, spans=True)
    assert extrapolated.total_s == pytest.approx(played.total_s, rel=1e-9)
    assert critical_s(extrapolated, *seconds) == pytest.approx(extrapolated.total_s, rel=1e-9)
    assert min(extrapolated.runs[0].critical) >= 0


@st.composite
def graphs(draw: st.DrawFn) -> tuple[OpGraph, tuple[float, ...]]:
    """A graph of up to six ops on any engines of two devices, with any edges to earlier ops, and service times."""
    ops = []
    for index in range(draw(st.integers(1, 6))):
        after = draw(st.sets(st.integers(0, index - 1))) if index else set()
        engine, device = draw(st.sampled_from([SM, H2D, D2H])), draw(st.sampled_from([0, 1]))
        ops.append(op(engine, *sorted(after), part=str(index), device=device))
    edges = st.builds(Carried, st.integers(0, len(ops) - 1), st.integers(0, len(ops) - 1), st.integers(1, 3))
    iterations = draw(st.integers(min_value=1, max_value=5))
    graph = OpGraph(ops=tuple(ops), iterations=iterations, carried=tuple(draw(st.lists(edges, max_size=3))))
    return graph, tuple(draw(SERVICE) for _ in ops)


@LAWS
@given(graphs())
def test_a_critical_path_adds_up_no_engine_serves_two_calls_at_once_and_no_call_begins_too_early(
    graph: tuple[OpGraph, tuple[float, ...]],
) -> None:
    graph, seconds = graph
    timeline = play(graph, *seconds)
    assert critical_s(timeline, *seconds) == pytest.approx(timeline.total_s, rel=1e-9)
    busy: dict[tuple[int, Engine], float] = {}
    for own, place in zip(seconds, [(each.device, each.engine) for each in graph.ops], strict=True):
        busy[place] = busy.get(place, 0.0) + own * graph.iterations
    assert max(busy.values()) * (1 - 1e-9) <= timeline.total_s <= sum(busy.values()) * (1 + 1e-9)

    spans = list(play(graph, *seconds, spans=True).spans())
    assert len(spans) == len(graph.ops) * graph.iterations
    for place in {(span.op.device, span.op.engine) for span in spans}:
        served = sorted((span.start_s, span.end_s) for span in spans if (span.op.device, span.op.engine) == place)
        assert all(end <= start for (_, end), (start, _) in pairwise(served))
    if graph.iterations == 1:
        ends = {span.op: span.end_s for span in spans}
        assert all(span.start_s >= ends[graph.ops[need]] for span in spans for need in span.op.after)


def test_graphs_follow_each_other_and_repeat() -> None:
    program = (OpGraph(ops=(op(part="a"), op(H2D, part="b")), times=3), OpGraph(ops=(op(part="c"),), iterations=2))
    timeline = schedule(program, [(2, 5), (1,)], spans=True)
    assert timeline.total_s == 3 * 5 + 2 * 1
    spans = [(span.op.part, span.start_s, span.end_s) for span in timeline.spans()]
    assert spans[:4] == [("a", 0, 2), ("b", 0, 5), ("a", 5, 7), ("b", 5, 10)]
    assert spans[4:] == [("a", 10, 12), ("b", 10, 15), ("c", 15, 16), ("c", 16, 17)]
    assert schedule((), []).total_s == schedule((OpGraph(ops=()),), [()]).total_s == 0
    # H2D is independent and slower by a hair: 200 x 10.05 in the end, though the first iterations follow SM
    ahead = OpGraph(ops=(op(SM), op(D2H, 0), op(H2D)), iterations=200)
    assert play(ahead, 10.0, 1.0, 10.05).total_s == pytest.approx(2010)
    with pytest.raises(ValueError, match="in a circle"):
        play(OpGraph(ops=(op(SM, 1), op(D2H, 0))), 1.0, 1.0)
