"""The rates of a machine whose devices are of several kinds: each op is asked of the device that runs it."""

from hwprofiles.profile import HardwareProfile
from twin.cost.roofline import Cost, Roofs
from twin.operations.ops import Op


def roofs_of(profile: HardwareProfile, *, strict: bool = True) -> Roofs:
    """A machine's rates, whatever its devices are."""
    return MixedRoofs(profile, strict=strict) if profile.devices else Roofs(profile, strict=strict)


class MixedRoofs(Roofs):
    """Those of each device; rates are named after the machine that they are from."""

    def __init__(self, profile: HardwareProfile, *, strict: bool = True) -> None:
        super().__init__(profile, strict=strict)
        kinds = {each.name: Roofs(each, strict=strict) for each in profile.devices}
        self._own = [kinds[each.name] for each in profile.devices]
        self.rates, self.rungs = {}, {}
        for own in kinds.values():
            self._learn(own)

    def _learn(self, own: Roofs) -> None:
        """What one device's rates have grown by."""
        name = own.profile.name
        self.rates |= {_named(rate, name): found for rate, found in own.rates.items()}
        self.rungs |= {_named(rate, name): found for rate, found in own.rungs.items()}
        self.extrapolated |= {_named(what, name) for what in own.extrapolated}

    def cost(self, op: Op) -> Cost:
        """Seconds on the device of the op; the host's memory and disk are the first one's."""
        own = self._own[max(0, op.device)]
        cost = own.cost(op)
        self._learn(own)  # a rate that was borrowed is known from then on
        bound, latency = (
            tuple(_named(rate, own.profile.name) for rate in rates) for rates in (cost.bound_rates, cost.latency_rates)
        )
        return cost._replace(bound_rates=bound, latency_rates=latency)

    def products_floor_s(self, op: Op) -> float:
        """The same at that device's datasheet peak."""
        return self._own[max(0, op.device)].products_floor_s(op)


def _named(rate: str, machine: str) -> str:
    return f"{rate}@{machine}"
