"""Who may import whom: nothing points up. The arrows are those of docs/architecture.md."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lockstep"

EVERYONE = {"errors"}
ARROWS: dict[str, set[str]] = {
    # the path of a step
    "errors": set(),
    "ragged": set(),
    "padded": {"ragged", "protocol"},  # the latter for types only
    "protocol": {"ragged", "padded"},
    "algorithms": set(),
    "utils": set(),
    "config": set(),
    "observability": {"utils/files"},
    "checkpoint": set(),
    "data": {"protocol", "config", "observability/spans", "utils"},
    "data/preprocess": {"data", "rewards/graders", "utils"},
    "embedded": {"trainer/run", "config", "observability", "utils"},
    "rewards": {"data/tag", "protocol", "config", "utils"},
    "processes": set(),
    "judging/sandbox": set(),
    "rewards/graders": {"processes", "judging/sandbox", "utils"},
    "agents": {"workers/rollout", "rewards", "data/conversations", "protocol", "config", "utils"},
    "models": {"algorithms/rows", "protocol", "config", "utils"},
    "planner": {"models", "config"},
    "single_controller/base": {"protocol"},
    "single_controller/local": {"single_controller/base"},
    "workers/losses": {"workers/engine", "algorithms", "protocol", "config", "observability", "utils"},
    "workers/episodes": {"agents", "single_controller/base", "protocol", "config"},
    "workers/sends_weights": {"workers/policy", "workers/weight_sync", "single_controller/base", "config"},
    "workers/value_loss": {"workers/engine", "workers/losses", "algorithms", "config"},
    "workers/reward_loss": {"workers/engine", "workers/losses", "algorithms"},
    "workers/distill_loss": {"workers/losses", "workers/engine", "algorithms"},
    "workers/distill_worker": {
        "workers/engine_workers", "workers/engine", "single_controller/base", "planner", "models", "algorithms", "protocol", "config",
        "observability",
    },
    "workers/sft_loss": {"workers/losses", "workers/engine", "algorithms"},
    "workers/preference_loss": {"workers/engine", "workers/losses", "algorithms", "utils"},
    "workers/model_worker": {
        "workers/engine", "single_controller/base", "planner", "models", "protocol", "observability", "utils",
    },
    "workers/prepared_policy": {
        "workers/engine", "workers/model_worker", "workers/policy", "single_controller/base", "planner", "models", "config",
    },
    "workers/policy": {"workers/engine", "workers/rollout", "workers/weight_sync", "models", "protocol", "config", "utils"},
    "workers/training_worker": {
        "workers/engine", "workers/losses", "workers/value_loss", "workers/model_worker",
        "single_controller/base", "planner", "models", "algorithms",
        "data/scored_text", "protocol", "config", "observability", "utils",
    },
    "workers/engine_workers": {
        "workers/episodes", "workers/sends_weights", "workers/prepared_policy",
        "workers/policy", "workers/training_worker", "workers/model_worker", "workers/engine", "workers/rollout",
        "workers/losses", "single_controller/base", "planner", "models", "algorithms", "protocol", "config", "observability", "utils",
    },
    "trainer/run": {
        "trainer/start", "trainer/stop", "trainer/skipped", "trainer/capsule", "data/schedule", "config", "checkpoint", "observability",
        "utils/garbage",
    },
    "trainer/role": set(),
    "trainer/resources": {"single_controller"},
    "trainer/memory": {"single_controller", "planner"},
    "trainer/launch": {"trainer/memory", "trainer/resources", "single_controller", "planner", "config", "observability/spans"},
    "trainer/start": {"checkpoint", "config"},
    "trainer/stop": set(),
    "trainer/skipped": set(),
    "trainer/capsule": {"trainer/run", "data/schedule", "config", "checkpoint"},
    "trainer/ppo": {
        "agents",
        "trainer/run", "trainer/role", "trainer/resources", "trainer/launch", "single_controller", "planner", "algorithms", "data",
        "rewards", "protocol", "config", "observability", "utils",
    },
    "trainer/stage_run": {
        "trainer/run", "trainer/role", "trainer/resources", "trainer/launch", "single_controller", "planner", "algorithms", "data",
        "protocol", "config", "observability", "utils",
    },
    "trainer/sft": {
        "trainer/stage_run", "trainer/role", "trainer/ppo", "single_controller", "data", "rewards", "protocol", "config", "observability",
        "utils",
    },
    "trainer/reward_model": {"trainer/stage_run", "single_controller", "data", "protocol", "config", "observability"},
    "trainer/dpo": {
        "trainer/stage_run", "trainer/launch", "trainer/role", "single_controller", "algorithms", "data", "protocol", "config",
        "observability", "utils",
    },
    "trainer/distill": {
        "trainer/sft", "trainer/launch", "trainer/role", "protocol", "config", "observability", "utils",
    },
    "trainer/summary": {"trainer/run", "observability"},
    # backends
    "single_controller/ray": {"single_controller/base", "protocol"},
    "workers/engine": {"checkpoint", "models", "algorithms", "protocol", "config", "observability", "utils"},
    "workers/rollout": {"workers/weight_sync", "models", "protocol", "config", "observability", "utils"},
    "workers/weight_sync": {"config"},
    # tools
    "tools/check": {"algorithms", "config", "utils"},
    "tools/compare": {
        "trainer/ppo", "workers/engine", "workers/losses", "single_controller/base", "models", "algorithms", "protocol", "config",
        "observability", "utils",
    },
    "tools/load_model": {"workers/rollout", "models", "checkpoint", "config", "utils"},
    "tools/serve": {"tools/load_model", "workers/rollout", "data/conversations", "config", "utils"},
    "tools/generate": {"tools/load_model", "workers/rollout", "data", "config", "utils"},
    "tools/chat": {"tools/generate", "tools/load_model", "workers/rollout", "utils"},
    "tools/export": {"tools/load_model", "workers/engine", "models", "config", "utils"},
    "tools/push": {"tools/export", "tools/load_model"},
    "tools/evaluate": {
        "trainer/ppo", "workers/rollout", "data", "rewards", "protocol", "config", "observability", "utils",
    },
    "tools/data_show": {"data", "config", "utils"},
    "tools/report": {"config", "observability"},
    "tools/asked": {"config"},
    "tools/explain": {"tools/asked", "tools/plan", "planner", "trainer/ppo", "data", "config", "utils"},
    "tools/plan": {"tools/asked", "planner", "trainer/ppo", "trainer/setup", "config"},
    "tools/reward_check": {"data/tag", "rewards", "utils"},
    "tools/verify_resume": {"checkpoint", "config"},
    # others' names: these may point up
    "compat": {
        "algorithms", "checkpoint", "config", "data", "observability", "protocol", "rewards", "single_controller", "trainer/main_ppo",
        "trainer/ppo", "trainer/resources", "trainer/role", "trainer/setup", "utils", "workers/engine_workers",
    },
    "trainer/ppo/core_algos": {"compat"},
    "utils/dataset": {"data"},
    "utils/reward_score": {"rewards"},
    "workers/reward_manager": {"rewards"},
}  # fmt: skip
"""Room -> rooms it may import from, beside itself and `errors`."""
COMPOSITION_ROOTS = (
    "trainer/main_ppo", "trainer/main_sft", "trainer/main_distill", "trainer/main_dpo", "trainer/main_reward_model", "trainer/program",
    "trainer/setup", "tools/reward_check/command", "tools/evaluate/command", "tools/compare", "cli",
    "trainer/setup", "tools/reward_check/command", "tools/compare",
    "tools/doctor/command", "tools/doctor/parts", "tools/doctor/selftest", "tools/doctor", "cli",
    "trainer/setup", "tools/reward_check/command", "tools/compare", "tools/replay", "tools/replay/make", "cli",
    "__main__", "__init__",
)  # fmt: skip


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
        if name not in COMPOSITION_ROOTS and name not in ("trainer", "workers", "single_controller", "tools"):
            yield name, path


@cache
def imported(path):
    """Module names that a file imports anywhere in it, with dots."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def room_of(module):
    """The longest room that contains a module named with slashes."""
    rooms = [room for room in ARROWS if module == room or module.startswith(room + "/")]
    assert rooms, f"{module} is in no room of the design: give it one here and in docs/architecture.md"
    return max(rooms, key=len)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_module_imports_only_what_its_room_may(name, path):
    room = room_of(name)
    allowed = ARROWS[room] | EVERYONE | {room}
    for target in imported(path):
        if target.startswith("lockstep."):
            inner = target.removeprefix("lockstep.").replace(".", "/")
            assert any(inner == r or inner.startswith(r + "/") for r in allowed), f"{name} ({room}) must not import {target}"


def test_ray_is_written_in_one_folder_only():
    for name, path in modules():
        if not name.startswith("single_controller/ray"):
            assert not any(target.split(".")[0] == "ray" for target in imported(path)), f"{name} imports ray"


def test_the_configuration_the_algorithms_and_the_sandbox_import_nothing_heavy():
    for name, path in modules():
        heads = {target.split(".")[0] for target in imported(path)}
        if name.startswith("config"):
            assert not heads & {"torch", "transformers", "ray"}, name
        if name.startswith(("judging/sandbox", "processes")):
            assert not heads & {"torch", "transformers", "ray", "numpy"}, name
        if name.startswith("algorithms"):
            assert not heads & {"transformers", "ray", "numpy", "omegaconf"}, name


def test_rows_are_packed_in_one_file_for_training():
    # models/load and models/hidden pack rows of their own to check what a family does.
    users = [name for name, path in modules() if "PackedLayout(" in path.read_text()]
    assert users == ["models/hidden", "models/load", "models/packing"]
