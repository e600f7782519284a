"""What the tests with real vLLM share. `make test-vllm` runs them."""

from collections.abc import Iterator

import pytest
from helpers.vllm_engines import CPU, SHAPE, model, save_model, start

from lockstep.backends.vllm.engine import VLLMRollout
from lockstep.embedded import EmbeddedTask, prepare, task
from lockstep.workers.weight_sync.ipc import IPCSender


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one_engine(path: str) -> Iterator[VLLMRollout]:
    """A start takes 15 seconds or more: one engine serves all tests that leave it alive."""
    engine = start(path)
    yield engine
    engine.close()


@pytest.fixture
def engine(one_engine: VLLMRollout) -> VLLMRollout:
    """It has the weights of `path` again."""
    with IPCSender(one_engine.version + 1) as sender:
        sender.send(model().named_parameters())
        one_engine.receive(sender.offer(), CPU)
    return one_engine


@pytest.fixture(scope="session")
def embedded_task(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTask:
    """The embedded task with a model whose heads vLLM has a CPU kernel for."""
    original = task.model_config
    with pytest.MonkeyPatch.context() as monkeypatch:

        def wide(tokenizer):
            config = original(tokenizer)
            config.head_dim = SHAPE["head_dim"]
            return config

        monkeypatch.setattr(task, "model_config", wide)
        return prepare(tmp_path_factory.mktemp("embedded"), seed=0)
