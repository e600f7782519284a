"""What tests share."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from lockstep.utils.garbage import freeze_objects, unfreeze_objects

if TYPE_CHECKING:  # what a run needs is imported by the fixtures: it takes seconds, in pytest-xdist's own process too
    from lockstep.config import PPOConfig
    from lockstep.embedded import EmbeddedTask

pytest.register_assert_rewrite("helpers.conformance", "helpers.engine_properties")
torch.set_num_threads(1)
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's processes give way to all others, such as the other tests
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes for tasks, of which we have none
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test
settings.load_profile("lockstep")

STARTS_A_PROCESS = ("os.fork", "os.posix_spawn", "subprocess.Popen")
"""Events of sys.addaudithook."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes", action="store_true", help="a test that starts a process is skipped when it does (make quick)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """No list of such tests has to be kept. An audit hook cannot be removed, so it stays for the whole run."""
    main = os.getpid()

    def skip(event: str, arguments: Any) -> None:
        if event in STARTS_A_PROCESS and "PYTEST_CURRENT_TEST" in os.environ and os.getpid() == main:
            pytest.skip("it starts a process")

    if config.getoption("--no-processes"):
        sys.addaudithook(skip)


LONGEST = (
    "e2e/test_demo.py",
    "e2e/test_interrupted.py",
    "e2e/test_kills.py",
    "e2e/test_sweep.py",
    "trainer/ppo/test_ray_trainer.py",
    "rewards/graders/test_code.py",
    "workers/engine/fsdp/test_tensor_parallel.py",
    "e2e/test_failures.py",
    "e2e/test_signals.py",
    "e2e/test_three_nodes.py",
    "e2e/test_roles.py",
    "single_controller/ray/test_worker_group.py",
)
"""Files that would keep one process busy after the others have ended, were they begun late; the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with Ray come last: forking ranks (helpers.distributed) out of a process that runs Ray's threads crashes them.

    Whole files, because that is what pytest-xdist hands out (--dist loadfile), in this order (--no-loadscope-reorder).
    """

    def uses_ray(item: pytest.Item) -> bool:
        return item.get_closest_marker("ray") is not None or "ray_cluster" in getattr(item, "fixturenames", ())

    files = {item.path for item in items if uses_ray(item)}
    length = {Path(__file__).parent / name: len(LONGEST) - i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path in files, -length.get(item.path, 0)))


@pytest.fixture(scope="session", autouse=True)
def frozen_suite() -> None:
    """What all test files have imported is left out of collections. A run that finds objects frozen leaves them so (utils/garbage.py): to
    collect and freeze them takes 0.15 s, and there are hundreds of runs."""
    freeze_objects()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """In this test objects are frozen by what it tests only, as in a program that has just begun."""
    unfreeze_objects()
    yield
    unfreeze_objects()
    freeze_objects()


@pytest.fixture(scope="session")
def warm_ray() -> Iterator[dict[str, str]]:
    """A `runtime_env` whose workers have their modules imported (helpers/warm.py); empty where Ray is too old to know `py_executable`."""
    pytest.importorskip("ray")
    from helpers.warm import warm_workers

    if importlib.util.find_spec("ray._private.runtime_env.py_executable") is None:
        yield {}
        return
    with TemporaryDirectory() as folder, warm_workers(Path(folder)) as executable:  # the names of sockets are short
        yield {"py_executable": executable}


@pytest.fixture(scope="session")
def ray_cluster(warm_ray: dict[str, str]) -> Iterator[None]:
    """One Ray for all tests that need it; the CPUs are counted, not real."""
    import ray

    with pytest.MonkeyPatch.context() as patch:  # Ray's processes inherit it: they import the tests' own worker classes
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=200 * 1024**2, runtime_env=warm_ray)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def embedded_task(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTask:
    """The embedded task's files, made once for all processes of pytest-xdist."""
    from lockstep.embedded import prepare

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "embedded"
    made = folder / "task.pickle"
    with FileLock(f"{folder}.lock", timeout=240):
        if not made.exists():
            made.write_bytes(pickle.dumps(prepare(folder, seed=0)))
        return pickle.loads(made.read_bytes())


@pytest.fixture(scope="session")
def embedded_config_in(embedded_task: EmbeddedTask) -> Callable[..., PPOConfig]:
    """`embedded_config_in(run_dir, "key=value", ...)`: the embedded task in small batches, for runs that several tests look at."""
    from lockstep.config import load_config

    def make(run_dir: Path, *overrides: str) -> PPOConfig:
        return load_config(
            [
                f"data.train_files={embedded_task.train_file}",
                f"data.val_files={embedded_task.val_file}",
                "data.val_max_samples=32",
                "data.train_batch_size=8",
                "data.max_prompt_length=16",
                "data.max_response_length=12",
                f"actor_rollout_ref.model.path={embedded_task.model}",
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.actor.optim.lr=3e-4",
                "critic.optim.lr=1e-3",
                "algorithm.use_kl_in_reward=true",
                f"trainer.default_local_dir={run_dir}",
                "trainer.device=cpu",
                "trainer.save_freq=0",
                "trainer.test_freq=0",
                *overrides,
            ]
        )

    return make


@pytest.fixture(scope="session")
def three_steps(embedded_config_in: Callable[..., PPOConfig], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of actor, rollout, reference and critic in one process: what every other placement must equal."""
    from helpers.run import STEPS, roles, train

    config = embedded_config_in(tmp_path_factory.mktemp("three_steps"), *STEPS)
    return train(config, {"global_pool": [1]}, roles("ActorRollout", "Critic", "RefPolicy"))


@pytest.fixture
def embedded_config(embedded_config_in: Callable[..., PPOConfig], tmp_path: Path) -> Callable[..., PPOConfig]:
    """`embedded_config("key=value", ...)`: the same, in a run folder of the test's own."""
    return partial(embedded_config_in, tmp_path / "run")
