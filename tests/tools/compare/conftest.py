"""A recording made by hand: a tiny model, six responses to three prompts, and a policy that has moved since they were sampled."""

from pathlib import Path

import pytest
import torch
from helpers.tiny import save_tiny_model

from lockstep.config.load import load_config
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo.recording import Recording

LENGTHS = (4, 2, 6, 3, 5, 1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def recording(tiny_path) -> Recording:
    """Ratios are between 0.6 and 1.6, two tokens of row 2 are not the policy's, the scores of the last prompt are equal."""
    generator = torch.Generator().manual_seed(0)

    def numbers(low, high):
        return Ragged.from_rows([torch.empty(n).uniform_(low, high, generator=generator) for n in LENGTHS])

    def ids(lengths):
        return Ragged.from_rows([torch.randint(2, 14, (n,), generator=generator) for n in lengths], dtype=torch.int64)

    prompts, responses = ids((3, 3, 2, 2, 4, 4)), ids(LENGTHS)
    mask = torch.ones(len(responses.values), dtype=torch.int64)
    mask[7:9] = 0
    scores = torch.zeros(len(responses.values))
    scores[responses.lengths.cumsum(0) - 1] = torch.tensor([1.0, 0.0, 0.3, 2.0, 0.5, 0.5])
    batch = DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": responses.like(mask),
            "token_level_scores": responses.like(scores),
            "old_log_probs": numbers(-4.5, -2.5),
            "ref_log_prob": numbers(-4.5, -2.5),
        },
        {"uid": ["a", "a", "b", "b", "c", "c"], "index": range(6), "sample": [0, 1] * 3},
        {"pad_token_id": 0, "global_step": 7},
    )
    overrides = [
        "data.train_files=unused.parquet",
        f"actor_rollout_ref.model.path={tiny_path}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=1.3",
        "actor_rollout_ref.actor.entropy_coeff=0.05",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.kl_loss_type=mse",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]
    return Recording(Path("recorded"), batch, load_config(overrides), Path(tiny_path))
