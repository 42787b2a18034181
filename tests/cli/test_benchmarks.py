"""`twin calibrate --from` and `twin validate --from` as words: what is written, said and refused."""

import re
from pathlib import Path

import pytest

from tests.calibrate.benchmarks import files
from tests.cli.command import ANSWERED, WRONG_INPUT, assert_one_line, run

NAMED = ("--model", "qwen3.8-27b", "--kv-dtype", "exl3_k8v8")


@pytest.fixture
def printout(tmp_path: Path) -> Path:
    """Figures of one RTX 3090 at 220 W: Qwen3.6-27B at 6 bits under exllamav3 1.0.0, a cache of 8 bits."""
    return files.write(tmp_path / "perf.txt", files.printed({2048: 660.9, 32768: 247.1}, {2048: 17.12, 32768: 15.92}))


def test_a_card_is_calibrated_by_a_printout_and_asked_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, printout: Path
) -> None:
    me = str(tmp_path / "me.json")
    done = run(capsys, "calibrate", "--from", str(printout), "--hw", "3090", *NAMED, "-o", me)
    assert done.code == ANSWERED
    assert "linear/exllamav3/exl3 at 1 tokens" in done.out
    assert "one more run would teach" in done.out
    between = files.write(tmp_path / "rest.txt", files.printed({8192: 480.8}, {8192: 16.87}))
    told = run(capsys, "validate", "--from", str(between), "--hw", me, *NAMED)
    assert told.code == ANSWERED
    assert "2 rows, 0 outside" in told.out
    asked = run(capsys, "predict", "--hw", me, *NAMED, "--weights", "6bpw", "--engine", "exllamav3", "--ctx", "8k")
    assert asked.code == ANSWERED
    speed = re.search(r"decode +([\d.]+) tok/s \(([\d.]+) to ([\d.]+)\)", asked.out)
    assert speed is not None
    assert float(speed[1]) == pytest.approx(16.87, rel=0.01)
    assert float(speed[2]) < 16.87 < float(speed[3])


def test_several_files_follow_one_option(capsys: pytest.CaptureFixture[str], tmp_path: Path, printout: Path) -> None:
    other = files.write(tmp_path / "b.txt", "Context   8192:  16.87 tokens/s\n")
    words = ("--hw", "3090", *NAMED, "--weights", "6bpw")
    done = run(capsys, "validate", *words, "--from", str(printout), str(other), "--json")
    assert '"twin.validation/1"' in done.out
    assert done.out.count('"id"') == 5


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        ("calibrate --from {0} --device cpu -o {1}", "goes without --device"),
        ("calibrate --from {0} --quick -o {1}", "goes without --device"),
        ("calibrate --hw 3090 -o {1}", "--hw goes with --from"),
        ("calibrate --ctx 5 -o {1}", "--ctx goes with --from"),
        ("calibrate {0} -o {1}", "--from FILE..."),
        ("calibrate --from {0} -o {0} --hw 3090 --model qwen3.8-27b", "perf.txt"),
        ("calibrate --from {0} -o {1}", "--hw says it"),
        ("calibrate --from {0} --hw 3090 -o {1}", "--model says it"),
        ("calibrate --from {1} --hw 3090 -o {1}.b", "No such file"),
        ("validate --from {0} --recorded", "goes without --recorded"),
        ("validate --from {0} --device cpu", "goes without --recorded"),
        ("validate --chunk 512", "--chunk goes with --from"),
    ],
)
def test_words_that_do_not_go_together_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, printout: Path, words: str, piece: str
) -> None:
    before = printout.read_text(encoding="utf-8")
    done = run(capsys, *words.format(printout, tmp_path / "me.json").split())
    assert_one_line(done, WRONG_INPUT, piece)
    assert not (tmp_path / "me.json").exists()
    assert printout.read_text(encoding="utf-8") == before


def test_a_refusal_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cut = files.write(tmp_path / "cut.json", '[{"n_prompt": 512, "n_gen"')
    done = run(capsys, "validate", "--from", str(cut), "--json")
    assert done.code == WRONG_INPUT
    assert '"BadFile"' in done.out
    assert "cut short" in done.out
