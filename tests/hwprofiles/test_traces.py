"""Every row of the table of layouts can be told from the others, and names each thing once."""

import pytest

from hwprofiles.recognition import kind_of_head
from hwprofiles.traces import JSON_LINES, PROMPTS, TABLES, TraceLayout

ALL = (JSON_LINES, *TABLES, *PROMPTS)


def test_names_tell_layouts_apart() -> None:
    assert len({layout.name for layout in ALL}) == len(ALL)


@pytest.mark.parametrize("layout", TABLES, ids=lambda layout: layout.name)
def test_columns_are_written_small_and_a_header_of_marks_is_recognised_and_has_lengths(layout: TraceLayout) -> None:
    named = (*layout.arrival, *layout.prompt, *layout.output, *layout.id, *(name for name, _ in layout.only))
    assert all(name == name.lower() for name in named)
    for marks in layout.marks:
        header = ",".join(name.title() for name in marks) + "\n"
        assert kind_of_head(header.encode()) == layout.name
        assert set(marks) & set(layout.prompt)
        assert set(marks) & set(layout.output)


@pytest.mark.parametrize("layout", PROMPTS, ids=lambda layout: layout.name)
def test_prompts_say_nothing_of_time_and_lie_under_a_key_that_marks_them(layout: TraceLayout) -> None:
    assert not layout.arrival
    keys = {key for marks in layout.marks for key in marks}
    assert {path.partition(".")[0] for path in layout.prompt} <= keys
