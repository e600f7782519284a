"""The SGLang engine against a server of our own that speaks SGLang's documented API. Real SGLang was not run."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sglang_server
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.run import roles, train
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.backends.sglang import server
from lockstep.backends.sglang.engine import SGLangRollout
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import WeightSyncError, WorkerDied, WorkerTimeout
from lockstep.workers.rollout import registry
from lockstep.workers.rollout.request import Request
from lockstep.workers.weight_sync.disk import DiskSender
from lockstep.workers.weight_sync.ipc import IPCSender

CPU = torch.device("cpu")


def serve_with(monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Our server in SGLang's place."""
    monkeypatch.setattr(server, "server_command", lambda arguments: [sys.executable, sglang_server.__file__, *arguments, *more])


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("A") + token) for token in ids)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_engine(path: str) -> Iterator[SGLangRollout]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve_with(monkeypatch)
        engine = SGLangRollout(ModelConfig(path=path), RolloutConfig(name="sglang"), 0, CPU, torch.float32, letters)
    yield engine
    engine.close()


@pytest.fixture
def start(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SGLangRollout]]:
    engines: list[SGLangRollout] = []

    def make(*more: str, device: str = "cpu", **options: Any) -> SGLangRollout:
        serve_with(monkeypatch, *more)
        config, model = RolloutConfig(name="sglang", **options), ModelConfig(path=path)
        engines.append(SGLangRollout(model, config, 0, torch.device(device), torch.float32, letters))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_greedy_tokens_log_probs_and_reasons_are_those_of_the_native_engine(shared_engine: SGLangRollout, path: str) -> None:
    native = make_rollout(path, decode_text=letters)
    requests = [
        *make_requests(),
        Request(torch.tensor([5, 6]), (0, 1, 0), max_tokens=3),
        Request(torch.tensor([5, 6]), (0, 2, 0), stop_token_ids=(20,)),
        Request(torch.tensor([99]), (0, 3, 0)),
    ]
    params = sampling(temperature=0.0)
    stop = letters(native.generate(requests, params)[1].ids.tolist()[4:6])
    for changed in (params, replace(params, stop=(stop,))):
        for mine, theirs in zip(shared_engine.generate(requests, changed), native.generate(requests, changed), strict=True):
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert (mine.finish_reason, mine.error) == (theirs.finish_reason, theirs.error)
            torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


def test_a_rerun_repeats_and_another_sample_differs(shared_engine: SGLangRollout) -> None:
    first = ids_of(shared_engine.generate(make_requests(), sampling()))
    assert ids_of(shared_engine.generate(make_requests(), sampling())) == first
    assert ids_of(shared_engine.generate(make_requests(step=5), sampling())) != first


def test_log_probs_that_the_server_cannot_give_are_missing(shared_engine: SGLangRollout, path: str) -> None:
    """At a temperature with top-k they are right; with a repetition penalty SGLang's are of another distribution."""
    request = Request(torch.tensor([4, 5, 6]), (0, 0, 0))
    (completion,) = shared_engine.generate([request], sampling(temperature=0.5, top_k=3))
    ids = torch.cat([request.prompt_ids, completion.ids])
    with torch.no_grad():
        logits = tiny_model()(ids[None]).logits[0, 2:-1] / 0.5
    expected = logits.log_softmax(-1).gather(-1, completion.ids[:, None])[:, 0]
    torch.testing.assert_close(completion.log_probs, expected, atol=2e-5, rtol=0)
    (completion,) = shared_engine.generate([request], sampling(repetition_penalty=1.5))
    assert len(completion.ids) > 0
    assert completion.log_probs.isnan().all()


def test_weights_arrive_and_a_failed_update_stops_generation(shared_engine: SGLangRollout, path: str, tmp_path: Path) -> None:
    engine = shared_engine
    expected = make_rollout(save_tiny_model(tmp_path / "other", seed=3)).generate(make_requests(), sampling(temperature=0.0))
    with DiskSender(7) as sender:
        sent = sender.send(tiny_model(seed=3).named_parameters())
        assert engine.receive(sender.offer(), CPU) == sent
    found = engine.generate(make_requests(), sampling(temperature=0.0))
    assert ids_of(found) == ids_of(expected)
    assert [completion.policy_version for completion in found] == [7] * len(found)
    with IPCSender(8) as sender:
        sender.send(tiny_model().named_parameters())
        with pytest.raises(WeightSyncError, match="use weight_sync=disk"):
            engine.receive(sender.offer(), CPU)
    with pytest.raises(WeightSyncError, match="does not generate"):
        engine.generate(make_requests(), sampling())
    with DiskSender(9) as sender:
        sender.send(tiny_model().named_parameters())
        engine.receive(sender.offer(), CPU)
    calls = [json.loads(line)[0] for line in (Path(path) / "calls.jsonl").read_text().splitlines()]
    updates = [call for call in calls if call != "/generate"]
    assert updates[-2:] == ["/update_weights_from_disk", "/flush_cache"], "the prefix cache is of the old weights"


def test_the_cache_is_given_back_on_a_gpu_and_taken_again_by_the_next_generation(start, path: str) -> None:
    engine = start("--canned-s", "0", device="cuda")
    (Path(path) / "calls.jsonl").unlink(missing_ok=True)
    engine.sleep()
    engine.sleep()
    engine.generate(make_requests(1), sampling())
    calls = [json.loads(line) for line in (Path(path) / "calls.jsonl").read_text().splitlines()]
    assert [call for call, _ in calls] == ["/release_memory_occupation", "/resume_memory_occupation", "/generate"]
    assert calls[0][1] == calls[1][1] == {"tags": ["kv_cache"]}


def test_a_server_that_is_killed_is_an_error_at_once_and_one_that_hangs_after_the_deadline(start) -> None:
    engine = start("--canned-s", "0.2", silence_timeout_s=60.0)
    stream = engine.generate_stream(make_requests(20), sampling())
    next(stream)
    os.kill(engine.server.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"SGLang \(pid \d+\) died: during POST /generate \(killed by SIGKILL\)"):
        list(stream)
    assert time.monotonic() - started < 10
    with pytest.raises(WorkerDied):
        engine.generate(make_requests(1), sampling())
    engine = start("--canned-s", "30", silence_timeout_s=0.5)
    with pytest.raises(WorkerTimeout, match="gave no sign of life for 0.5 s"):
        engine.generate(make_requests(1), sampling())


def test_a_server_that_does_not_start_shows_the_end_of_its_output(start) -> None:
    with pytest.raises(WorkerDied, match=r"during its start \(exit code 2\); the end of its output:[\s\S]*--nonsense"):
        start("--nonsense")


def test_ppo_trains_with_it(embedded_config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation follows the updates: the sampler's log-probs stay those of the trainer, in the third step as in the first."""
    serve_with(monkeypatch)
    monkeypatch.setattr(registry, "check_installed", lambda name: None)
    monkeypatch.setattr("lockstep.workers.policy.check_installed", lambda name: None)
    more = ["trainer.total_training_steps=3", "trainer.val_before_train=false", "data.train_batch_size=4"]
    rollout = ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.exactness_bound=0"]
    metrics = train(embedded_config(*more, *rollout), {"p": [1]}, roles("ActorRollout", "Critic", "RefPolicy", pool="p"))
    assert len(metrics) == 3
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in metrics)
