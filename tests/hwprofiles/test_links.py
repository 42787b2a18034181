"""Links by name, generation and width."""

import pytest

from hwprofiles.links import LANES, PCIE_LANE_BYTES_PER_S, lanes_of, link_bytes_per_s, share_of


def test_a_link_carries_its_lanes() -> None:
    assert link_bytes_per_s("PCIe 4.0 x16") == pytest.approx(31.5e9, rel=1e-3)
    assert link_bytes_per_s("NVLink-C2C") == 450e9
    assert [lanes_of(link) for link in ("PCIe 5.0 x8", "NVLink-C2C", "")] == [8, 16, 16]
    for wrong in ("", "PCIe 4 x16", "PCIe 4.0 x3", "PCIe 7.0 x16"):
        with pytest.raises(ValueError, match="neither like"):
            link_bytes_per_s(wrong)


def test_shares_fall_with_lanes_and_generations_and_never_pass_one() -> None:
    own = link_bytes_per_s("PCIe 5.0 x16")
    shares = [
        share_of("PCIe 5.0 x16", own, lanes=lanes, generation=generation)
        for generation in sorted(PCIE_LANE_BYTES_PER_S)[:5]
        for lanes in reversed(LANES)
    ]
    assert max(shares) == shares[-1] == 1.0
    for each in range(0, len(shares), len(LANES)):
        assert shares[each : each + len(LANES)] == sorted(shares[each : each + len(LANES)])
    assert share_of("", 63e9, lanes=16, generation=5) == 1.0  # a peak that is rounded down
