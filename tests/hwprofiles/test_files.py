"""A data file is read whole, within bounds, or refused in one line."""

import os
import threading
import time
from pathlib import Path

import pytest

from hwprofiles import files
from hwprofiles.errors import BadFile
from hwprofiles.files import read_whole

NEEDS_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
TEXT = b"some text\n" * 30_000  # more than a pipe holds


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_file_is_read_to_its_end_which_is_at_most_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Path(files.__file__).parent.glob("**/*.json")
    assert max(path.stat().st_size for path in shipped) < files.MOST_BYTES / 4
    monkeypatch.setattr(files, "MOST_BYTES", len(TEXT))
    path = tmp_path / "file"
    for content in (TEXT, b""):
        path.write_bytes(content)
        assert read_whole(path) == content
    path.write_bytes(TEXT + b".")
    with pytest.raises(BadFile, match="file: longer than 300,000 bytes"):
        read_whole(path)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("/dev/zero", "a device, not a file"),
        (os.devnull, "a device, not a file"),
        (os.curdir, "Is a directory"),
        ("nowhere", "No such file or directory"),
        ("a" * 300, "File name too long"),
    ],
)
def test_what_is_no_file_is_refused(where: str, says: str) -> None:
    with pytest.raises(BadFile) as refused:
        read_whole(Path(where))
    assert refused.value.message == f"{where}: cannot be read: {says}"


@NEEDS_PIPES
def test_a_pipe_is_read_to_its_end_however_slowly_it_is_written(pipe: Path) -> None:
    def write() -> None:
        time.sleep(0.05)  # the reader is there first
        with pipe.open("wb") as out:
            for begin in range(0, len(TEXT), 100_000):
                out.write(TEXT[begin : begin + 100_000])
                out.flush()
                time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_whole(pipe) == TEXT
    writer.join()


@NEEDS_PIPES
@pytest.mark.parametrize("held", [False, True], ids=["has open", "writes"])
def test_a_pipe_that_nobody(pipe: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    monkeypatch.setattr(files, "LONGEST_WAIT_S", 0.1)
    ends = [os.open(pipe, os.O_RDWR)] if held else []
    with pytest.raises(BadFile, match="pipe: a pipe that nobody wrote to for"):
        read_whole(pipe)
    for end in ends:
        os.close(end)
