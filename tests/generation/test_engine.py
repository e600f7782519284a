from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.errors import ConfigError
from lockstep.generation.cpu import fused_backend, paged_attention
from lockstep.generation.cpu.passes import PassBackend
from lockstep.generation.engine import NativeRollout
from lockstep.generation.pages import KVCache
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.rollout.request import Completion, Request


def is_a_valid_end(completion: Completion, max_tokens: int, stop: set[int]) -> bool:
    ids = completion.ids.tolist()
    if completion.finish_reason == "stop":
        return ids[-1] in stop and not stop & set(ids[:-1]) and len(ids) <= max_tokens
    return completion.finish_reason == "length" and len(ids) == max_tokens and not stop & set(ids)


def same_bits(left: list[Completion], right: list[Completion]) -> bool:
    return all(
        torch.equal(a.ids, b.ids) and torch.equal(a.log_probs, b.log_probs) and a.finish_reason == b.finish_reason
        for a, b in zip(left, right, strict=True)
    )


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`small_pool(pages)`: as if there were memory for that many pages only."""

    def shrink(pages: int) -> None:
        monkeypatch.setattr(PassBackend, "most_pages", lambda self: pages)

    return shrink


# -- exactness ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_and_log_probs_equal_transformers_and_the_trainer(tmp_path: Path, model_type: str) -> None:
    """Tokens of transformers' generate, one prompt at a time; log-probs of the training engine within 5e-5, both in float32.

    In passes of at most 5 tokens, so that prompts are cut and share passes with decoding rows.
    """
    changes = FAMILIES[model_type]
    path = save_tiny_model(tmp_path, model_type, **changes)
    rollout = make_rollout(path, max_num_seqs=3, max_num_batched_tokens=5)
    rollout.check()
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

    sampled = rollout.generate(requests, sampling(temperature=0.6, top_k=20, top_p=0.95))
    rows = {
        "prompts": Ragged.from_rows([request.prompt_ids for request in requests]),
        "responses": Ragged.from_rows([completion.ids for completion in sampled]),
    }

    def train() -> torch.Tensor:
        return make_tiny_engine(path).forward(DataProto.from_dict(rows), Budget(40), 0.6).ragged("log_probs").values

    (trained,) = run_distributed(train, 1)
    log_probs = torch.cat([completion.log_probs for completion in sampled])
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, trained, atol=5e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_tokens_do_not_depend_on_batching_order_or_calls(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    requests = make_requests(9)
    params = sampling(top_k=25, top_p=0.97)
    expected = make_rollout(path).generate(requests, params)
    assert len({tuple(ids) for ids in ids_of(expected)}) > 1
    for seats, budget in ((1, 8192), (2, 3), (5, 2)):
        rollout = make_rollout(path, max_num_seqs=seats, max_num_batched_tokens=budget)
        assert ids_of(rollout.generate(requests, params)) == ids_of(expected)
        assert ids_of(rollout.generate(requests[::-1], params)[::-1]) == ids_of(expected)
        assert ids_of(rollout.generate(requests[:4], params) + rollout.generate(requests[4:], params)) == ids_of(expected)


def test_a_short_pool_preempts_and_gives_the_same_tokens(tmp_path: Path, small_pool: Callable[[int], None]) -> None:
    """Three pages beside the scratch page: one sequence of up to 34 tokens, while eight run without the limit."""
    path = save_tiny_model(tmp_path)
    requests = [Request(torch.arange(2, 2 + 3 * i % 11 + 1), (0, i, 0)) for i in range(8)]
    params = sampling(max_tokens=24, stop_token_ids=())
    expected = make_rollout(path).generate(requests, params)
    small_pool(4)
    rollout = make_rollout(path)
    schedulers = keep_schedulers(rollout)
    completions = rollout.generate(requests, params)
    assert ids_of(completions) == ids_of(expected)
    assert schedulers[0].num_preemptions > 0
    for mine, theirs in zip(completions, expected, strict=True):
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


def test_samples_that_share_a_prompt_get_what_they_get_alone(tmp_path: Path) -> None:
    """Prompts of one page, of a part of one, and of several; one is shared by samples that do not fit together."""
    path = save_tiny_model(tmp_path)
    requests = [Request(torch.arange(2, 2 + length) % 30 + 2, (0, length, k)) for length in (5, 16, 21) for k in range(6)]
    params = sampling(stop_token_ids=())
    alone = [make_rollout(path).generate([request], params)[0] for request in requests]
    for seats in (18, 4):
        together = make_rollout(path, max_num_seqs=seats).generate(requests, params)
        assert ids_of(together) == ids_of(alone)
        for mine, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"hidden_size": 128, "intermediate_size": 256}),  # large enough for prepacked weights
        ("gemma2", FAMILIES["gemma2"]),
        ("mixtral", FAMILIES["mixtral"]),
    ],
)
def test_a_batch_invariant_engine_gives_the_same_bits_in_any_batch(
    tmp_path: Path, small_pool: Callable[[int], None], model_type: str, changes: dict[str, Any]
) -> None:
    path = save_tiny_model(tmp_path, model_type, **changes)
    requests = [Request(torch.arange(2, 2 + 7 * i % 23 + 1) % 30 + 2, (0, i % 5, i)) for i in range(6)]
    params = sampling(stop_token_ids=(), max_tokens=9)
    expected = make_rollout(path, batch_invariant=True).generate(requests, params)
    alone = make_rollout(path, batch_invariant=True, max_num_seqs=1)
    assert same_bits([alone.generate([request], params)[0] for request in requests], expected)
    small_pool(5)
    for seats, budget in ((3, 7), (6, 2)):
        rollout = make_rollout(path, batch_invariant=True, max_num_seqs=seats, max_num_batched_tokens=budget)
        assert same_bits(rollout.generate(requests[::-1], params)[::-1], expected)
    plain = make_rollout(path).generate(requests, params)
    for mine, theirs in zip(expected, plain, strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


def test_every_part_of_the_key_and_the_seed_change_the_tokens(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    prompt = torch.tensor([4, 5])
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    params = sampling(stop_token_ids=())
    first, *others, again = ids_of(rollout.generate([Request(prompt, key) for key in keys], params))
    assert first == again
    assert all(ids != first for ids in others)
    assert ids_of(rollout.generate([Request(prompt, keys[0])], sampling(stop_token_ids=(), seed=4)))[0] != first


@pytest.mark.parametrize("changes", [{}, {"batch_invariant": True}])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_what_is_in_pages_that_nobody_has_written_does_not_matter(
    tmp_path: Path, model_type: str, compiled: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C functions, the module with their attention, and PyTorch alone; with a window and soft-capped scores."""
    if not compiled:
        monkeypatch.setattr(fused_backend, "library", lambda: None)
        monkeypatch.setattr(paged_attention, "library", lambda: None)
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    done = []
    for content in (0.0, torch.nan):
        made = KVCache.__init__

        def make(cache: KVCache, *arguments: Any, made: Any = made, content: float = content) -> None:
            made(cache, *arguments)
            cache.pool.fill_(content)

        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "__init__", make)
            done.append(make_rollout(path, **changes).generate(make_requests(9), sampling(stop_token_ids=(), max_tokens=40)))
    assert all(c.finish_reason == "length" for c in done[0])
    assert same_bits(*done)


# -- ends --------------------------------------------------------------------------------------------------------------------


def test_a_response_ends_at_a_stop_token_or_at_its_length(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path), max_num_seqs=4)
    completions = rollout.generate(make_requests(24), sampling(stop_token_ids=(1, 5, 9)))
    assert all(is_a_valid_end(completion, 12, {1, 5, 9}) for completion in completions)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert all(len(completion.ids) == len(completion.log_probs) for completion in completions)
    one = rollout.generate(make_requests(5), sampling(max_tokens=1))
    assert [len(completion.ids) for completion in one] == [1] * 5


def test_a_request_has_limits_of_its_own(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    prompt = torch.tensor([4, 5, 6])
    (free,) = rollout.generate([Request(prompt, (0, 0, 0))], sampling(stop_token_ids=()))
    ids = free.ids.tolist()
    own = [
        Request(prompt, (0, 0, 0), max_tokens=5),
        Request(prompt, (0, 0, 0), stop_token_ids=(ids[3],)),
        Request(prompt, (0, 0, 0)),
    ]
    cut, stopped, whole = rollout.generate(own, sampling(stop_token_ids=()))
    assert cut.ids.tolist() == ids[:5]
    assert stopped.ids.tolist() == ids[: ids.index(ids[3]) + 1]
    assert (cut.finish_reason, stopped.finish_reason, whole.finish_reason) == ("length", "stop", "length")
    assert whole.ids.tolist() == ids


def test_a_response_ends_with_the_token_that_completes_a_stop_string(tmp_path: Path) -> None:
    """Tokens are letters here, so a string of three spans three tokens."""
    rollout = make_rollout(
        save_tiny_model(tmp_path), decode_text=lambda ids: "".join(chr(ord("A") + token) for token in ids), max_num_seqs=3
    )
    requests = make_requests(6)
    free = rollout.generate(requests, sampling(stop_token_ids=()))
    target = "".join(chr(ord("A") + token) for token in free[2].ids.tolist()[4:7])
    stopped = rollout.generate(requests, sampling(stop_token_ids=(), stop=("nothing", target)))
    assert stopped[2].finish_reason == "stop"
    for mine, theirs in zip(stopped, free, strict=True):
        text = "".join(chr(ord("A") + token) for token in theirs.ids.tolist())
        end = text.find(target)
        assert mine.ids.tolist() == theirs.ids.tolist()[: len(text) if end < 0 else end + 3]
    with pytest.raises(ConfigError, match="stop strings need the tokenizer"):
        make_rollout(save_tiny_model(tmp_path)).generate(requests, sampling(stop=("x",)))


def test_a_response_never_runs_past_the_models_context(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    (completion,) = rollout.generate([Request(torch.full((60,), 5), (0, 0, 0))], sampling(stop_token_ids=(), max_tokens=12))
    assert (len(completion.ids), completion.finish_reason) == (4, "length")


# -- streams -----------------------------------------------------------------------------------------------------------------


def test_a_stream_gives_responses_as_they_finish_and_the_same_ones(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    requests = [Request(torch.tensor([3 + i]), (0, i, 0), max_tokens=n) for i, n in enumerate((9, 2, 5))]
    stream = list(rollout.generate_stream(requests, sampling(stop_token_ids=())))
    assert [completion.index for completion in stream] == [1, 2, 0]
    whole = rollout.generate(requests, sampling(stop_token_ids=()))
    assert [completion.index for completion in whole] == [0, 1, 2]
    assert same_bits([stream[2], stream[0], stream[1]], whole)


def test_a_request_can_be_aborted_while_the_others_go_on(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    requests = [Request(torch.tensor([3 + i]), (0, i, 0), max_tokens=n) for i, n in enumerate((3, 40, 40))]
    completions = {}
    for completion in rollout.generate_stream(requests, sampling(stop_token_ids=())):
        completions[completion.index] = completion
        if completion.index == 0:
            rollout.abort(1)
    assert (completions[1].finish_reason, len(completions[1].ids)) == ("abort", 3)
    assert (completions[2].finish_reason, len(completions[2].ids)) == ("length", 40)
    assert ids_of(rollout.generate(requests[1:2], sampling(stop_token_ids=())))[0][:3] == completions[1].ids.tolist()


def test_a_stream_that_is_closed_early_leaves_a_usable_engine(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    requests = make_requests(5)
    expected = ids_of(rollout.generate(requests, sampling()))
    stream = rollout.generate_stream(requests, sampling())
    next(stream)
    stream.close()
    assert ids_of(rollout.generate(requests, sampling())) == expected


def test_a_second_stream_while_one_is_open_is_refused(tmp_path: Path) -> None:
    """It would write into the pages of the first, which goes on unharmed."""
    rollout = make_rollout(save_tiny_model(tmp_path))
    requests = make_requests(5)
    expected = ids_of(rollout.generate(requests, sampling()))
    stream = rollout.generate_stream(requests, sampling())
    completions = [next(stream)]
    with pytest.raises(RuntimeError, match="has an open stream"):
        rollout.generate(requests, sampling())
    completions += stream
    assert ids_of(sorted(completions, key=lambda completion: completion.index)) == expected
    assert ids_of(rollout.generate(requests, sampling())) == expected


def test_a_stop_id_that_the_model_does_not_have_ends_nothing(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    expected = ids_of(rollout.generate(make_requests(5), sampling(stop_token_ids=())))
    assert ids_of(rollout.generate(make_requests(5), sampling(stop_token_ids=(-1, 32, 10**9)))) == expected


# -- bad input ---------------------------------------------------------------------------------------------------------------


def test_a_bad_request_gets_an_error_that_names_it_and_the_others_finish(tmp_path: Path, small_pool: Callable[[int], None]) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    good = make_requests(3)
    expected = ids_of(rollout.generate(good, sampling()))
    bad = {
        "the prompt is empty": Request(torch.empty(0, dtype=torch.int64), (4, 90, 0)),
        "the prompt has 64 tokens, the model's context holds 64": Request(torch.full((64,), 5), (4, 91, 0)),
        "the prompt has token 32, the model knows 0 to 31: the tokenizer does not fit": Request(torch.tensor([5, 32]), (4, 92, 0)),
        "the prompt has token -1": Request(torch.tensor([-1]), (4, 93, 0)),
        "max_tokens=0; it must be at least 1": Request(torch.tensor([5]), (4, 94, 0), max_tokens=0),
        "may have 40 + 12 tokens, the key-value cache has room for 48": Request(torch.full((40,), 5), (4, 95, 0)),
    }
    small_pool(4)
    completions = make_rollout(save_tiny_model(tmp_path)).generate([good[0], *bad.values(), *good[1:]], sampling())
    assert ids_of([completions[0], *completions[-2:]]) == expected
    for (reason, request), completion in zip(bad.items(), completions[1:-2], strict=True):
        assert completion.finish_reason == "error"
        assert completion.error is not None
        assert completion.error.startswith(f"request {request.key} (step, prompt, sample): ")
        assert reason in completion.error
        assert len(completion.ids) == len(completion.log_probs) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_request_only(tmp_path: Path, bad: float, temperature: float) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    requests = [Request(torch.tensor([3, 4]), (2, 40, 0)), Request(torch.tensor([17]), (2, 41, 1))]
    params = sampling(temperature=temperature, stop_token_ids=(), max_tokens=1)
    expected = rollout.generate(requests, params)
    rollout.module.model.embed_tokens.weight.data[17] = bad
    good, broken = rollout.generate(requests, params)
    assert good.ids.tolist() == expected[0].ids.tolist()
    assert broken.finish_reason == "error"
    assert "request (2, 41, 1) (step, prompt, sample): the model's logits are not finite at token 0" in broken.error


def test_no_requests_give_no_completions(tmp_path: Path) -> None:
    assert make_rollout(save_tiny_model(tmp_path)).generate([], sampling()) == []


# -- state -------------------------------------------------------------------------------------------------------------------


def test_a_completion_says_which_weights_wrote_it(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    rollout.version = 6
    assert rollout.generate(make_requests(1), sampling())[0].policy_version == 6


def test_the_cache_is_kept_until_sleep_gives_it_back(tmp_path: Path) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    expected = ids_of(rollout.generate(make_requests(), sampling()))
    pages = rollout.backend.num_pages
    assert pages > 0
    rollout.generate(make_requests(2), sampling())
    assert rollout.backend.num_pages == pages
    rollout.sleep()
    assert rollout.backend.num_pages == 0
    assert ids_of(rollout.generate(make_requests(), sampling())) == expected


def keep_schedulers(rollout: NativeRollout) -> list[Any]:
    """The schedulers of the calls to come."""
    made: list[Any] = []
    make = rollout._scheduler

    def remember(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    rollout._scheduler = remember  # type: ignore[method-assign]
    return made
