"""Lists of what is shipped, formats on a machine, help for every command, and completion for shells."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import pytest
from msgspec.structs import replace

import cli
from hwprofiles import load_profile, profile_names
from tests.cli.command import ANSWERED, CANNOT_WRITE, CHILD, WRONG_INPUT, assert_one_line, run
from tests.cli.test_answers import asked
from twin.layouts import layout_names
from twin.models import model_names

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("command", "names"),
    [("profiles", profile_names()), ("models", model_names()), ("layouts", layout_names())],
    ids=["profiles", "models", "layouts"],
)
def test_a_list_names_everything_that_is_shipped(capsys: Capture, command: str, names: list[str]) -> None:
    done = run(capsys, command)
    assert (done.code, done.err) == (ANSWERED, "")
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == names
    assert [row["name"] for row in asked(capsys, command)] == names


def test_a_machine_is_shown_whole_and_can_be_used_as_a_file(capsys: Capture, tmp_path: Path) -> None:
    done = run(capsys, "profiles", "3x-rtx3090")
    assert (done.code, done.err) == (ANSWERED, "")
    assert done.out.startswith("3x-rtx3090: ")
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(asked(capsys, "profiles", "3x-rtx3090")), encoding="utf-8")
    assert asked(capsys, "predict", "--hw", str(copy)) == asked(capsys, "predict")


@pytest.mark.parametrize(
    ("name", "weights"),
    [("qwen3.8-flash-next", ()), ("llama-3.1-8b", ()), ("qwen3.5-27b", ()), ("qwen3-8b", ("--weights", "awq"))],
)
def test_a_saved_model_predicts_what_the_model_does(
    capsys: Capture, tmp_path: Path, name: str, weights: tuple[str, ...]
) -> None:
    path = tmp_path / "mine.json"
    shown = run(capsys, "models", name, *weights)
    saved = run(capsys, "models", name, *weights, "--save", str(path))
    assert (saved.code, saved.err, saved.out) == (ANSWERED, "", shown.out)
    again = run(capsys, "models", str(path)).out
    assert again.partition("follows from")[0] == shown.out.partition("follows from")[0]
    question = ("--ctx", "8k", "--hw", "h200", "--engine", "twin")
    mine, its = (asked(capsys, "predict", "--model", *model, *question) for model in ((str(path),), (name, *weights)))
    for answer in (mine, its):
        answer["question"].pop("model")
    assert mine == its


def test_options_about_one_model_need_one_and_a_file_that_cannot_be_written_is_told(
    capsys: Capture, tmp_path: Path
) -> None:
    for option in (("--weights", "awq"), ("--save", str(tmp_path / "x.json"))):
        assert_one_line(run(capsys, "models", *option), WRONG_INPUT, "--weights and --save need the name of a model")
    nowhere = str(tmp_path / "no" / "x.json")
    assert_one_line(run(capsys, "models", "phi-4", "--save", nowhere), CANNOT_WRITE, f"cannot write {nowhere}")
    assert_one_line(run(capsys, "models", "phi-4", "--weights", "q9"), WRONG_INPUT, "--weights: 'q9' is not known")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_no_engine_loads_are_refused_with_what_to_ask_and_counted_where_one_is_named(
    capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    run(capsys, "models", "qwen3-8b", "--save", str(path))
    path.write_text(path.read_text(encoding="utf-8").replace('"bf16"', '"mlx"'), encoding="utf-8")
    question = ("predict", "--model", str(path), "--ctx", "8k", "--hw", "h200")
    assert_one_line(run(capsys, *question), WRONG_INPUT, "no engine here loads qwen3-8b in mlx (--engine NAME counts")
    answer = asked(capsys, *question, "--engine", "vllm")
    assert answer["fits"]
    assert "vllm does not load mlx weights: memory is counted as if it did" in answer["notes"]
    assert {"linear/vllm/mlx": "typical"}.items() <= {
        source["rate"].partition("#")[0]: source.get("rung") for source in answer["sources"]
    }.items()
    assert asked(capsys, *question, "--weights", "bf16")["decode"]


@pytest.mark.parametrize("command", ["", *cli.twin.commands])
def test_help_is_there_for_every_command_and_option(capsys: Capture, command: str) -> None:
    done = run(capsys, *command.split(), "-h")
    assert (done.code, done.err) == (ANSWERED, "")
    assert done.out.startswith(" ".join(["Usage: twin", *command.split(), "["]))
    options = [each for each in cli.twin.commands[command].params if isinstance(each, click.Option)] if command else []
    assert all(option.help for option in options)
    flags = [flag for option in options for flag in option.opts]
    assert len(set(flags)) == len(flags)
    if not command:
        assert run(capsys, "--version").out == f"twin, version {version('kv-twin')}\n"
        assert run(capsys).out == done.out
        listed = done.out.partition("Commands:")[2].partition("Exit codes:")[0]
        assert {line.split()[0] for line in listed.splitlines() if line.strip()} == set(cli.twin.commands)
        assert "..." not in listed  # no line about a command is cut short


@pytest.mark.parametrize("columns", [20, 40, 80, 300])
@pytest.mark.parametrize("command", ["", "predict", "simulate"])
def test_help_is_as_narrow_as_the_terminal_down_to_50_columns(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    text, _, _ = run(capsys, *command.split(), "-h").out.partition("  Exit codes:")
    lines = [line for line in text.splitlines() if not line.startswith("    twin ")]  # examples
    assert max(map(len, lines)) <= max(50, min(columns, 110))


def test_completion_prints_a_script_that_asks_twin(capsys: Capture) -> None:
    for shell in ("bash", "zsh", "fish"):
        done = run(capsys, "completion", shell)
        assert (done.code, done.err, f"_TWIN_COMPLETE={shell}_complete" in done.out) == (ANSWERED, "", True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("twin pre", {"predict"}),
        ("twin predict --layout ", set(layout_names())),
        ("twin predict --hw h1", {"h100-pcie", "h100-sxm"}),
        ("twin predict --pcie x", {"x16", "x8", "x4", "x2", "x1"}),
        ("twin models ", set(model_names())),
        ("twin formats kvarn_k4v2", {"kvarn_k4v2_g64", "kvarn_k4v2_g128"}),
        ("twin simulate --model llama-3.1-8", {"llama-3.1-8b"}),
        ("twin predict --backend flash", {"flash_attention", "flash_attention_2", "flashinfer"}),
    ],
)
def test_a_shell_is_offered_names(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    asked_by_bash = {"_TWIN_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    environment = os.environ | asked_by_bash
    done = subprocess.run(CHILD, env=environment, capture_output=True, text=True, check=True)
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile with rates of bf16, fp8 and int4 kernels, in a file."""
    path = tmp_path_factory.mktemp("machines") / "toy.json"
    known = load_profile("h200")
    keys = [f"attend_decode/twin/{name}" for name in ("bf16", "fp8", "int4_per_token_head")]
    toy = replace(known, name="toy", kernels={key: known.kernels[key] for key in keys})
    path.write_bytes(msgspec.json.encode(toy))
    return str(path)


def test_every_format_has_a_line_and_kernels_of_another_machine_are_named(capsys: Capture, measured: str) -> None:
    done = run(capsys, "formats", "--hw", measured)
    assert (done.code, done.err) == (ANSWERED, "")
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("  ")}
    assert "dequantisation" in lines["int4_per_token_head"]
    assert "VRAM bandwidth" in lines["fp8"]
    (told,) = (line for line in done.out.splitlines() if "Not measured on toy" in line)
    assert "q4_0" in told
    assert "are those of h200" in told
    assert "fp8," not in told
    answer = asked(capsys, "formats", "--hw", measured)
    assert answer["schema"] == "twin.crossover/1"
    assert {"fp8", "int4_per_token_head"} <= {line["kv_dtype"] for line in answer["lines"]} - set(answer["carried"])
    (line,) = (line for line in answer["lines"] if line["kv_dtype"] == "fp8")
    assert [crossing["batch"] for crossing in line["crossings"]] == [1, 4, 16]
    assert 0 < line["ratio"] < 1


def test_a_machine_that_nobody_measured_is_refused_or_told_whose_kernels_these_are(capsys: Capture) -> None:
    done = run(capsys, "formats", "--hw", "rtx3090")
    if done.code == ANSWERED:
        assert "Not measured on rtx3090 (bf16, " in done.out
    else:
        assert_one_line(done, WRONG_INPUT, "no machine has a rate for attend_decode/twin/bf16")


def test_how_far_borrowed_rates_are_off_is_listed_by_rung_and_group(capsys: Capture) -> None:
    told = asked(capsys, "profiles", "--rungs")
    assert told["schema"] == "twin.rungs/1"
    assert told["spreads"].keys() == {"carried", "typical"}
    text = run(capsys, "profiles", "--rungs")
    assert (text.code, text.err) == (ANSWERED, "")
    for rung, spreads in told["spreads"].items():
        for group, own in spreads.items():
            assert f"{rung}  {group} " in text.out
            assert 0 < own["spread"] <= 1
    for row in told["judged"]:
        assert 0 <= row["coverage"] <= 1
        assert f"{row['rung']}  {row['of']} " in text.out


def test_rungs_are_of_all_machines(capsys: Capture) -> None:
    assert_one_line(run(capsys, "profiles", "h200", "--rungs"), WRONG_INPUT, "--rungs is of all machines")
