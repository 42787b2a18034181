"""What would make a question fit: every change is tried before it is suggested."""

from itertools import product

from msgspec.structs import replace

from twin.case import resolve
from twin.errors import TwinError
from twin.memory import plan_memory
from twin.prediction import Prediction

Change = dict[str, str]
"""Fields of a question, each named as its option, with their new values."""


def remedies(prediction: Prediction) -> list[str]:
    """The longest context that fits, and the fewest changes with which the whole context does."""
    longest = prediction.memory.max_ctx_tokens()
    tips = [f"--ctx {longest}"] if longest else []
    tips += [" ".join(f"--{option} {value}" for option, value in change.items()) for change in _helping(prediction)]
    return tips or ["a machine with more memory"]


def _helping(prediction: Prediction) -> list[Change]:
    """Single changes that make it fit, or pairs of them where no single one does."""
    case = prediction.case
    layouts: list[Change] = [{"layout": name} for name in case.rules.layouts if name != case.layout.name]
    tables: list[Change] = [{"ngram": "disk"}] if case.model.ngram is not None and case.ngram == "ram" else []
    single = [change for change in (*layouts, *tables) if _fits(prediction, change)]
    return single or [layout | table for layout, table in product(layouts, tables) if _fits(prediction, layout | table)]


def _fits(prediction: Prediction, change: Change) -> bool:
    try:
        changed = resolve(replace(prediction.case.question, **change))
    except TwinError:  # another option of the question goes only with what it asked for
        return False
    return plan_memory(changed, prediction.machine).fits
