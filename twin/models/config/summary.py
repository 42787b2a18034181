"""One line about a model that was read: how large it is, and what mixes its tokens."""

from twin.models.mixers import mixer_name
from twin.models.spec import ModelSpec


def summary_of(spec: ModelSpec) -> str:
    """Such as "8.03B dense, full attention" or "30.5B with 3.35B active, 128 experts, full attention"."""
    total = _size(sum(spec.parameters.values()))
    feeds = [kind.feed_forward for kind in spec.kinds.values() if kind.feed_forward]
    experts = max((feed.experts for feed in feeds), default=1)
    size = (
        f"{total} with {_size(spec.active_parameters)} active, {experts:,} experts" if experts > 1 else f"{total} dense"
    )
    names: dict[str, int] = {}
    for mixer, count in spec.mixers.items():
        names[mixer_name(mixer)] = names.get(mixer_name(mixer), 0) + count
    if len(names) == 1:
        return f"{size}, {next(iter(names))}"
    return ", ".join(
        [size, *(f"{count} {'layer' if count == 1 else 'layers'} of {name}" for name, count in names.items())]
    )


def _size(parameters: float) -> str:
    """Three digits, as sizes of models are written."""
    for unit, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{sign}"
    return f"{parameters:,.0f}"
