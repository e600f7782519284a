"""What tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lockstep.config import PPOConfig, load_config
from lockstep.embedded import EmbeddedTask, prepare

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with Ray come last: forking ranks (helpers.distributed) out of a process that runs Ray's threads crashes them."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None or "ray_cluster" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray for all tests that need it; the CPUs are counted, not real."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=200 * 1024**2)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def embedded_task(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTask:
    """The embedded task's files, made once."""
    return prepare(tmp_path_factory.mktemp("embedded"), seed=0)


@pytest.fixture
def embedded_config(embedded_task: EmbeddedTask, tmp_path: Path) -> Callable[..., PPOConfig]:
    """`embedded_config("key=value", ...)`: the embedded task in small batches, in a run folder of the test's own."""

    def make(*overrides: str) -> PPOConfig:
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
                f"trainer.default_local_dir={tmp_path / 'run'}",
                "trainer.device=cpu",
                "trainer.save_freq=0",
                "trainer.test_freq=0",
                *overrides,
            ]
        )

    return make
