from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model
from transformers import GenerationConfig

from lockstep.workers.rollout.request import Request


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("stop", [(1, 7), ()], ids=["stop", "no stop"])
def test_greedy_equals_the_native_engine(tmp_path: Path, model_type: str, stop: tuple[int, ...]) -> None:
    """Tokens and reasons the same, log-probs within 2e-5: padding on the left and another attention function."""
    path = save_tiny_model(tmp_path, model_type)
    params = sampling(temperature=0.0, stop_token_ids=stop)
    native = make_rollout(path).generate(make_requests(), params)
    for max_num_seqs in (3, 64):
        completions = make_rollout(path, "hf", max_num_seqs).generate(make_requests(), params)
        assert ids_of(completions) == ids_of(native)
        assert [c.finish_reason for c in completions] == [c.finish_reason for c in native]
        for mine, theirs in zip(completions, native, strict=True):
            torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


def test_the_models_own_generation_settings_are_not_used(tmp_path: Path) -> None:
    """A folder may ask for a repetition penalty or a top-k; what is sampled must be what the run asks for."""
    path = save_tiny_model(tmp_path)
    rollout = make_rollout(path, "hf")
    expected = [ids_of(rollout.generate(make_requests(), sampling(temperature=t))) for t in (0.0, 1.0)]
    own = GenerationConfig(repetition_penalty=5.0, top_k=1, min_new_tokens=12, temperature=9.0, do_sample=True, eos_token_id=3)
    own.save_pretrained(path)
    rollout = make_rollout(path, "hf")
    assert [ids_of(rollout.generate(make_requests(), sampling(temperature=t))) for t in (0.0, 1.0)] == expected


def test_sampled_log_probs_are_those_of_the_whole_distribution_at_the_temperature(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path), "hf")
    request = Request(torch.tensor([4, 5, 6]), (0, 0, 0))
    (completion,) = rollout.generate([request], sampling(temperature=0.5, top_k=3, top_p=0.9))
    ids = torch.cat([request.prompt_ids, completion.ids])
    with torch.no_grad():
        logits = rollout.module(input_ids=ids[None]).logits[0, 2:-1] / 0.5
    expected = torch.log_softmax(logits, -1).gather(-1, completion.ids[:, None])[:, 0]
    torch.testing.assert_close(completion.log_probs, expected, atol=2e-5, rtol=0)


def test_no_requests_give_no_completions(tmp_path: Path) -> None:
    assert make_rollout(save_tiny_model(tmp_path), "hf").generate([], sampling()) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_requests_get_an_error_each_and_the_others_finish(tmp_path: Path, temperature: float) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path), "hf")
    rollout.module.model.embed_tokens.weight.data[17] = torch.nan
    requests = [
        Request(torch.tensor([3, 4]), (2, 40, 0)),
        Request(torch.tensor([5, 17]), (2, 41, 1)),
        Request(torch.tensor([32]), (2, 42, 0)),
    ]
    good, broken, foreign = rollout.generate(requests, sampling(temperature=temperature, stop_token_ids=(), max_tokens=1))
    assert (good.finish_reason, broken.finish_reason, foreign.finish_reason) == ("length", "error", "error")
    assert "request (2, 41, 1) (step, prompt, sample): the model's logits are not finite at token 0" in broken.error
    assert "request (2, 42, 0) (step, prompt, sample): the prompt has token 32" in foreign.error


def test_penalty_limits_and_stop_strings_are_those_of_the_native_engine(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    requests = [
        Request(torch.tensor([3 + i, 4]), (0, i, 0), max_tokens=limit, stop_token_ids=stop)
        for i, (limit, stop) in enumerate([(3, None), (12, (1, 9)), (9, ()), (None, (20,))])
    ]

    def letters(ids: list[int]) -> str:
        return "".join(chr(ord("A") + token) for token in ids)

    native, hf = (make_rollout(path, name, decode_text=letters) for name in ("native", "hf"))
    params = sampling(temperature=0.0, repetition_penalty=1.7)
    (free,) = native.generate(requests[2:3], params)
    params = replace(params, stop=(letters(free.ids.tolist()[5:7]),))
    for mine, theirs in zip(hf.generate(requests, params), native.generate(requests, params), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        assert mine.finish_reason == theirs.finish_reason
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)
    assert len(native.generate(requests, params)[2].ids) == 7
