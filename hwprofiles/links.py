"""Links between host and device, and between devices: what one of a generation and a width carries, each way."""

import re
from typing import NamedTuple

PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One lane of PCI Express, one direction, after line coding."""
LANES = (16, 8, 4, 2, 1)
FULL_LANES = LANES[0]

NVLINK_C2C = "NVLink-C2C"
OTHERS = {NVLINK_C2C: 450e9}
"""Bytes a second, one direction: half of the 900 GB/s of both that NVIDIA gives for GH200."""

ROUNDING = 0.01
"""A link is asked for by its generation and width: within this it is the machine's own, whose peak may be rounded."""

PCIE, THROUGH_HOST = "pcie", "host"
PEER_KINDS = {"NVLink": "nvlink", "Infinity Fabric": "xgmi", "PCIe": PCIE}
"""Kinds of links between devices, by how their names begin."""


class Assumed(NamedTuple):
    """A number of a kind of link, where nobody measured one, and what it comes from."""

    value: float
    spread: float
    because: str


_RING = "6.6 us and 2 steps of a ring, as NCCL 2.28.7 reckons in src/graph/tuning.cc"
PEER_LATENCIES = {
    "nvlink": Assumed(7.8e-6, 0.3, f"{_RING}: 0.6 us a step over NVLink"),
    "xgmi": Assumed(1.4e-5, 0.4, "RCCL's src/graph/tuning.cc: 12 us and two steps, taken for 1 us each"),
    PCIE: Assumed(1.1e-5, 0.4, f"{_RING}: 1 us over PCIe; more is taken where a bridge is crossed"),
    THROUGH_HOST: Assumed(1.6e-5, 0.4, "a decode step at 1k on two RTX 3090 without NVLink: what bytes leave, a sum"),
}
"""Seconds that the shortest sum over two devices takes, launch and all."""

PEER_STEPS = {"nvlink": 0.12, "xgmi": 0.12, PCIE: 0.25, THROUGH_HOST: 0.25}
"""Of that, what each further step of a ring adds: sums of 8 KiB by NCCL take 6.7, 10.1 and 16.7 us over 2, 4 and 8 H200
on NVLink, 6.8, 13.5 and 26.7 us over RTX PRO 6000 on PCIe (`records/public/links.json`)."""

_OF_NVLINK = "NCCL reckons with 235 of 300 GB/s at most for sums on A100: src/graph/tuning.cc"
PEER_SHARES = {
    "nvlink": Assumed(0.78, 0.1, _OF_NVLINK),
    "xgmi": Assumed(0.78, 0.2, f"as of NVLink: {_OF_NVLINK}"),
    PCIE: Assumed(0.4, 0.3, "12.7 of 31.5 GB/s in sums over RTX 4090: tinygrad/open-gpu-kernel-modules#22"),
    THROUGH_HOST: Assumed(0.18, 0.4, "4.8 of 26.5 GB/s: what a prefill on two RTX 3090 takes longer with peer to peer "
                                     "off than over NVLink, noonghunna/club-3090#698"),
}  # fmt: skip
"""Of a link's peak, or through the host of the rate to it, that sums reach."""

_PCIE = re.compile(r"PCIe ([1-6])\.0 x(16|8|4|2|1)")


def link_bytes_per_s(link: str) -> float:
    """Of "PCIe 4.0 x16" and the like, or one of OTHERS; ValueError for what is neither."""
    if link in OTHERS:
        return OTHERS[link]
    found = _PCIE.fullmatch(link)
    if found is None:
        raise ValueError(f"link: {link!r} is neither like 'PCIe 4.0 x16' nor {' or '.join(map(repr, OTHERS))}")
    return PCIE_LANE_BYTES_PER_S[int(found[1])] * int(found[2])


def lanes_of(link: str) -> int:
    """PCIe lanes; all of them where that is not said."""
    found = _PCIE.fullmatch(link)
    return int(found[2]) if found else FULL_LANES


def share_of(own: str, own_bytes_per_s: float, *, lanes: int, generation: int | None = None) -> float:
    """What a link of these lanes and generation carries of the machine's `own`; ValueError for a faster one.

    Without a generation it is the same link with fewer lanes: never more than it has.
    """
    if generation is None:
        return min(1.0, lanes / lanes_of(own))
    lanes = min(lanes, lanes_of(own))
    share = PCIE_LANE_BYTES_PER_S[generation] * lanes / own_bytes_per_s
    if share > 1 + ROUNDING:
        asked = f"PCIe {generation}.0 x{lanes}"
        raise ValueError(f"{asked} is faster than its own {own or 'link'}, {own_bytes_per_s / 1e9:.3g} GB/s")
    return min(1.0, share)


def peer_kind(link: str) -> str:
    """Of a link between devices; ValueError for a name of no known kind."""
    for begins, kind in PEER_KINDS.items():
        if link.startswith(begins):
            return kind
    raise ValueError(f"peer_link: {link!r} begins like none of {', '.join(map(repr, PEER_KINDS))}")
