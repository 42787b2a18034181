"""One memory of a machine: what lies in it, and what a page of context takes."""

from msgspec import Struct

from twin.ask.case import Case
from twin.units import MAX_TOKENS


class Memory(Struct, frozen=True, kw_only=True):
    """One memory: what lies in it besides the cache, and what a page of context takes."""

    name: str
    capacity_bytes: float
    fixed: dict[str, float]  # bytes by part that do not depend on the context
    page_bytes: dict[str, float]  # bytes by part that one page of every sequence takes here
    capacity_spread: float = 0.0  # standard deviation of capacity less fixed parts, in bytes
    held_bytes: float = 0.0  # bytes that are taken at once, before any context: with a pool of given size all of it

    def free_bytes(self) -> float:
        """What the cache may take; negative where even an empty cache does not fit."""
        return self.capacity_bytes - sum(self.fixed.values())

    def parts(self, pages: int) -> dict[str, float]:
        """Bytes by part at that many pages."""
        parts = self.fixed | {name: size * pages for name, size in self.page_bytes.items() if size}
        unused = self.held_bytes - sum(parts.values())
        return parts | {"unused blocks": unused} if unused > 0 else parts

    def used_bytes(self, pages: int) -> float:
        """All bytes at that many pages."""
        return sum(self.parts(pages).values())

    def max_pages(self, *, sigmas: float = 0.0) -> int:
        """Most pages that fit, with the capacity off by so many standard deviations."""
        per_page = sum(self.page_bytes.values())
        more = sigmas * self.capacity_spread
        free = self.free_bytes() + more
        if free < 0 or self.held_bytes > self.capacity_bytes + more:
            return 0
        return int(free // per_page) if per_page else MAX_TOKENS


def head_bytes(case: Case) -> float:
    """Bytes that the output head and the last norm take of their own: a tied head does where the embedding is not."""
    model = case.model
    shared = model.tied and not case.rules.embedding_on_host
    head = 0 if shared else model.hidden * model.vocab
    return model.stored_bytes({model.head_part: head, "vectors": model.vectors})
