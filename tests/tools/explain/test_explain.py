import re

import pytest
from helpers.tiny import tiny_config

from lockstep.config.keys import valid_keys
from lockstep.config.reference import ROOTS
from lockstep.tools.explain.command import main
from lockstep.tools.explain.ppo import places, stages
from lockstep.tools.explain.values import values
from lockstep.tools.plan.command import main as plan
from lockstep.tools.training_command import read_training_command

NAMED = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=model"]


def stages_of(*words, device="cuda"):
    return dict(stages(read_training_command([words[0], *NAMED, *words[1:]], None).config, device))


def test_each_value_has_its_origin_and_the_last_one_wins(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("actor_rollout_ref: {rollout: {n: 4, temperature: 0.9}}\ntrainer: {seed: 3}\n")
    training = read_training_command(["grpo", *NAMED, "trainer.seed=5", "actor_rollout_ref.model.override_config.a=1"], file)
    found = {key: (value, origin) for key, value, origin in values(training)}
    assert list(found) == list(valid_keys())
    assert found["actor_rollout_ref.rollout.n"] == (4, f"file {file}")  # over the preset's
    assert found["trainer.seed"] == (5, "command line")  # over the file's
    assert found["algorithm.adv_estimator"] == ("grpo", "lockstep grpo")
    assert found["algorithm.lam"] == (1.0, "default")
    assert found["actor_rollout_ref.model.override_config"] == ({"a": 1}, "command line")
    assert found["trainer.experiment_name"][1] == "made of the others"
    embedded = {key: (value, origin) for key, value, origin in values(read_training_command(["grpo"], None))}
    assert embedded["data.max_response_length"] == (8, "the embedded task")
    assert embedded["trainer.critic_warmup"] == (0, "no critic")


def test_secrets_are_not_said(capsys):
    words = ["ray_kwargs.ray_init={runtime_env: {env_vars: {WANDB_API_KEY: abcdefgh}}}", "trainer.total_training_steps=1"]
    assert main(["ppo", *words]) == 0
    assert "abcdefgh" not in capsys.readouterr().out


def test_the_stages_are_those_of_the_algorithm():
    ppo, grpo, remax = stages_of("ppo"), stages_of("grpo"), stages_of("remax")
    assert "update_critic" in ppo
    assert ppo["values"].startswith("no pass: the batch is one update of the critic")
    assert stages_of("ppo", "critic.ppo_epochs=2")["values"] == "a pass of the critic"
    assert "needs no critic" in grpo["values"]
    assert "none: no KL term" in ppo["ref"]
    assert "update_critic" not in grpo
    assert "its KL is a loss, times 0.001" in grpo["ref"]
    assert "gen_max" in remax
    assert "until the batch is full" in stages_of("dapo")["gen"]
    assert "until the batch is full" not in grpo["gen"]
    assert "one update" in grpo["old_log_prob"]
    two = stages_of("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    assert two["old_log_prob"].startswith("a forward pass")
    assert two["update_actor"].startswith("2 optimizer steps")
    mixture = ["actor_rollout_ref.rollout.router_replay=true", "actor_rollout_ref.model.router_aux_loss_coef=0.01"]
    wanted = "with the loss vanilla and 0.01 times the load-balance loss of the experts, through the experts that the sampler chose"
    assert wanted in stages_of("grpo", *mixture)["update_actor"]
    assert "sampler" in stages_of("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=32", device="cpu")["old_log_prob"]


def test_every_model_has_its_place():
    keys = [
        "critic.enable_resource_pool=true",
        "critic.n_gpus_per_node=2",
        "reward_model.enable=true",
        "reward_model.model.path=rm",
    ]
    found = dict(places(read_training_command(["ppo", *NAMED, *keys, "actor_rollout_ref.actor.use_kl_loss=true"], None).config))
    assert list(found) == ["global_pool, 1 process", "critic_pool, 2 processes"]
    assert "reference model, frozen" in found["global_pool, 1 process"]
    assert "reward model rm, frozen" in found["global_pool, 1 process"]
    lora = dict(places(read_training_command(["grpo", *NAMED, "actor_rollout_ref.model.lora_rank=8"], None).config))
    assert "the actor without its adapters as the reference" in lora["global_pool, 1 process"]


@pytest.mark.parametrize("command", ["ppo", "dapo"])
def test_the_command_says_all_of_it(command, capsys):
    assert main([command]) == 0
    text = capsys.readouterr().out
    assert "2048 training prompts, 64 a step: 32 steps an epoch, 100 steps in all" in text
    assert re.search(r"run (\S+) in", text)[1].startswith(f"{command}-embedded-")
    assert all(word in text for word in ("where the models are:", "stages of a step:", "what a step will cost:"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of heads of 8 that holds 64 tokens; its config alone."""
    folder = tmp_path_factory.mktemp("models") / "m"
    tiny_config(max_position_embeddings=64).save_pretrained(folder)
    return str(folder)


def test_other_recipes_are_explained_too(model, capsys):
    for command in ("sft", "dpo", "reward-model"):
        assert main([command, "data.train_files=x.parquet", f"model.path={model}", "optim.lr=1e-4", "data.max_length=64"]) == 0
        text = capsys.readouterr().out
        assert re.search(r"optim.lr=0.0001 +command line", text)
        assert f"run {command}-m-" in text
    assert set(ROOTS) >= {"sft", "dpo", "reward-model"}


def test_a_gpu_here_that_the_plan_does_not_know_is_no_error(model, capsys, monkeypatch):
    monkeypatch.setattr("lockstep.tools.explain.command._gpu_here", lambda: "NVIDIA L4")
    assert main(["ppo", "data.train_files=x.parquet", f"actor_rollout_ref.model.path={model}", *SHORT]) == 0
    assert "not known: lockstep plan has no numbers of the GPU that is here, NVIDIA L4; --gpu NAME" in capsys.readouterr().out


ROW = '{"prompt": "a", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}\n'
FP8 = "actor_rollout_ref.rollout.kv_cache_dtype=fp8"
SHORT = ("data.max_prompt_length=32", "data.max_response_length=32")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grpo", "MODEL", *SHORT, "actor_rollout_ref.rollout.n=1"], "set actor_rollout_ref.rollout.n to 2 or more"),
        (["ppo", "MODEL", *SHORT, "actor_rollout_ref.actor.policy_loss.loss_mode=nonsense"], "unknown policy loss 'nonsense'"),
        (["ppo", "MODEL", "data.max_prompt_length=64", "data.max_response_length=32"], "= 96 tokens, but MODEL holds 64"),
        (["ppo", "MODEL", *SHORT, FP8, "trainer.device=cpu"], f"{FP8} needs a GPU, and the device is cpu"),
        (
            ["ppo", "MODEL", *SHORT, FP8, "--gpu", "h200"],
            f"{FP8} needs heads of 32, 64, 128 or 256 numbers, and this model's have 8",
        ),
        (["ppo", "MODEL", *SHORT, "--gpu", "h300"], "--gpu h300 is not known"),
        (["ppo", "MODEL", *SHORT, "data.train_files=ROWS", "data.train_batch_size=4"], "between 1 and the number of rows, 3"),
        (["sft", "STAGE", "data.max_length=65"], "data.max_length=65 tokens, but MODEL holds 64"),
        (
            ["distill", "STAGE", "teacher.path=MODEL", "data.max_length=60", "distill.max_response_length=5"],
            "=65 tokens, but MODEL holds 64",
        ),
        (["ppo", "MODEL", *SHORT, "reward.custom_reward_function.path=TRL"], "has TRL's arguments"),
        (
            ["ppo", "MODEL", *SHORT, "data.train_files=TAGGED", "data.train_batch_size=2"],
            "no reward function for data_source 'nobodys'",
        ),
        (
            ["ppo", "MODEL", *SHORT, "data.train_files=ROWS", "data.val_files=TAGGED", "data.train_batch_size=2"],
            "no reward function for data_source 'nobodys'",
        ),
        (["ppo", "MODEL", *SHORT, "agent.environment=nothing:Here"], "nothing"),
        (["ppo", "MODEL", *SHORT, "agent.tools=[nothing:here]"], "nothing"),
        (["dpo", "data.train_files=x.parquet", "model.path=nowhere/at/all"], "nowhere/at/all does not exist"),
    ],
)
def test_what_training_would_refuse_is_refused_in_its_words_and_nothing_else_is_said(words, said, model, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW * 3)
    (tmp_path / "trl.py").write_text("def compute_score(completions, **kwargs):\n    return [0.0]\n")
    words = [word.replace("TRL", str(tmp_path / "trl.py")) for word in words]
    (tmp_path / "tagged.jsonl").write_text('{"prompt": "a", "data_source": "nobodys"}\n' * 3)
    words = [word.replace("ROWS", str(tmp_path / "rows.jsonl")).replace("TAGGED", str(tmp_path / "tagged.jsonl")) for word in words]
    ways = {"MODEL": f"data.train_files=x.parquet actor_rollout_ref.model.path={model}".split()}
    ways["STAGE"] = f"data.train_files=x.parquet model.path={model}".split()
    assert main([word.replace("MODEL", model) for given in words for word in ways.get(given, [given])]) == 1
    shown = capsys.readouterr()
    assert said.replace("MODEL", model) in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_wrong_configuration_is_one_line(capsys):
    assert main(["ppo", "data.train_batch_size=0"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def numbers(text):
    return re.search(r"(\d+) prompts x (\d+)", text).groups()


@pytest.mark.parametrize("gpu", [[], ["--gpu", "h200"]])
def test_explain_and_plan_describe_the_same_run(gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    tiny_config(max_position_embeddings=1024).save_pretrained(tmp_path / "m")
    words = ["grpo", "data.train_files=x.parquet", f"actor_rollout_ref.model.path={tmp_path / 'm'}", *gpu]
    assert main(words) == 0
    explained = capsys.readouterr().out
    assert plan(words) == 0
    planned = capsys.readouterr().out
    assert numbers(explained) == numbers(planned) == (("64", "8") if gpu else ("4", "8"))
    assert ("h200" in explained) == bool(gpu)
    assert f"responses of up to {512 if gpu else 128} tokens" in explained
    assert f"responses of {512 if gpu else 128} tokens" in planned


def test_what_happens_beside_the_steps_is_said(model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROW * 40)
    base = ["grpo", f"actor_rollout_ref.model.path={model}", *SHORT, f"data.train_files={rows}", "data.train_batch_size=4"]
    more = [f"data.val_files={rows}", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=6", "trainer.save_freq=4"]
    assert main([*base, *more, "actor_rollout_ref.rollout.val_kwargs.n=2"]) == 0
    text = capsys.readouterr().out
    assert (
        "validation: before the first step (4 rows), after step 6, the last: 40 rows, 2 answers each at temperature 0 (greedy)"
        in text
    )
    assert "are equal" in text
    assert "checkpoints: after every 4 steps and after step 6, the last" in text
    assert main(base) == 0
    assert "validation: none: data.val_files is not set" in capsys.readouterr().out


def test_the_steps_of_other_recipes_are_counted(model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 10)
    words = ["sft", f"data.train_files={rows}", f"model.path={model}", "data.max_length=64", "data.train_batch_size=4"]
    assert main([*words, "trainer.total_epochs=3"]) == 0
    assert "10 rows in the files, 4 a step: at most 2 steps an epoch, 6 steps in all" in capsys.readouterr().out


def test_defaults_are_listed_on_request_and_what_the_user_gave_is_apart(model, capsys):
    words = ["ppo", "data.train_files=x.parquet", f"actor_rollout_ref.model.path={model}", *SHORT, "algorithm.lam=1.0"]
    assert main(words) == 0
    short = capsys.readouterr().out
    given, _, others = short.partition("given by you:")[2].partition("set for you:")
    assert "algorithm.lam=1.0" in given  # though that is its default
    assert "experiment_name" in others
    assert "gamma=1.0" not in short
    assert main([*words, "--all"]) == 0
    assert "gamma=1.0" in capsys.readouterr().out


ENVIRONMENT = """
from lockstep.agents import Environment, Turn


class Guess(Environment):
    is_judged = True

    def step(self, action):
        return Turn(done=True)
"""


def test_an_agents_environment_tools_and_turns_are_named(model, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    words = ["grpo", "data.train_files=x.parquet", f"actor_rollout_ref.model.path={model}", *SHORT, "agent.max_turns=3"]
    assert main([*words, f"agent.environment={tmp_path / 'mine.py'}:Guess"]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path / 'mine.py'}:Guess; the reward of an episode is given by the rule that data_source names" in text
    assert re.search(r"tools +none", text)
    assert "at most 3 of the policy" in text
    assert re.search(r"gen +64 prompts x 8 episodes", text)
    assert main([*words, "agent.tools=[calculator]"]) == 0
    assert re.search(r"tools +calculator", capsys.readouterr().out)


def test_a_verl_command_is_explained(model, capsys):
    words = ["--from-verl", "data.train_files=x.parquet", f"actor_rollout_ref.model.path={model}", *SHORT]
    sizes = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"]
    assert main([*words, *sizes, "algorithm.adv_estimator=grpo"]) == 0
    assert "8 prompts x 4 samples" in capsys.readouterr().out
    assert main(["sft", "--from-verl", "data.train_files=x.parquet", f"model.path={model}"]) == 1
    assert "--from-verl is for ppo" in capsys.readouterr().err
