"""How devices share a model: ranks that divide every layer, and stages of layers one after the other."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from twin.ask.case import Case
from twin.ask.question import Question
from twin.engines import EngineRules
from twin.errors import Impossible
from twin.models.sharded import sharded


class Sharing(NamedTuple):
    """Ranks of each stage, and devices that a question takes; None: all that there are, a stage each."""

    tp: int
    devices: int | None


def sharing_of(question: Question, rules: EngineRules, there: Callable[[], int]) -> Sharing:
    """What is asked for; where a number is not, the engine's default on as many devices as are `there`.

    A machine of one device is asked about as so many of it. Raises Impossible.
    """
    tp, pp = question.tp, question.pp
    _check(question, rules)
    by_rows = (question.split or rules.splits[0]) == "row"
    if tp is None and pp is None and not by_rows:
        return Sharing(1, None)
    devices = question.gpus or there()
    if tp is None:
        tp = max(1, devices // (pp or 1)) if by_rows else 1
    if pp is None:
        pp = 1 if by_rows else max(1, devices // tp)
    if tp * pp > devices and (devices > 1 or question.gpus is not None):
        each = f"{tp} ranks" if pp == 1 else f"{pp} stages" if tp == 1 else f"{pp} stages of {tp} ranks"
        raise Impossible(f"{each} need {tp * pp} devices, there are {devices}")
    return Sharing(tp, tp * pp)


def _check(question: Question, rules: EngineRules) -> None:
    """Refuse a way that the engine has not, and options that contradict each other."""
    ranks, stages = (question.tp or 1) > 1, (question.pp or 1) > 1
    asked = {"--split": question.split, "--tp": "row" if ranks else None, "--pp": "layer" if stages else None}
    for option, way in asked.items():
        if way is not None and way not in rules.splits:
            hint = f"it splits a model by {' or '.join(rules.splits)}"
            raise Impossible(f"{option} means nothing to {rules.name}: it does not split by {way}", hint=hint)
    if question.split == "layer" and ranks:
        raise Impossible("--tp means nothing under --split layer, which gives each layer to one device")
    if question.split == "row" and stages:
        raise Impossible("--pp means nothing under --split row, which shares each layer among all devices")


def shared(case: Case, there: Callable[[], int]) -> Case:
    """The case as one rank sees it. Raises Impossible where ranks cannot share the model."""
    sharing = sharing_of(case.question, case.rules, there)
    if sharing.tp == 1:
        return replace(case, devices=sharing.devices)
    if case.model.selects_blocks:
        raise Impossible(f"{case.rules.name} keeps attention that selects blocks on one device: ranks do not share it")
    try:
        model = sharded(case.model, sharing.tp)
    except ValueError as wrong:
        hint = "--tp sets how many ranks share each layer, --pp into how many stages layers are split"
        raise Impossible(f"{case.model.name}: {wrong}", hint=hint) from None
    speculation = case.speculation
    if speculation is not None:
        drafter = next(each for each in model.drafters if each.name == speculation.drafter.name)
        speculation = replace(speculation, drafter=drafter)
    return replace(case, model=model, mixer=model.attention, speculation=speculation, **sharing._asdict())
