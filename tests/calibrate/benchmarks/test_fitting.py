"""Files made of the twin's own predictions on a machine whose shares are known give them back; others are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.benchmarks.asking import Asked, Evidence, evidence
from calibrate.benchmarks.comparing import compare_points
from calibrate.benchmarks.fitting import Fitted, fit
from calibrate.benchmarks.points import Given, Point
from calibrate.benchmarks.predicted import breakdown_of, seconds_of, told_of
from calibrate.benchmarks.summary import calibrate_from, outcome_text
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import Kernel
from tests.calibrate.benchmarks import files
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.cost.roofline import Roofs
from twin.errors import BadFile, BadValue, Impossible, TwinError
from twin.prediction import predict

LLAMA = Given(hw="h200", model="llama-3.1-8b", engine="vllm", kv_dtype="bf16", weights="bf16")
H200 = {"gpu_info": "NVIDIA H200"}


def slower(machine: HardwareProfile, factors: dict[str, float]) -> HardwareProfile:
    """The machine with the shares of some kernels changed."""
    kernels: dict[str, Kernel] = dict(machine.kernels)
    for key, factor in factors.items():
        curve = kernels[key].efficiency
        assert curve is not None
        shares = tuple(factor * share for share in curve.efficiency)
        kernels[key] = replace(kernels[key], efficiency=replace(curve, efficiency=shares))
    return replace(machine, kernels=kernels)


def measured(machine: HardwareProfile, point: Point, question: Question) -> float:
    """What a benchmark measures where the twin is right."""
    return seconds_of(Asked(point, settled(question, machine)[0]), machine)


def llama_tests(machine: HardwareProfile, sizes: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Rows of llama-bench by (prompt tokens, steps, depth), as long as the twin says on `machine`."""
    rows = []
    for prompt, steps, depth in sizes:
        question = Question(
            ctx_tokens=max(1, prompt + steps + depth), model="llama-3.1-8b", engine="vllm", kv_dtype="bf16",
            hw=machine.name, chunk_tokens=512,
        )  # fmt: skip
        metric: Any = "latency" if prompt and steps else "prefill" if prompt else "step"
        point = Point(id="", metric=metric, seconds=1, kv_tokens=depth, prompt_tokens=prompt, steps=steps)
        seconds = measured(machine, point, question) * (steps if metric == "step" else 1)
        rows.append(files.llama_row(n_prompt=prompt, n_gen=steps, n_depth=depth, seconds=seconds, **H200))
    return rows


def shares(fitted: Fitted) -> dict[str, Any]:
    """Places of the shares that were fitted, by kernel: all but what the host takes for a step."""
    return {key: each.places for each in fitted.parameters for key in each.kernels if each.places is not None}


CURVE = [(0, 128, depth) for depth in (0, 4096, 16384, 65536, 131072 - 256)]
SHARES = {"linear/library/bf16": 0.8, "attend_decode/fa3/bf16": 0.6}


def test_two_depths_give_the_shares_back_and_the_rest_of_the_curve(tmp_path: Path) -> None:
    truth = slower(load_profile("h200"), SHARES)
    rows = llama_tests(truth, CURVE)
    some = files.write(tmp_path / "some.jsonl", [rows[0], rows[3]])
    outcome = calibrate_from([some], LLAMA, name=None, output=tmp_path / "me.json")
    assert shares(outcome.fitted).keys() == set(SHARES)
    others = files.write(tmp_path / "others.jsonl", [rows[1], rows[2], rows[4]])
    told = compare_points(evidence([others], replace(LLAMA, hw=str(tmp_path / "me.json"))))
    errors = [abs(case.error or 1.0) for case in told.cases]
    assert len(errors) == 3
    assert max(errors) < 0.015
    assert all(case.covered and case.role == "held_out" for case in told.cases)


def test_a_prompt_sets_the_products_of_many_tokens_and_steps_those_of_one(tmp_path: Path) -> None:
    truth = slower(load_profile("h200"), {"linear/library/bf16": 0.7})
    path = files.write(tmp_path / "a.jsonl", llama_tests(truth, [(512, 0, 0)]))
    assert shares(fit(evidence([path], LLAMA)))["linear/library/bf16"] == (512, 512)
    path = files.write(tmp_path / "a.jsonl", llama_tests(truth, [(0, 128, 0)]))
    assert shares(fit(evidence([path], LLAMA)))["linear/library/bf16"] == (1, 1)


def test_what_points_say_nothing_of_stays_as_it_was(tmp_path: Path) -> None:
    before = load_profile("h200")
    truth = slower(before, {"linear/library/bf16": 0.7})
    path = files.write(tmp_path / "a.jsonl", llama_tests(truth, [(0, 128, 0)]))
    calibrate_from([path], LLAMA, name="mine", output=tmp_path / "me.json")
    after = load_profile(str(tmp_path / "me.json"))
    assert after.name == "mine"
    own = {key: kernel for key, kernel in after.kernels.items() if key in before.kernels}
    changed = {key for key, kernel in own.items() if kernel.efficiency != before.kernels[key].efficiency}
    assert changed == {"linear/library/bf16"}
    (one, many), (was_one, was_many) = (
        [kernels["linear/library/bf16"].efficiency(tokens) for tokens in (1, 4096)]  # type: ignore[misc]
        for kernels in (after.kernels, before.kernels)
    )
    assert one == pytest.approx(0.7 * was_one, rel=0.05)  # the host's part of a step takes the rest
    assert many == was_many


def test_the_interval_is_that_of_the_benchmark_where_it_speaks_and_wide_elsewhere(tmp_path: Path) -> None:
    rows = llama_tests(load_profile("h200"), [(0, 128, 0), (0, 128, 65536)])
    calibrate_from([files.write(tmp_path / "a.jsonl", rows)], LLAMA, name=None, output=tmp_path / "me.json")
    (decode, _) = evidence([tmp_path / "a.jsonl"], replace(LLAMA, hw=str(tmp_path / "me.json"))).asked
    machine = load_profile(str(tmp_path / "me.json"))
    told = told_of(decode, machine)
    assert told.high / told.low < 1.1
    prompt = decode._replace(point=replace(decode.point, metric="prefill", prompt_tokens=2048, steps=0))
    told = told_of(prompt, machine)
    assert told.high / told.low > 1.3


def test_a_point_that_set_a_rate_is_no_evidence_for_it(tmp_path: Path) -> None:
    rows = llama_tests(load_profile("h200"), CURVE[:2])
    path = files.write(tmp_path / "a.jsonl", rows[:1])
    calibrate_from([path], LLAMA, name=None, output=tmp_path / "me.json")
    files.write(path, rows)
    told = compare_points(evidence([path], replace(LLAMA, hw=str(tmp_path / "me.json"))))
    assert [case.role for case in told.cases] == ["fit", "held_out"]


def test_a_fit_over_a_profile_of_one_s_own_keeps_what_that_had(tmp_path: Path) -> None:
    truth = slower(load_profile("h200"), {"linear/library/bf16": 0.7})
    first = files.write(tmp_path / "a.jsonl", llama_tests(truth, [(0, 128, 0)]))
    second = files.write(tmp_path / "b.jsonl", llama_tests(truth, [(512, 0, 0)]))
    me = tmp_path / "me.json"
    calibrate_from([first], LLAMA, name=None, output=me)
    once = load_profile(str(me)).kernels["linear/library/bf16"].efficiency
    calibrate_from([second], replace(LLAMA, hw=str(me)), name=None, output=me)
    twice = load_profile(str(me)).kernels["linear/library/bf16"].efficiency
    truly = truth.kernels["linear/library/bf16"].efficiency
    assert once is not None
    assert twice is not None
    assert truly is not None
    assert twice(1) == once(1) == pytest.approx(truly(1), rel=0.05)
    assert twice(512) == pytest.approx(truly(512), rel=0.03)


def test_an_assumed_roof_rises_where_no_share_of_it_is_enough(tmp_path: Path) -> None:
    machine = load_profile("rtx4090")
    peak = machine.gpu.tensor["bf16"].datasheet.value
    model = settled(Question(ctx_tokens=512, model="llama-3.1-8b", engine="vllm", hw="rtx4090"), None)[0].model
    active = sum(count for part, count in model.parameters.items() if part not in ("embedding", "head"))
    row = files.llama_row(n_prompt=512, seconds=2 * active * 512 / (0.9 * peak), gpu_info="NVIDIA GeForce RTX 4090")
    given = Given(model="llama-3.1-8b", engine="vllm", kv_dtype="bf16", weights="bf16")
    calibrate_from([files.write(tmp_path / "a.json", [row])], given, name=None, output=tmp_path / "me.json")
    roof = load_profile(str(tmp_path / "me.json")).gpu.tensor["bf16"]
    assert machine.gpu.tensor["bf16"].rate.value < 0.9 * peak < roof.rate.value <= peak
    assert roof.rate.source == "fitted"


def test_served_requests_set_what_their_steps_hang_on(tmp_path: Path) -> None:
    truth = slower(load_profile("h200"), {"linear/library/bf16": 0.8})
    question = Question(ctx_tokens=1088, model="llama-3.1-8b", engine="vllm", hw="h200", max_sequences=4)
    point = Point(id="", metric="served", seconds=1, prompt_tokens=1024, steps=64, batch=4, requests=8)
    row = files.SERVE | {"max_concurrency": 4, "duration": measured(truth, point, question)}
    found = evidence([files.write(tmp_path / "a.json", row)], Given(hw="h200"))
    fitted = fit(found)
    assert "linear/library/bf16" in {key for parameter in fitted.parameters for key in parameter.kernels}
    assert fitted.after[0] == pytest.approx(found.asked[0].point.seconds, rel=0.005)


def test_chunks_after_others_add_up_to_the_longer_prompt_less_the_shorter() -> None:
    question = Question(ctx_tokens=8192, model="llama-3.1-8b", engine="vllm", hw="h200", chunk_tokens=512)
    case, roofs = settled(question, None)[0], Roofs(load_profile("h200"), strict=False)

    def seconds(kv_tokens: int, tokens: int) -> float:
        point = Point(id="", metric="prefill", seconds=1, kv_tokens=kv_tokens, prompt_tokens=tokens)
        return breakdown_of(Asked(point, case), roofs).seconds

    assert seconds(4096, 4096) == pytest.approx(seconds(0, 8192) - seconds(0, 4096), rel=1e-3)
    assert seconds(4096, 16384) == pytest.approx(seconds(0, 20480) - seconds(0, 4096), rel=1e-3)


def test_points_are_predicted_as_questions_are() -> None:
    question = Question(ctx_tokens=4096, model="llama-3.1-8b", engine="vllm", hw="h200")
    (case, machine), told = settled(question, None), predict(question)
    assert told.decode is not None
    assert told.prefill is not None
    assert told.ttft_s is not None
    step = Point(id="", metric="step", seconds=1, kv_tokens=4096, steps=1)
    prefill = Point(id="", metric="prefill", seconds=1, prompt_tokens=4096)
    first = replace(prefill, metric="ttft")
    for point, quantity in ((step, told.decode.seconds), (prefill, told.prefill.seconds), (first, told.ttft_s)):
        mine = told_of(Asked(point, case), machine)
        assert (mine.seconds, mine.low, mine.high) == pytest.approx(tuple(quantity))


def test_advice_is_of_the_kind_of_run_that_was_not_made(tmp_path: Path) -> None:
    path = files.write(tmp_path / "a.jsonl", llama_tests(load_profile("h200"), CURVE))
    outcome = calibrate_from([path], LLAMA, name=None, output=tmp_path / "me.json")
    assert outcome.next is not None
    assert outcome.next.worth_while
    assert outcome.next.command.startswith("vllm bench latency --input-len ")
    assert outcome.next.command in outcome_text(outcome)


# What is refused


def refused(tmp_path: Path, rows: list[dict[str, Any]], given: Given = LLAMA) -> TwinError:
    """The refusal of a calibration, after which nothing lies there."""
    path, output = files.write(tmp_path / "bad.jsonl", rows), tmp_path / "me.json"
    with pytest.raises(TwinError) as wrong:
        calibrate_from([path], given, name=None, output=output)
    assert not output.exists()
    assert wrong.value.exit_code == 2
    return wrong.value


STEP = files.llama_row(n_gen=128, seconds=0.7, **H200)


def test_two_figures_of_one_question_that_contradict_each_other_are_told_with_both(tmp_path: Path) -> None:
    twice = [STEP, files.llama_row(n_gen=128, seconds=0.9, **H200)]
    assert "5.47 ms and bad.jsonl:2" in str(refused(tmp_path, twice))
    near = [STEP, files.llama_row(n_gen=128, seconds=0.72, **H200)]
    assert fit(evidence([files.write(tmp_path / "a.jsonl", near)], LLAMA)).parameters


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"gpu_info": "NVIDIA GeForce RTX 3090"}, "different machines: NVIDIA H200 and NVIDIA GeForce RTX 3090"),
        ({"model_filename": "/m/Qwen3-8B-Q4_K_M.gguf"}, "different models"),
        ({"model_n_params": 8_190_735_360}, "different sizes of model"),
    ],
)
def test_files_of_two_machines_or_models_are_no_evidence_together(
    tmp_path: Path, other: dict[str, Any], what: str
) -> None:
    assert what in str(refused(tmp_path, [STEP, STEP | {"n_depth": 4096} | other]))


def test_a_time_below_what_physics_allows_is_refused_with_the_floor(tmp_path: Path) -> None:
    wrong = refused(tmp_path, [files.llama_row(n_gen=128, seconds=0.1, **H200)])
    assert isinstance(wrong, BadFile)
    assert "less than h200 can" in str(wrong)


@pytest.mark.parametrize(
    ("given", "kind", "what"),
    [
        (replace(LLAMA, hw="rtx3090"), BadValue, "the files are of NVIDIA H200"),
        (replace(LLAMA, hw="2x-h200"), BadValue, "--hw 2x-h200 has 2"),
        (replace(LLAMA, model=None), BadValue, "which is not here"),
        (replace(LLAMA, model="qwen3.8-27b"), BadValue, "the files are of llama 8B"),
        (replace(LLAMA, batch=0), BadValue, "--batch"),
        (replace(LLAMA, kv_dtype="fp8", engine="exllamav3"), TwinError, ""),
    ],
)
def test_options_that_do_not_go_with_the_files_are_refused(
    tmp_path: Path, given: Given, kind: type[TwinError], what: str
) -> None:
    wrong = refused(tmp_path, [STEP], given)
    assert isinstance(wrong, kind)
    assert what in str(wrong)


def test_what_a_file_does_not_say_and_no_option_says_is_asked_for_in_one_line(tmp_path: Path) -> None:
    printout = files.write(tmp_path / "a.txt", files.printed({256: 500.0}, {0: 17.0}))
    for given, option in ((Given(), "--hw"), (Given(hw="rtx3090"), "--model")):
        with pytest.raises(BadValue) as wrong:
            evidence([printout], given)
        assert option in wrong.value.hint


def test_flags_that_cannot_be_asked_about_are_refused(tmp_path: Path) -> None:
    wrong = refused(tmp_path, [STEP | {"tensor_buft_overrides": "exps=CPU"}])
    assert isinstance(wrong, Impossible)
    assert "exps=CPU" in str(wrong)


def test_a_gguf_that_lies_where_the_file_says_is_read(tmp_path: Path) -> None:
    from tests.twin.models.gguf.shapes import MODELS
    from tests.twin.models.gguf.written import write

    model = next(iter(MODELS.values()))
    path = write(tmp_path / "m.gguf", *model)
    row = STEP | {"model_filename": str(path), "model_n_params": 0}
    found = evidence([files.write(tmp_path / "a.jsonl", [row])], replace(LLAMA, model=None, weights=None))
    assert found.asked[0].case.question.model == str(path)
    assert found.asked[0].case.question.weights is None


def test_a_written_profile_is_json_that_names_what_it_stands_on(tmp_path: Path) -> None:
    path = files.write(tmp_path / "a.jsonl", llama_tests(load_profile("h200"), [(0, 128, 0)]))
    calibrate_from([path], LLAMA, name=None, output=tmp_path / "me.json")
    document = json.loads((tmp_path / "me.json").read_text(encoding="utf-8"))
    assert document["extends"] == "h200"
    share = document["kernels"]["linear/library/bf16"]["efficiency"]
    assert share["fitted_on"] == ["a.jsonl:1 tg128@d0"]
    assert all(spread is None or math.isfinite(spread) for spread in share["spreads"])


def test_evidence_names_its_machine_by_its_cards(tmp_path: Path) -> None:
    row = STEP | {"gpu_info": "NVIDIA GeForce RTX 3090, NVIDIA GeForce RTX 3090"}
    found: Evidence = evidence([files.write(tmp_path / "a.json", [row])], replace(LLAMA, hw=None))
    assert (found.machine.name, found.machine.gpu_count) == ("2x-rtx3090", 2)


def test_devices_that_shared_every_layer_are_told_by_the_file_or_by_an_option(tmp_path: Path) -> None:
    said = files.SERVING | {"server_info": files.SERVING["server_info"] | {"tp_size": 2}}  # type: ignore[operator]
    by_file = evidence([files.write(tmp_path / "a.jsonl", [said])], Given(hw="2x-h200"))
    by_option = evidence([files.write(tmp_path / "b.json", files.SERVE)], Given(hw="2x-h200", tp=2))
    for found in (by_file, by_option):
        assert (found.asked[0].case.question.tp, found.machine.gpu_count) == (2, 2)
    assert "tensor parallelism" in str(refused(tmp_path, [STEP], replace(LLAMA, tp=0)))
