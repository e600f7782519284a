"""Episodes with real vLLM: the same template, its own prefix cache."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.chat_model import save_chat_model
from helpers.episodes import Case, Fed, plain
from helpers.run import roles, train
from helpers.vllm_engines import CPU, needs_vllm
from transformers import AutoModelForCausalLM

from lockstep.agents.chat_template import ConversationTemplate, TurnTemplate
from lockstep.backends.vllm.engine import VLLMRollout
from lockstep.config import load_config
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.generation.engine import NativeRollout
from lockstep.utils.tokenizer import hf_tokenizer

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model whose heads vLLM has a CPU kernel for."""
    return save_chat_model(tmp_path_factory.mktemp("chat"), head_dim=32)


@pytest.fixture(scope="module")
def tokenizer(chat_model):
    return hf_tokenizer(str(chat_model))


@pytest.fixture(scope="module")
def vllm_engine(chat_model, tokenizer) -> Iterator[VLLMRollout]:
    section = RolloutConfig(name="vllm", enforce_eager=True, max_num_seqs=32)
    plain_model = AutoModelForCausalLM.from_pretrained(chat_model)
    engine = VLLMRollout(
        ModelConfig(path=str(chat_model)), section, tokenizer.pad_token_id, CPU, plain_model.dtype, tokenizer.decode
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_episodes_are_those_of_the_native_engine(vllm_engine, chat_model, tokenizer, tmp_path, seed) -> None:
    """Greedily, token for token; and what is drawn has the log-probs of the whole distribution."""
    model = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation="eager").eval()
    module = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation=NativeRollout.attention).eval()
    native = NativeRollout(module, RolloutConfig(), tokenizer.pad_token_id, tokenizer.decode)
    case, fed = Case(seed, tmp_path, [TurnTemplate(tokenizer, {}), ConversationTemplate(tokenizer, {})]), Fed(vllm_engine)
    episodes = case.play(fed, tokenizer, temperature=0.0, delay=0.01)
    case.check(model, episodes, fed, temperature=0.0, within=1e-4)
    assert [plain(e) for e in case.play(native, tokenizer, temperature=0.0, delay=0.0)] == [plain(e) for e in episodes]
    drawn = case.play(vllm_engine, tokenizer, temperature=1.0, delay=0.01)
    assert [plain(e) for e in case.play(vllm_engine, tokenizer, temperature=1.0, delay=0.0)] == [plain(e) for e in drawn]


def test_grpo_trains_on_episodes(chat_model, tmp_path) -> None:
    rows = [{"prompt": f"row {i}", "env_kwargs": {"turns": 1 + i % 3}} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = load_config(
        [
            f"data.train_files={tmp_path / 'train.parquet'}", "data.train_batch_size=4", "data.max_response_length=150",
            "data.max_prompt_length=64", f"actor_rollout_ref.model.path={chat_model}", "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo", "agent.environment=helpers.environments:Counts", "agent.max_turn_tokens=10",
            f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.device=cpu", "trainer.total_training_steps=2",
            "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=true", "trainer.val_before_train=false",
        ]
    )  # fmt: skip
    for row in train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p")):
        assert 1 < row["agent/turns"] <= 3
        assert row["agent/missing"] == 0
        assert row["actor/grad_norm"] > 0
        assert 1 - 1e-4 < row["training/rollout_ratio_mean"] < 1 + 1e-4
