"""How many sequences were running when, in at most 512 points however long it takes."""

POINTS = 512
FIRST_BIN_S = 2.0**-10
"""Bins are powers of two seconds long, so that their edges are exact."""


FULL = 1 - 1e-9
"""Share of all bins that may be filled: rounding at the end of the last one must not decide whether bins double."""
SLIVER = 1e-6
"""Share of a bin below which a last one that is cut short is left out: rounding, no time."""


class Residency:
    """Sequences x seconds, binned; when the time outgrows the bins, two at a time become one."""

    __slots__ = ("_areas", "area", "bin_s", "most")

    def __init__(self) -> None:
        self.bin_s = FIRST_BIN_S
        self.area = 0.0
        self.most = 0
        self._areas = [0.0] * POINTS

    def add(self, start_s: float, end_s: float, running: int) -> None:
        """So many sequences were running from `start_s` to `end_s`."""
        self.area += running * (end_s - start_s)
        self.most = max(self.most, running)
        while end_s >= self.bin_s * POINTS * FULL:
            self._halve()
        width = self.bin_s
        first, last = int(start_s / width), int(end_s / width)
        areas = self._areas
        if first == last:
            areas[first] += running * (end_s - start_s)
            return
        areas[first] += running * ((first + 1) * width - start_s)
        for index in range(first + 1, last):
            areas[index] += running * width
        areas[last] += running * (end_s - last * width)

    def points(self, total_s: float) -> tuple[tuple[float, float], ...]:
        """Start and mean of every bin up to `total_s`; the last may be cut short."""
        width = self.bin_s
        count = min(POINTS, int(total_s / width) + 1)
        spans = ((index * width, min(width, total_s - index * width)) for index in range(count))
        areas = zip(self._areas, spans, strict=False)
        return tuple((start, area / span) for area, (start, span) in areas if span > width * SLIVER)

    def _halve(self) -> None:
        areas = self._areas
        pairs = [areas[index] + areas[index + 1] for index in range(0, POINTS, 2)]
        self._areas = pairs + [0.0] * (POINTS // 2)
        self.bin_s *= 2
