"""What would make a question fit: every change is tried before it is suggested."""

from collections.abc import Iterator
from itertools import islice, product

from msgspec.structs import replace

from twin.ask.question import flag
from twin.ask.resolve import check_capability, on_machine, resolve
from twin.errors import TwinError
from twin.formats import kv_format
from twin.memory.block_pool import most_pool_bytes
from twin.memory.plan import plan_memory
from twin.memory.token_pool import most_token_bytes
from twin.prediction import Prediction

Change = dict[str, str | int | float]  # fields of a question with their new values
FEWER_SEQUENCES = (256, 64, 16, 4, 1)
SMALLER_SHARES = (0.9, 0.85, 0.8, 0.7)
WIDEST_FIRST = 2  # how many formats are suggested: the ones that keep most bits


def remedies(prediction: Prediction) -> list[str]:
    """The longest context that fits, and the fewest changes with which the whole context does."""
    longest = prediction.memory.max_ctx_tokens()
    tips = [f"--ctx {longest}"] if longest else []
    tips += [" ".join(f"{flag(field)} {value}" for field, value in change.items()) for change in _helping(prediction)]
    return tips or ["a machine with more memory"]


def _helping(prediction: Prediction) -> list[Change]:
    """Single changes that make it fit, or pairs of them where no single one does."""
    case = prediction.case
    layouts: list[Change] = [{"layout": name} for name in case.rules.layouts if name != case.layout.name]
    tables: list[Change] = [{"ngram": "disk"}] if case.model.ngram is not None and case.ngram == "ram" else []
    pools: list[Change] = []
    if case.question.pool_bytes is not None:  # the largest that the device holds
        room = most_token_bytes if case.rules.token_pool else most_pool_bytes
        pools = [{"pool_bytes": room(case, prediction.machine)}]
    changes = (*layouts, *tables, *pools, *_of_the_pool(prediction), *_formats(prediction))
    single = [change for change in changes if _fits(prediction, change)]
    return single or [layout | table for layout, table in product(layouts, tables) if _fits(prediction, layout | table)]


def _of_the_pool(prediction: Prediction) -> list[Change]:
    """The most sequences, and the largest share, with which it fits, where the engine's own are taken."""
    question, pool = prediction.case.question, prediction.case.rules.block_pool
    if pool is None:
        return []
    fewer: list[Change] = [{"max_sequences": most} for most in FEWER_SEQUENCES if question.batch <= most]
    smaller: list[Change] = [{"utilisation": share} for share in SMALLER_SHARES if share < pool.utilisation]
    open_ends = [fewer] if question.max_sequences is None else []
    if question.utilisation is None and question.pool_bytes is None:
        open_ends.append(smaller)
    found = (next((change for change in changes if _fits(prediction, change)), None) for changes in open_ends)
    return [change for change in found if change is not None]


def _formats(prediction: Prediction) -> list[Change]:
    """The widest formats of the engine with which the whole context would fit, where its device runs them."""
    case = prediction.case
    kept = [kv_format(name) for name in case.rules.formats_of(case.layout.name)]
    widest = sorted(kept, key=lambda each: -(each.key.bits + each.value.bits))
    changes: Iterator[Change] = ({"kv_dtype": fmt.name} for fmt in widest)
    return list(islice((change for change in changes if _fits(prediction, change)), WIDEST_FIRST))


def _fits(prediction: Prediction, change: Change) -> bool:
    try:
        changed = resolve(replace(prediction.case.question, **change), devices=prediction.machine.gpu_count)
        changed = on_machine(changed, prediction.machine)
        check_capability(changed, prediction.machine)
    except TwinError:  # another option of the question goes only with what it asked for
        return False
    return plan_memory(changed, prediction.machine).fits
