"""How each recorded figure of a block pool is predicted: blocks, pages, printed tokens, what fits."""

from calibrate.estimates import Asked, Estimate, NoAnswer, count
from twin.ask.resolve import check_capability
from twin.errors import Impossible
from twin.memory.block_pool import BlockPlan, Group, KVPool
from twin.memory.plan import MemoryPlan
from twin.prediction import Z90
from twin.units import GIB, MIB

IN_POOL = ("null block", "state and windows")
"""Parts of a device that lie in its pool of blocks, not beside it."""


def kv_bytes_per_token_per_layer(asked: Asked) -> Estimate:
    """Bytes of K and V of one token in one attention layer."""
    return count(asked.case.plane_bytes)


def kv_bytes_of_token(asked: Asked) -> Estimate:
    """Bytes of K and V of one token in all attention layers."""
    return count(asked.case.plane_bytes * asked.case.model.attention_layers)


def kv_pool(asked: Asked) -> Estimate:
    """Tokens that the engine prints as the size of its cache; naively, bytes left over bytes a token."""
    plan = asked.memory
    pool = _pool(plan)
    value = pool.printed_tokens
    per_token = asked.case.plane_bytes * asked.case.model.attention_layers
    if asked.question.pool_bytes is not None:
        return Estimate(value=value, low=value, high=value, naive=pool.pool_bytes / per_token)
    device = plan.devices()[0]
    weights = device.fixed.get("weights", 0.0) + device.fixed.get("embedding", 0.0)
    left = device.capacity_bytes - sum(size for name, size in device.fixed.items() if name not in IN_POOL)
    low, high = (
        pool.plan.printed_tokens(
            max(0, pool.plan.blocks_in(int(left + sigmas * device.capacity_spread))), pool.max_model_tokens
        )
        for sigmas in (-Z90, Z90)
    )
    return Estimate(value=value, low=low, high=high, naive=(device.capacity_bytes - weights) / per_token)


def concurrency(asked: Asked) -> Estimate:
    """Requests of the longest length that the pool is printed to hold."""
    tokens = kv_pool(asked)
    longest = _pool(asked.memory).max_model_tokens
    return Estimate(value=tokens.value / longest, low=tokens.low / longest, high=tokens.high / longest)


def block_tokens(asked: Asked) -> Estimate:
    """Tokens of an attention block."""
    return count(_plan(asked).block_tokens)


def page_mib(asked: Asked) -> Estimate:
    """MiB of a block in one layer."""
    return count(_plan(asked).page_bytes / MIB)


def window_blocks(asked: Asked) -> Estimate:
    """Blocks of one request's sliding windows."""
    return count(sum(g.blocks(asked.question.ctx_tokens) for g in _plan(asked).groups if g.kind == "sliding"))


def window_page_use(asked: Asked) -> Estimate:
    """Per cent of a sliding layer's page that its block fills."""
    return count(100 * _window(asked).page_bytes / _plan(asked).page_bytes)


def window_block_tokens(asked: Asked) -> Estimate:
    """Tokens of a sliding layer's block."""
    return count(_window(asked).block_tokens)


def kv_memory(asked: Asked) -> Estimate:
    """GiB of pool that one request of the asked context takes."""
    return count(_plan(asked).bytes_per_request(asked.question.ctx_tokens) / GIB)


def runs_out_of_memory(asked: Asked) -> Estimate:
    """1 where the asked context does not fit, 0 where it does."""
    return count(0.0 if asked.memory.fits else 1.0)


def starts(asked: Asked) -> Estimate:
    """1 where the engine's kernels start on the device, 0 where they refuse."""
    try:
        check_capability(asked.case, asked.profile)
    except Impossible:
        return count(0.0)
    return count(1.0)


def _window(asked: Asked) -> Group:
    """A group of sliding layers."""
    for group in _plan(asked).groups:
        if group.kind == "sliding":
            return group
    raise NoAnswer("no layer here has a sliding window")


def _plan(asked: Asked) -> BlockPlan:
    return _pool(asked.memory).plan


def _pool(plan: MemoryPlan) -> KVPool:
    if plan.kv_pool is None:
        raise Impossible("this engine has no pool of blocks")
    return plan.kv_pool
