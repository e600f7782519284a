"""A default of a setting that is written outside lockstep/config/ fails here: the configuration is the only source of defaults.

Looked at: parameters of functions and fields of classes whose name is a key of the configuration, or ends in _s, _timeout or _rate. Not
a second default: None, an empty container, and one that is read from a section (`RewardConfig.timeout_s`).
"""

import ast
import inspect
from pathlib import Path

import lockstep
from lockstep.config.reference import keys
from lockstep.config.reward import SandboxConfig
from lockstep.judging.sandbox.base import ProgramLimits
from lockstep.judging.sandbox.make import make_sandbox

PACKAGE = Path(lockstep.__file__).parent
SUFFIXES = ("_s", "_timeout", "_rate")
KEYS = {key.rpartition(".")[2] for key, _, _ in keys()}
ALLOWED = {
    # Not the setting of this name.
    "algorithms/rows.py Rows.__init__.device": "where tensors lie, not trainer.device",
    "models/attention.py PackedLayout.__init__.device": "where tensors lie, not trainer.device",
    "single_controller/base/worker.py WorkerEnvironment.device": "of a worker that no group hosts; not trainer.device",
    "single_controller/base/worker.py WorkerEnvironment.name": "how errors name a worker that no group hosts",
    "single_controller/base/worker_group.py WorkerGroup.__init__.device": "where workers compute; trainer.device is resolved before",
    "single_controller/base/resource_pool.py ResourcePool.__init__.name": "how errors name a pool",
    "planner/memory.py Model.optimizer_offload": "a frozen model has no moments",
    "agents/environment.py Environment.queue_s": "most environments wait for nothing; those that ship say how long",
    "agents/episode.py Episode.retries": "how often it was played again; agent.retries bounds it",
    "agents/episode.py Episode.environment_s": "time that was spent",
    "agents/episode.py Episode.wait_s": "time that was spent",
    "agents/episode.py Episode.seed": "told by the task that it is played for",
    # The value is the formula's own, or nobody sets it for a run.
    "algorithms/advantages/returns.py rewards_to_go.gamma": "a sum without discount",
    "workers/engine/base.py TrainEngine.forward.temperature": "a value model has none",
    "workers/engine/base.py TrainEngine.forward_backward.temperature": "a value model has none",
    "backends/megatron/engine.py MegatronEngine.forward_backward.temperature": "a value model has none",
    "backends/torchtitan/engine.py TorchtitanEngine.forward_backward.temperature": "a value model has none",
    "backends/torchtitan/model.py Question.temperature": "a value model has none",
    "judging/math/__init__.py compute_score.timeout_s": "of one comparison inside a call that reward.timeout_s bounds",
    "observability/statistics.py flip_test.seed": "a test of a difference gives the same answer whenever it is asked",
    # Users write these calls without the argument.
    "agents/gym_text.py GymText.__init__.name": "a game; not the name of anything configured",
    "tools/load_model.py load.dtype": "the weights' own, unless a command says otherwise",
    "tools/load_model.py load.device": "the best there is, unless a command says otherwise",
    "tools/load_model.py load.trust_remote_code": "code from a model's folder never runs unasked",
    "utils/tokenizer.py hf_tokenizer.trust_remote_code": "the tutorial's call; code from a model's folder never runs unasked",
    "models/hf_config.py read_model_config.trust_remote_code": "code from a model's folder never runs unasked",
}
"""Place -> why it is not a second source."""
ROOMS = {
    "config/": "the source",
    "compat/": "other libraries' functions have those libraries' defaults",
    "tools/evaluate/": "a command without a configuration: its options have defaults of their own (docs/eval.md)",
    "tools/serve/": "likewise (docs/serve.md)",
    "generation/offline_engine.py": "Engine is a library without a configuration: its arguments are those of a call (docs/generation.md)",
    "judging/sandbox/": "a library that imports nothing of ours and is used alone; the test below compares",
}
"""Folder -> why it may have defaults."""


def defaults_in(source):
    """(name with the class and function it is in, default) of every parameter and field that has one."""
    found = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = child.args
                positional = [*arguments.posonlyargs, *arguments.args]
                pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
                pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                found.extend((inner + argument.arg, default) for argument, default in pairs if default is not None)
            elif isinstance(child, ast.AnnAssign) and isinstance(node, ast.ClassDef) and child.value is not None:
                found.append((prefix + child.target.id, child.value))
            visit(child, inner)

    visit(ast.parse(source), "")
    return found


def is_value(default):
    """Whether the default is a value of its own."""
    if isinstance(default, ast.Constant):
        return default.value is not None
    if isinstance(default, ast.Tuple | ast.List | ast.Dict):
        return bool(getattr(default, "elts", None) or getattr(default, "keys", None))
    if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
        return not default.value.id.endswith("Config")
    return not (isinstance(default, ast.Call) and ast.unparse(default.func) == "field")


def second_defaults(source):
    """The settings in a source that have a default of their own."""
    named = ((place, place.rpartition(".")[2], default) for place, default in defaults_in(source))
    return [place for place, name, default in named if (name in KEYS or name.endswith(SUFFIXES)) and is_value(default)]


def test_a_default_is_written_in_the_configuration_only():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(tuple(ROOMS)):
            found += [f"{name} {place}" for place in second_defaults(path.read_text())]
    assert [place for place in found if place not in ALLOWED] == [], "make it a required argument, or say in ALLOWED why not"


def test_the_sandbox_alone_has_the_configurations_defaults():
    config, made = SandboxConfig(), inspect.signature(make_sandbox).parameters
    names = {"url": "url", "max_concurrent": "max_concurrent", "wall_s": "wall_s", "memory_limit_mb": "memory_mb"}
    for key, parameter in {**names, "accept_weak_isolation": "accept_weak_isolation"}.items():
        assert made[parameter].default == getattr(config, key), key
    assert (ProgramLimits().wall_s, ProgramLimits().memory_mb) == (config.wall_s, config.memory_limit_mb)


def test_the_scan_sees_parameters_and_fields_and_nothing_else():
    source = """
LIMIT = 4.0
class Group:
    wait_s: float = 3.0
    seed: int
    def __init__(self, a, timeout_s=5.0, *, start_timeout_s: float = LIMIT, clip_ratio=0.2, other=1, top_k=None, stop=()):
        pass
def run(x, silence_s):
    seed = 0
    def inner(retry_rate=0.5): ...
def score(timeout_s=RewardConfig.timeout_s, weights=field(default_factory=dict)): ...
"""
    assert second_defaults(source) == [
        "Group.wait_s",
        "Group.__init__.timeout_s",
        "Group.__init__.start_timeout_s",
        "Group.__init__.clip_ratio",
        "run.inner.retry_rate",
    ]
