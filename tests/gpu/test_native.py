"""The native engine on a GPU against itself on the CPU: the same tokens for every way to sample, in float32."""

import dataclasses

import pytest
import torch
from helpers.rollouts import PAD, make_requests, sampling
from helpers.tiny import save_tiny_model

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.generation.engine import NativeRollout
from lockstep.generation.gpu import short_prefill
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Completion


def engines(path, **config):
    """The same model on both devices."""
    section = RolloutConfig(max_num_seqs=16, **config)
    models = [load_model(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0).to(device) for device in ("cpu", "cuda")]
    modules = [share_structure(model, NativeRollout.attention) for model in models]
    return [make_rollout(module, section, PAD, lambda ids: "".join(chr(97 + i) for i in ids)) for module in modules]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8, "temperature": 0.8},
        {"stop": ("ba", "dd")},
    ],
    ids=str,
)
def test_every_way_to_sample_gives_the_tokens_of_the_cpu(tmp_path, options):
    on_cpu, on_gpu = engines(save_tiny_model(tmp_path, "qwen2"))
    requests = make_requests(40)
    for want, got in zip(
        on_cpu.generate(requests, sampling(**options)), on_gpu.generate(requests, sampling(**options)), strict=True
    ):
        assert got.ids.tolist() == want.ids.tolist()
        assert got.finish_reason == want.finish_reason
        torch.testing.assert_close(got.log_probs, want.log_probs, atol=5e-5, rtol=0)


def test_penalties_that_come_and_go_are_decoded_with_graphs(tmp_path):
    on_cpu, on_gpu = engines(save_tiny_model(tmp_path, "qwen2"))
    requests = make_requests(9)
    for penalty in (1.5, 1.0, 1.5):
        params = sampling(repetition_penalty=penalty)
        want, got = ([c.ids.tolist() for c in engine.generate(requests, params)] for engine in (on_cpu, on_gpu))
        assert got == want
        steps = on_gpu.backend._workspace.runner
        assert steps._captures
        assert steps._graphs


def test_an_aborted_request_ends_and_the_others_go_on(tmp_path):
    on_gpu = engines(save_tiny_model(tmp_path, "qwen2", max_position_embeddings=512))[1]
    requests = make_requests(3)
    requests[0] = dataclasses.replace(requests[0], max_tokens=4)
    ended = {}
    for completion in on_gpu.generate_stream(requests, sampling(max_tokens=200, stop_token_ids=())):
        ended[completion.index] = completion
        on_gpu.abort(2)  # asked for when the first response is there
    assert {index: c.finish_reason for index, c in ended.items()} == {0: "length", 1: "length", 2: "abort"}
    assert 0 < len(ended[2].ids) == len(ended[2].log_probs) < 200
    assert (ended[2].ids >= 0).all()


def test_sleep_gives_memory_back_and_the_next_call_takes_it_again(tmp_path):
    on_gpu = engines(save_tiny_model(tmp_path, "qwen2"))[1]
    want = [c.ids.tolist() for c in on_gpu.generate(make_requests(), sampling())]
    on_gpu.sleep()
    asleep = torch.cuda.memory_allocated()
    for _ in range(5):
        assert [c.ids.tolist() for c in on_gpu.generate(make_requests(), sampling())] == want
        on_gpu.sleep()
        assert torch.cuda.memory_allocated() == asleep


@pytest.mark.parametrize(("most_keys", "few"), [(0, 1024), (1 << 19, 1024), (1 << 19, 16)])
def test_conversations_in_a_stream_are_those_of_the_cpu(tmp_path, monkeypatch, most_keys, few):
    """Three turns of requests with parameters of their own; prompts computed packed, and as a captured step, in small and large blocks."""
    monkeypatch.setattr(short_prefill, "_MOST_KEYS", most_keys)
    monkeypatch.setattr(short_prefill, "_FEW", few)
    own = [
        None,
        sampling(temperature=0.5, top_k=7, seed=3),
        sampling(temperature=0.0),
        sampling(repetition_penalty=1.4, max_tokens=9),
    ]
    found = []
    for engine in engines(save_tiny_model(tmp_path, "qwen2", max_position_embeddings=512)):
        answers, before = [], [None] * 8
        with engine.open(sampling(stop_token_ids=()), num_tokens=4096) as stream:
            for turn in range(3):
                kept = before
                before = [
                    stream.add(
                        dataclasses.replace(
                            request,
                            keep=True,
                            continues=kept[i],
                            sampling=own[(turn + i) % 4],
                            streams=i % 2 == 0,
                            top_log_probs=3 * (i == 5),
                            prompt_log_probs=i % 3 == 0,
                        )
                    )
                    for i, request in enumerate(make_requests(8))
                ]
                whole = [answer for answer in stream if isinstance(answer, Completion)]
                answers += sorted(whole, key=lambda answer: answer.index)
        found.append(answers)
    assert len(found[0]) == 24
    for want, got in zip(*found, strict=True):
        assert (got.ids.tolist(), got.finish_reason) == (want.ids.tolist(), want.finish_reason)
        torch.testing.assert_close(got.log_probs, want.log_probs, atol=5e-5, rtol=0)
        if want.prompt_log_probs is not None:
            torch.testing.assert_close(got.prompt_log_probs, want.prompt_log_probs, atol=5e-5, rtol=0, equal_nan=True)
