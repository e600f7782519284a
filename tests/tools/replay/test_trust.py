"""A capsule is a file of a stranger: what it names must not run."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.keys import type_of, valid_keys
from lockstep.config.ppo import PPOConfig
from lockstep.config.reference import ROOTS
from lockstep.config.sft import SFTConfig
from lockstep.errors import ConfigError
from lockstep.tools.replay import command as replay
from lockstep.tools.replay.trust import _HANDLINGS, Handling, check_safe, handling

KEYS = {key: type_of(key, root) for root in ROOTS.values() for key in valid_keys(root)}
INERT_SWITCHES = {
    "optimizer_offload", "param_offload", "reshard_after_forward", "use_torch_compile", "sequence_parallel",
    "use_distributed_optimizer", "shuffle", "use_kl_loss", "enable_gradient_checkpointing", "batch_invariant", "enforce_eager",
    "fallback_to_hf", "free_cache_engine", "router_replay", "record", "enable", "norm_adv_by_std_in_grpo", "bypass_mode",
    "rollout_is_batch_normalize", "use_kl_in_reward", "enable_resource_pool", "filter_overlong_prompts", "filter_overlong_rows",
    "skip_identical", "best_is_lowest", "report_ratio", "save_in_background", "val_before_train", "val_only",
}  # fmt: skip
"""Last parts of switches that run no code of a stranger. A new switch belongs here or in trust.py: decide which."""


def test_every_key_that_could_name_code_has_been_decided_on() -> None:
    listed = [pattern for patterns in _HANDLINGS.values() for pattern in patterns]
    for key, kind in KEYS.items():
        found = [pattern for pattern in listed if fnmatchcase(key, pattern)]
        text = str(kind)
        if "bool" in text and not found:
            assert key.rpartition(".")[2] in INERT_SWITCHES, (
                f"{key}: can it run code? say so in trust.py, or add it to INERT_SWITCHES"
            )
        elif "float" not in text and "int" not in text:
            assert len(found) == 1, f"{key} ({text}) must be in one list of trust.py, and is in {found}"
    unused = [pattern for pattern in listed if not any(fnmatchcase(key, pattern) for key in KEYS)]
    assert not unused


def test_no_key_takes_a_path_or_a_dotted_name_from_a_file_unless_it_is_a_text() -> None:
    for key, kind in KEYS.items():
        decided = handling(key, kind)
        if decided is Handling.TEXT or str(kind) in ("<class 'int'>", "<class 'float'>", "<class 'bool'>"):
            continue
        root = next(root for root in ROOTS.values() if key in set(valid_keys(root)))
        for value in ("evil.py", "os:system", "${oc.env:HOME}.py", ["/a.py:f"]):
            config = nested(key, value)
            with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
                check_safe(config, root, set(), trust=False)
            check_safe(config, root, {key}, trust=False)  # the user's own value stands over the file's
            if decided is Handling.COMMAND_LINE:
                with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
                    check_safe(config, root, set(), trust=True)


def nested(key: str, value: Any) -> dict[str, Any]:
    first, dot, rest = key.partition(".")
    return {first: nested(rest, value) if dot else value}


@pytest.mark.parametrize(
    "config",
    [
        {"actor_rollout_ref": {"model": {"path": "m", "trust_remote_code": True}}},
        {"agent": {"mcp": ["sh"]}},
        {"agent.mcp": ["sh"]},
        {"reward": {"sandbox": {"accept_weak_isolation": True}}},
        {"reward": {"custom_reward_function": "${data.apply_chat_template_kwargs}"}},
        {"reward": {"custom_reward_function": {"path": "evil"}}},
        {"actor_rollout_ref": {"model": {"override_config": {"attn_implementation": "someone/kernels"}}}},
        {"actor_rollout_ref": {"model": {"path": "${data.train_files}"}}},
        {"reward": ["path"]},
        {"nonsense": {"a": 1}},
    ],
)
def test_a_file_cannot_name_code_in_another_shape(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_safe(config, PPOConfig, set(), trust=False)


def test_what_a_run_without_code_of_its_own_has_is_accepted() -> None:
    values: dict[str, Any] = {
        "agent": {"tools": ["python", "calculator"], "mcp": [], "parser": "hermes"},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "/models/a", "trust_remote_code": False, "override_config": {"hidden_size": 8}}},
        "data": {"apply_chat_template_kwargs": {"enable_thinking": False}},
        "reward": {"weights": {"openai/gsm8k": {"rule": 1.0}}},
        "trainer": {"project_name": "${oc.env:NAME}"},
    }
    check_safe(values, PPOConfig, set(), trust=False)


def test_no_code_that_a_capsule_names_runs_without_trust(embedded_task: Any, tmp_path: Path, capsys: Any) -> None:
    bait, ran = tmp_path / "bait.py", tmp_path / "ran"
    bait.write_text(f"open({str(ran)!r}, 'w').close()\nraise RuntimeError('this is as far as it has to come')\n")
    row = {"prompt": "abc", "data_source": "x", "reward_model": {"ground_truth": "cba"}}
    model = {"model": {"path": str(embedded_task.model)}}
    settings = {
        "reward": {"custom_reward_function": {"path": str(bait)}},
        "data": {"custom_cls": {"path": str(bait), "name": "compute_score"}},
        "agent": {"environment": f"{bait}:compute_score"},
    }
    for section, values in settings.items():
        lengths = {"max_prompt_length": 16, "max_response_length": 8, "train_batch_size": 1}
        config = {
            "trainer": {},
            "actor_rollout_ref": model,
            section: values,
            "data": lengths | (values if section == "data" else {}),
        }
        file = write(tmp_path, recipe="PPOConfig", config=config, rows={"0": row})
        assert replay.main([str(file)]) == 1
        assert "--trust" in capsys.readouterr().err
        assert not ran.exists()
        assert replay.main([str(file), "--trust"]) == 1
        assert ran.exists(), "without --trust the test shows nothing where the code would not run with it"
        ran.unlink()
    capsys.readouterr()
    config = {"trainer": {}, "actor_rollout_ref": model, "agent": {"tools": ["calculator"]}}
    file = write(tmp_path, recipe="PPOConfig", config=config, rows={"0": row | {"environment": f"{bait}:X"}})
    assert replay.main([str(file)]) == 1
    assert "environments" in capsys.readouterr().err
    assert not ran.exists()


def write(folder: Path, **changes: Any) -> Path:
    capsule = {
        "lockstep_capsule": 1, "recipe": "SFTConfig", "config": {"trainer": {}}, "step": 1, "from_step": 0, "weights": None,
        "keys": {"seed": 0, "left_out": [], "num_rows": 1, "num_used": 1}, "rows": {"0": {"prompt": "a", "completion": "b"}},
        "metrics": [], "episodes": None, "failure": None,
    }  # fmt: skip
    file = folder / "capsule.json"
    file.write_text(json.dumps(capsule | changes))
    return file


def test_the_root_of_another_recipe_has_other_keys() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        check_safe({"agent": {"environment": "a.py:b"}}, SFTConfig, set(), trust=False)
