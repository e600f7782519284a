"""What routers choose is kept with each completion (router_replay), and used by the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.mixtures import MIXTURES, chosen_experts
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.generation.cpu.passes import PassBackend
from lockstep.generation.routing import RoutedRollout
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.packing import Budget
from lockstep.models.routers import NOT_RECORDED
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.rollout.base import response_columns
from lockstep.workers.rollout.registry import make_rollout as registered
from lockstep.workers.rollout.request import Completion, Request


def routed(path: str, dtype: torch.dtype = torch.float32, **config: Any) -> RoutedRollout:
    model = load_model(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0)
    module = share_structure(model, RoutedRollout.attention).to(dtype)  # type: ignore[arg-type]
    engine = registered(module, RolloutConfig(router_replay=True, **config), pad_token_id=0)
    assert isinstance(engine, RoutedRollout)
    return engine


def groups() -> list[Request]:
    """Three samples of each of four prompts, the last longer than a page."""
    prompts = [torch.arange(2, 2 + length) % 30 + 2 for length in (1, 5, 16, 23)]
    return [Request(prompt, (3, number, sample)) for number, prompt in enumerate(prompts) for sample in range(3)]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(("pages", "config"), [(None, {"max_num_batched_tokens": 5}), (7, {"max_num_seqs": 5})])
def test_every_token_has_the_experts_that_transformers_would_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, pages: int | None, config: dict[str, int]
) -> None:
    """Prompts in pieces and shared; with few pages, samples are preempted and computed again. The tokens are those without replay."""
    if pages is not None:
        monkeypatch.setattr(PassBackend, "most_pages", lambda self: pages)
    path = save_tiny_model(tmp_path, family, **MIXTURES[family])
    requests = groups()
    params = sampling(stop_token_ids=(1, 9))
    completions = routed(path, **config).generate(requests, params)
    assert ids_of(completions) == ids_of(make_rollout(path, **config).generate(requests, params))
    model = tiny_model(family, **MIXTURES[family])
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.cat([request.prompt_ids, completion.ids])
        assert completion.experts is not None
        assert completion.experts.shape == (len(ids), 4)
        assert torch.equal(completion.experts[:-1], chosen_experts(model, ids)[:-1])
        assert (completion.experts[-1] == NOT_RECORDED).all()


def log_prob_gap(path: str, requests: list[Request], completions: list[Completion], replays: bool) -> torch.Tensor:
    """|trainer in float32 - sampler| of each token."""
    columns = response_columns(completions).select(["responses", "rollout_log_probs", *(["experts"] if replays else [])], [])
    prompts = DataProto.from_dict({"prompts": Ragged.from_rows([request.prompt_ids for request in requests])})
    data = prompts.union(columns)

    def forward() -> torch.Tensor:
        return make_tiny_engine(path).forward(data, Budget(1_000)).ragged("log_probs").values

    (found,) = run_distributed(forward, 1)
    return (found - data.ragged("rollout_log_probs").values).abs()


def test_a_bfloat16_samplers_log_probs_are_closer_to_a_float32_trainers_with_its_experts(tmp_path: Path) -> None:
    """With 16 experts of which 4 are chosen rounding sends some tokens to others; what is left with replay is rounding itself."""
    path = save_tiny_model(tmp_path, "olmoe", num_experts=16, num_experts_per_tok=4)
    requests = groups()
    params = sampling(stop_token_ids=(), max_tokens=30)
    completions = routed(path, torch.bfloat16).generate(requests, params)
    without, with_experts = (log_prob_gap(path, requests, completions, replays) for replays in (False, True))
    assert with_experts.max() < 0.5 * without.max()
    assert with_experts.mean() < without.mean()
    exact = routed(path).generate(requests, params)
    assert log_prob_gap(path, requests, exact, True).max() < 5e-5


def test_a_request_that_failed_has_no_experts_and_an_aborted_one_those_it_got(tmp_path: Path) -> None:
    engine = routed(save_tiny_model(tmp_path, "mixtral", **MIXTURES["mixtral"]))
    requests = [*make_requests(2), Request(torch.tensor([99]), (0, 0, 0))]
    stream = engine.generate_stream(requests, sampling(stop_token_ids=()))
    failed = next(stream)
    assert (failed.finish_reason, failed.experts) == ("error", None)
    engine.abort(1)
    rest = {completion.index: completion for completion in stream}
    assert rest[1].finish_reason == "abort"
    columns = response_columns([rest[0], rest[1], failed])
    assert columns.ragged("experts").lengths.tolist() == [
        4 * (len(request.prompt_ids) + len(rest[i].ids)) if rest[i].experts is not None else 0
        for i, request in enumerate(requests[:2])
    ] + [0]


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_replay=true is for mixtures .*, and this model is a llama"):
        routed(save_tiny_model(tmp_path))
    with pytest.raises(ConfigError, match=r"router_replay=true is of rollout.name=native; vllm"):
        RolloutConfig(name="vllm", router_replay=True)
