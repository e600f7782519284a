"""GPUs as the plan knows them: memory, peak rates, and how fast they talk to each other. Numbers of the makers' data sheets."""

import difflib
from dataclasses import dataclass

from lockstep.errors import ConfigError

_GIB = 2**30
_CONTEXT = int(0.7 * _GIB)
"""What the CUDA context of a process takes."""


@dataclass(frozen=True)
class Device:
    """One kind of GPU."""

    name: str
    memory: int
    """Bytes that are free before models are loaded."""
    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to other GPUs of the machine, one way."""
    capability: tuple[int, int]
    """CUDA's compute capability."""
    is_measured: bool = False
    """Whether the plan's constants were measured on it; elsewhere they are scaled."""


def _device(
    name: str, gib: float, tflops: float, tb_s: float, link_gb_s: float, capability: tuple[int, int], *, is_measured: bool = False
) -> Device:
    return Device(name, int(gib * _GIB) - _CONTEXT, tflops * 1e12, tb_s * 1e12, link_gb_s * 1e9, capability, is_measured)


DEVICES = {
    device.name: device
    for device in (
        _device("h200", 139.8, 989, 4.8, 450, (9, 0), is_measured=True),
        _device("h100", 79.1, 989, 3.35, 450, (9, 0)),
        _device("h20", 95.6, 148, 4.0, 450, (9, 0)),
        _device("b200", 178.4, 2250, 8.0, 900, (10, 0)),
        _device("a100-80gb", 79.1, 312, 2.04, 300, (8, 0)),
        _device("a100-40gb", 39.4, 312, 1.56, 300, (8, 0)),
        _device("l40s", 44.4, 362, 0.86, 32, (8, 9)),
        _device("rtx-4090", 23.6, 165, 1.01, 32, (8, 9)),
    )
}
"""Name -> GPU."""

NODE_LINK = 40e9
"""Bytes per second between machines for each GPU (400 Gb/s, of which four fifths arrive)."""


def find_device(name: str) -> Device:
    """The GPU of this name, in the words of the table or of CUDA ("NVIDIA H200"). Raises ConfigError, which names the nearest."""
    word = name.lower().replace(" ", "-").replace("_", "-")
    # CUDA has more between the parts of a name: "NVIDIA A100-SXM4-80GB".
    found = next((device for key, device in DEVICES.items() if all(part in word for part in key.split("-"))), None)
    if found is None:
        near = difflib.get_close_matches(word, DEVICES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"--gpu {name} is not known; the nearest is {near} (all: {', '.join(DEVICES)})")
    return found
