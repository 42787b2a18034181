"""Rows of a table are the file's own bytes from every source; what is not there is refused."""

from pathlib import Path

import pytest
import torch

from realkernels.caches.host_memory import PAGE_BYTES
from realkernels.timed.disk_rows import SOURCES, ReadRows, RowFile, Source, open_table

ROWS, ROW_BYTES, OFFSET = 5003, 102, 37


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> RowFile:
    """A table whose rows do not divide pages, behind a header that does not divide anything."""
    path = tmp_path_factory.mktemp("rows") / "table.bin"
    content = torch.randint(256, (OFFSET + ROWS * ROW_BYTES,), generator=torch.Generator().manual_seed(1))
    path.write_bytes(bytes(content.tolist()))
    return RowFile(path=path, rows=ROWS, row_bytes=ROW_BYTES, offset=OFFSET)


@pytest.mark.parametrize("source", SOURCES)
def test_random_rows_are_the_files_bytes(table: RowFile, source: Source) -> None:
    random = torch.randint(ROWS, (333,))
    wanted = torch.cat([random, random[:5], torch.tensor([0, ROWS - 1])])  # with repeats, the first and the last
    with open_table(table, source, threads=3) as opened:
        opened.forget()
        for request in (wanted, wanted[:1], wanted[:0]):
            found = opened.read(request)
            assert found.shape == (len(request), ROW_BYTES)
            assert [bytes(row.tolist()) for row in found] == table.reference_rows(request)


@pytest.mark.parametrize("source", SOURCES)
def test_rows_that_are_not_there_are_refused(table: RowFile, source: Source) -> None:
    with open_table(table, source) as opened:
        for row in (-1, ROWS):
            with pytest.raises(IndexError, match="out of range 0 to 5002"):
                opened.read(torch.tensor([3, row]))
        for request in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32)):
            with pytest.raises(ValueError, match="a request is int64"):
                opened.read(request)


def test_a_request_costs_its_distinct_pages(table: RowFile) -> None:
    """Rows 0 to 38 lie in the first 4,096 bytes, row 39 (bytes 4,015 to 4,116) across the first two pages."""
    assert table.pages(torch.tensor([], dtype=torch.int64)) == 0
    assert table.pages(torch.tensor([0, 5, 38])) == 1
    assert table.pages(torch.tensor([39])) == 2
    assert table.pages(torch.arange(ROWS)) == -(-(OFFSET + ROWS * ROW_BYTES) // 4096)
    wide = RowFile(path=table.path, rows=50, row_bytes=10_000)
    assert wide.pages(torch.tensor([0])) == 3
    assert wide.pages(torch.tensor([0, 1])) == 5


def test_files_that_are_too_short_are_refused(table: RowFile) -> None:
    with pytest.raises(ValueError, match="the table ends at"):
        RowFile(path=table.path, rows=ROWS + 1, row_bytes=ROW_BYTES, offset=OFFSET)
    for change in ({"rows": 0}, {"row_bytes": 0}, {"offset": -1}):
        with pytest.raises(ValueError, match="no table"):
            RowFile(**({"path": table.path, "rows": 1, "row_bytes": 1} | change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no source 'tape'"), open_table(table, "tape"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("source", ["mmap", "pread"])
def test_nothing_stays_open(table: RowFile, source: Source) -> None:
    def held() -> bool:
        links = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return table.path in links or str(table.path) in Path("/proc/self/maps").read_text()

    with open_table(table, source) as opened:
        opened.read(torch.tensor([1]))
        assert held()
    assert not held()
    with pytest.raises(KeyError), open_table(table, source):
        raise KeyError
    assert not held()


def test_a_file_that_shrinks_is_an_error_not_garbage(tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(1000))
    file = RowFile(path=path, rows=10, row_bytes=100)
    with open_table(file, "pread", threads=2) as opened:
        path.write_bytes(bytes(550))
        with pytest.raises(OSError, match="50 of 100 bytes"):
            opened.read(torch.tensor([0, 5]))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_reading_rows_is_timed_and_checked(table: RowFile, source: Source, warm: bool) -> None:
    with open_table(table, source) as opened:
        timed = ReadRows(opened, reads=37, warm=warm)
        assert not timed.finite()
        assert timed.verify() == 0
        assert timed.finite()
        cold = source != "ram" and not warm
        assert timed.moved_bytes == (table.pages(timed.wanted) * PAGE_BYTES if cold else 37 * ROW_BYTES)
        timed.output[3, 5] += 1
        assert timed.error() == float("inf")
