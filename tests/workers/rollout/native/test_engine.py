from pathlib import Path

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.errors import NumericalError
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.packing import Budget
from lockstep.workers.rollout.base import Completion, Request

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
}


def is_a_valid_end(completion: Completion, max_tokens: int, stop: set[int]) -> bool:
    ids = completion.ids.tolist()
    if completion.finish_reason == "stop":
        return ids[-1] in stop and not stop & set(ids[:-1]) and len(ids) <= max_tokens
    return completion.finish_reason == "length" and len(ids) == max_tokens and not stop & set(ids)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_equal_transformers_one_prompt_at_a_time(tmp_path: Path, model_type: str) -> None:
    changes = FAMILIES[model_type]
    rollout = make_rollout(save_tiny_model(tmp_path, model_type, **changes))
    requests = make_requests()
    completions = rollout.generate(requests, sampling(temperature=0.0, stop_token_ids=(1, 7)))
    model = tiny_model(model_type, **changes)
    for request, completion in zip(requests, completions, strict=True):
        prompt = request.prompt_ids[None]
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=[1, 7], pad_token_id=0
        )
        assert completion.ids.tolist() == out[0, prompt.shape[1] :].tolist()
        assert is_a_valid_end(completion, 12, {1, 7})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_log_probs_equal_the_trainers(tmp_path: Path, model_type: str) -> None:
    """Within 2e-5 in float32, at the sampling temperature, whatever top-k and top-p keep."""
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    requests = make_requests()
    completions = make_rollout(path, max_num_seqs=3).generate(requests, sampling(temperature=0.6, top_k=20, top_p=0.95))
    data = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([request.prompt_ids for request in requests]),
            "responses": Ragged.from_rows([completion.ids for completion in completions]),
        }
    )

    def train() -> torch.Tensor:
        return make_tiny_engine(path).forward(data, Budget(40), 0.6).ragged("log_probs").values

    (trained,) = run_distributed(train, 1)
    sampled = torch.cat([completion.log_probs for completion in completions])
    assert sampled.dtype == torch.float32
    torch.testing.assert_close(sampled, trained, atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_tokens_do_not_depend_on_batching_order_or_calls(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    requests = make_requests(9)
    params = sampling(stop_token_ids=(1, 5, 9))
    expected = make_rollout(path).generate(requests, params)
    assert len({len(completion.ids) for completion in expected}) > 2, "responses of one length would not refill slots unevenly"
    for max_num_seqs in (1, 3, 64):
        rollout = make_rollout(path, max_num_seqs=max_num_seqs)
        assert ids_of(rollout.generate(requests, params)) == ids_of(expected)
        assert ids_of(rollout.generate(requests[::-1], params)[::-1]) == ids_of(expected)
        assert ids_of(rollout.generate(requests[:4], params) + rollout.generate(requests[4:], params)) == ids_of(expected)


def test_every_part_of_the_key_and_the_seed_change_the_tokens(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    prompt = torch.tensor([4, 5])
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    params = sampling(stop_token_ids=())
    first, *others, again = ids_of(rollout.generate([Request(prompt, key) for key in keys], params))
    assert first == again
    assert all(ids != first for ids in others)
    assert ids_of(rollout.generate([Request(prompt, keys[0])], sampling(stop_token_ids=(), seed=4)))[0] != first


def test_a_response_ends_at_a_stop_token_or_at_its_length(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path), max_num_seqs=4)
    completions = rollout.generate(make_requests(24), sampling(stop_token_ids=(1, 5, 9)))
    assert all(is_a_valid_end(completion, 12, {1, 5, 9}) for completion in completions)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert all(len(completion.ids) == len(completion.log_probs) for completion in completions)
    one = rollout.generate(make_requests(5), sampling(max_tokens=1))
    assert [len(completion.ids) for completion in one] == [1] * 5
    endless = rollout.generate(make_requests(5), sampling(stop_token_ids=()))
    assert [completion.finish_reason for completion in endless] == ["length"] * 5


def test_no_requests_give_no_completions(tmp_path: Path) -> None:
    assert make_rollout(save_tiny_model(tmp_path)).generate([], sampling()) == []


def test_a_completion_says_which_weights_wrote_it(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    rollout.version = 6
    assert rollout.generate(make_requests(1), sampling())[0].policy_version == 6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_request(tmp_path: Path, bad: float, temperature: float) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    rollout.module.model.embed_tokens.weight.data[17] = bad
    requests = [Request(torch.tensor([3, 4]), (2, 40, 0)), Request(torch.tensor([17]), (2, 41, 1))]
    with pytest.raises(NumericalError, match=r"request \(2, 41, 1\)"):
        rollout.generate(requests, sampling(temperature=temperature, stop_token_ids=(), max_tokens=1))
