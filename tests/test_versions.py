"""Lower bounds, tested versions and lowest versions are one set of names."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ELSEWHERE = {"lockstep-rl", "vllm", "sglang", "megatron-core", "torchtitan", "wandb"}
ELSEWHERE |= {"mlflow-skinny", "sqlalchemy", "alembic", "swanlab", "trackio", "mcp"}
"""Ourselves, and what other environments have."""
TOOLS = {"import-linter", "mypy", "ruff"}
"""One version of these is enough."""


def bounds():
    """Dependency -> its lower bound."""
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    found = {}
    for requirement in map(Requirement, lines):
        lowest = [spec.version for spec in requirement.specifier if spec.operator in (">=", "==")]
        assert lowest or requirement.name == "lockstep-rl", f"{requirement} has no lower bound"
        found[requirement.name] = lowest[0] if lowest else None
    return found


def pins(name):
    requirements = [Requirement(line) for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {r.name: next(iter(r.specifier)).version for r in requirements}


def test_every_dependency_has_a_lower_bound_that_is_tested():
    lowest = pins("constraints-lowest.txt")
    for name, bound in bounds().items():
        if name not in ELSEWHERE | TOOLS:
            assert Version(lowest[name]) == Version(bound), (
                f"{name}: pyproject.toml says {bound}, constraints-lowest.txt {lowest[name]}"
            )


def test_the_tested_version_of_every_dependency_is_written_down():
    tested = pins("constraints.txt")
    for name, bound in bounds().items():
        if name not in ELSEWHERE:
            assert Version(tested[name]) >= Version(bound), name
