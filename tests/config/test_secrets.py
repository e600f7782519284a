import dataclasses

import pytest

from lockstep.config.load import load_config, to_yaml
from lockstep.config.resume import kept_values
from lockstep.config.secrets import redacted

MODEL = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
KWARGS = "reward.custom_reward_function.reward_kwargs"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("MY_JUDGE", "plain-but-from-outside")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12345678")
    return load_config([
        *MODEL,
        f"+{KWARGS}.url='https://me:hunter22@judge.example/v1?model=x&api_key=k12345'",
        f"+{KWARGS}.judge='${{oc.env:MY_JUDGE}}'",
        f"+{KWARGS}.header='Bearer hf_abcdefgh12345678'",
        f"+{KWARGS}.openai_api_key=sk-1234567",
        f"+{KWARGS}.max_tokens=77",
        "+ray_kwargs.ray_init.runtime_env.env_vars={WANDB: w4ndb-value, OMP_NUM_THREADS: '2'}",
    ])  # fmt: skip


SECRETS = ("plain-but-from-outside", "hunter22", "k12345", "hf_abcdefgh12345678", "sk-1234567", "w4ndb-value")


def test_nothing_secret_is_written_and_the_rest_is(config):
    values = redacted(dataclasses.asdict(config))
    written = (to_yaml(config), repr(values), repr(kept_values(config)))
    assert [(secret, i) for secret in SECRETS for i, text in enumerate(written) if secret in text] == []
    assert values["reward"]["custom_reward_function"]["reward_kwargs"] == {
        "url": "https://me:***@judge.example/v1?model=x&api_key=***",
        "judge": "${oc.env:MY_JUDGE}",
        "header": "Bearer ***",
        "openai_api_key": "***",
        "max_tokens": 77,
    }
    assert values["ray_kwargs"]["ray_init"] == {"runtime_env": {"env_vars": {"WANDB": "***", "OMP_NUM_THREADS": "***"}}}


def test_what_came_from_the_environment_reads_back(config, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(config_file=tmp_path / "config.yaml")
    assert again.reward.custom_reward_function.reward_kwargs["judge"] == "plain-but-from-outside"


def test_a_configuration_without_secrets_is_written_as_it_is():
    config = load_config([*MODEL, "trainer.logger=[console,wandb]"])
    assert redacted(dataclasses.asdict(config)) == dataclasses.asdict(config)
