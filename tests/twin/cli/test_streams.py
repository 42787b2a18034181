"""Streams take every byte or say that they could not, whatever is behind them."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from twin.cli.outputs import Whole, text_into
from twin.errors import CannotWrite

TEXT = "line: ü, 日本\n" * 20_000


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heard: list[bytes] = []
    with os.fdopen(reader, "rb") as stream:
        listener = threading.Thread(target=lambda: heard.append(stream.read()))
        listener.start()
        with text_into(Whole(writer, "it")) as out:
            out.write(TEXT)
        listener.join()
    assert heard == [TEXT.encode()]


def test_what_is_taken_in_part_is_written_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system may take one byte at a time."""
    path = tmp_path / "file"
    whole = Whole.write
    monkeypatch.setattr(Whole, "write", lambda self, data: whole(self, bytes(data)[:1]))
    with text_into(Whole(os.open(path, os.O_WRONLY | os.O_CREAT), path)) as out:
        out.write(TEXT[:100])
    assert path.read_text(encoding="utf-8") == TEXT[:100]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_once_and_names_what_was_written() -> None:
    raw = Whole(os.open("/dev/full", os.O_WRONLY), "the list")
    with text_into(raw) as out:
        with pytest.raises(CannotWrite, match="cannot write the list: No space left on device"):
            out.write(TEXT)
        assert raw.write(b"more") == 4


def test_a_pipe_without_a_reader_stays_a_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = text_into(Whole(writer, "it"))
    with pytest.raises(BrokenPipeError):
        out.write(TEXT)
    out.close()


def test_a_name_that_is_no_text_is_spelled_out() -> None:
    kept = io.BytesIO()
    out = text_into(kept, encoding="ascii")  # type: ignore[arg-type]
    out.write("a\udcff ü")
    out.flush()
    assert kept.getvalue() == b"a\\udcff \\xfc"


FILES = """
import os, pathlib, sys
from twin.cli.outputs import standard_streams
with standard_streams():
    file = open(sys.argv[1], "w")
    assert file.fileno() > 2, file.fileno()
    sys.stderr.write("a remark\\n")
    sys.stderr.flush()
    try:
        sys.stdout.write("an answer\\n")
        sys.stdout.flush()
    except OSError as wrong:
        file.write(str(wrong))
"""


@pytest.mark.parametrize("shut", ["", "<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path: Path, shut: str) -> None:
    file = tmp_path / "file"
    shell = ["sh", "-c", f'exec "$@" {shut}', "sh", sys.executable, "-c", FILES, str(file)]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "" if "2>" in shut else "a remark\n")
    closed = " >" in f" {shut}"
    assert done.stdout == ("" if closed else "an answer\n")
    assert file.read_text(encoding="utf-8") == ("cannot write standard output: Bad file descriptor" if closed else "")
