"""`lockstep verl-keys` over shell scripts as verl's users write them. Nothing that a script would start or write happens."""

import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.compat.verl_keys.command import main, read_arguments, read_script
from lockstep.compat.verl_keys.keys import judge_all, overrides
from lockstep.config.load import load_config
from lockstep.errors import ConfigError


def script(tmp_path, text):
    path = tmp_path / "run.sh"
    path.write_text(textwrap.dedent(text))
    return path


def test_variables_arithmetic_arrays_and_branches_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_OUTSIDE", "11")
    path = script(
        tmp_path,
        r"""
        #!/usr/bin/env bash
        set -xeuo pipefail
        KIND=${KIND:-$(python3 -c 'import nothing' 2>/dev/null && echo other || echo usual)}
        length=$((1024 * 2))
        name=$(basename org/some-model)
        cat > made.py << EOF
        print("a > b")
        EOF
        mkdir -p made && touch made.txt
        DATA=(
            data.max_prompt_length=${length}   # a comment
            data.train_files="['$HOME/a.parquet', 'b.parquet']"
        )
        case "$KIND" in usual) DATA+=(data.train_batch_size=${FROM_OUTSIDE}) ;; *) echo "no" >&2; exit 1 ;; esac
        if [ "${MODE:-async}" = "async" ]; then DATA+=(data.shuffle=False); fi
        RUN=(python3)
        uv sync --extra vllm
        ray job submit --no-wait -- "${RUN[@]}" -m verl.trainer.main_ppo --config-path=config \
            --config-name='ppo_megatron_trainer.yaml'\
            "${DATA[@]}" trainer.experiment_name="${name}" +algorithm.kl_ctrl.kl_coef=0.1 $@ 2>&1 | tee log.txt
        """,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert read_script(path) == {
        "--config-path": "config",
        "--config-name": "ppo_megatron_trainer.yaml",
        "data.max_prompt_length": 2048,
        "data.train_files": ["/home/someone/a.parquet", "b.parquet"],
        "data.train_batch_size": 11,
        "data.shuffle": False,
        "trainer.experiment_name": "some-model",
        "algorithm.kl_ctrl.kl_coef": 0.1,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m verl.trainer.main_ppo data.seed=7 trainer.project_name='a b' |& tee -a log.txt\n",
        'P="a b"\nsrun --overlap bash -c "python3 -m verl.trainer.main_ppo data.seed=7 trainer.project_name=\'$P\'" &\nwait\n',
        'run() { python -m verl.trainer.main_ppo "$@"; }\nfor seed in 6 7; do run data.seed=$seed trainer.project_name="a b"; done\n',
        "declare -A S=([x]=7)\nA=(data.seed=${S[x]})\nread -r -d '' B <<'E' || true\ntrainer.project_name=a\\ b\nE\n"
        'torchrun -m verl.trainer.main_ppo "${A[@]}" "$B" "$@" >> out.log 2>&1 < /dev/null\n',
        "bash -c \"cd /x && python -m verl.trainer.main_ppo data.seed=7 trainer.project_name='a b' && echo done; sleep 1\"\n",
        "A='data.seed=7 trainer.project_name=\"a\\ b\"'\neval python -m verl.trainer.main_ppo $A\n",
        'python verl/trainer/main_ppo.py data.seed=7 trainer.project_name="a b" | tee >(grep -v x > log.txt)\n',
        'ray start --head\nuntil ray status; do sleep 5; done\npython -m verl.trainer.main_ppo data.seed=7 trainer.project_name="a b"\n',
        'accelerate launch --dir=/x/main_y verl/trainer/main_ppo.py data.seed=7 trainer.project_name="a b"\n',
    ],
)
def test_pipes_with_errors_nested_shells_functions_and_here_docs(text, tmp_path):
    found = read_script(script(tmp_path, text))
    assert found["data.seed"] == 7
    assert found["trainer.project_name"].replace("\\", "") == "a b"


def test_every_argument_of_the_trainer_is_read_whatever_words_are_in_it(tmp_path):
    """A key that is deleted, a file and an experiment may have the words by which the trainer is found."""
    keys = "data.seed=7 ~trainer.profile_steps data.train_files=/d/main_train.parquet trainer.experiment_name=my_trainer"
    text = f"pip install x=1 main_y\nray job submit --working-dir /home/trainer -- python -m verl.trainer.main_ppo {keys}\n"
    assert read_script(script(tmp_path, text)) == {
        "data.seed": 7,
        "trainer.profile_steps": None,
        "data.train_files": "/d/main_train.parquet",
        "trainer.experiment_name": "my_trainer",
    }


def test_a_date_in_a_name_is_todays(tmp_path):
    path = script(tmp_path, "python -m verl.trainer.main_ppo trainer.experiment_name=run-$(date +%Y)\n")
    assert re.fullmatch(r"run-\d{4}", read_script(path)["trainer.experiment_name"])


def test_the_file_that_a_command_names_is_read_below_its_arguments(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_megatron_trainer, _self_]\ndata: {seed: 3, max_prompt_length: 99}\n")
    path = script(tmp_path, f"python -m verl.trainer.main_ppo --config-path={tmp_path} --config-name mine data.seed=4\n")
    given = read_script(path)
    assert given == {"defaults": ["ppo_megatron_trainer", "_self_"], "data.seed": 4, "data.max_prompt_length": 99}
    config = load_config(overrides(judge_all(given | {"data.train_files": "a", "actor_rollout_ref.model.path": "m"})))
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    # Not found: its keys would be missing from the run.
    assert main([str(script(tmp_path, "python -m verl.trainer.main_ppo --config-name=other data.seed=4\n"))]) == 1
    assert "lockstep verl-keys FILE.yaml" in capsys.readouterr().out


def test_several_values_for_one_key_are_refused(tmp_path, capsys):
    path = script(tmp_path, "python -m verl.trainer.main_ppo trainer.logger=console,wandb 'data.seed=range(0,3)'\n")
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert said.count("it names several values") == 2
    assert "Sweep" not in said


@pytest.mark.parametrize(("text", "said"), [("a: [b\n", "not valid YAML"), ("- a\n", "mapping"), ("a: ${b.c}\n", "b.c")])
def test_a_file_that_cannot_be_read_is_one_line(text, said, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    assert main([str(tmp_path / "run.yaml")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_folder_of_a_script_that_is_named_without_one_is_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, 'python -m verl.trainer.main_ppo reward.custom_reward_function.path="$(dirname "$0")/reward.py"\n')
    assert read_script(Path("run.sh")) == {"reward.custom_reward_function.path": "./reward.py"}


def test_a_script_can_start_write_and_end_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = script(tmp_path, "/bin/touch one; command -p touch two; echo x > three; exec /bin/touch four; PATH=/bin touch five\n")
    with pytest.raises(ConfigError, match="starts no trainer"):
        read_script(path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]


def test_the_command_that_is_printed_is_read_back(tmp_path, capsys):
    keys = "actor_rollout_ref.model.path=m actor_rollout_ref.actor.grad_clip=2"
    path = script(tmp_path, f"python -m verl.trainer.main_ppo data.train_files=\"['a b','c']\" {keys} $1\n")
    assert main([str(path), "trainer.n_gpus_per_node=4"]) == 0
    table, command, summary = capsys.readouterr().out.split("\n\n")
    program, sub, *arguments = shlex.split(command.replace("\\\n", " "))
    assert (program, sub) == ("lockstep", "ppo")
    config = load_config(arguments)
    assert config.data.train_files == ["a b", "c"]
    assert config.actor_rollout_ref.actor.optim.clip_grad == 2
    assert config.trainer.n_gpus_per_node == 4
    assert "actor_rollout_ref.actor.grad_clip" in table
    assert "actor_rollout_ref.model.path" not in table  # accepted: counted only
    assert summary.startswith("3 accepted, 1 translated; 6 defaults")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [([], 2, "usage"), (["--help"], 0, "usage"), (["missing.sh"], 1, "does not exist")],
)
def test_a_wrong_call_says_how(arguments, status, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lockstep", "verl-keys", *arguments])
    assert cli.main() == status
    assert said in "".join(capsys.readouterr())


def test_refused_keys_are_first_and_there_is_no_command_without_them(tmp_path, capsys):
    experts = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    refused = f"trainer.device=npu {experts}=8 trainer.nnodes=$NOT_SET trainer.nonsense=1"
    others = "data.seed=1 actor_rollout_ref.actor.grad_clip=2 trainer.balance_batch=True"
    path = script(tmp_path, f"python -m verl.trainer.main_ppo {others} {refused}\n")
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    kinds = [line.split()[1] for line in said.partition("\n\n")[0].splitlines()]
    assert kinds[:6] == [*["refused"] * 4, "translated", "ignored"]
    assert set(kinds[6:]) == {"default"}
    assert "lockstep ppo " not in said.replace("`lockstep ppo --help`", "")
    assert "4 keys refused: without them this is another run" in said.splitlines()[-1]
    # What was refused may be changed or removed on the command line.
    changes = ["trainer.device=cuda", f"~{experts}", "trainer.nnodes=2", "~trainer.nonsense"]
    assert main([str(path), *changes]) == 0
    assert "lockstep ppo \\\n" in capsys.readouterr().out


def test_paths_are_quoted_readably(tmp_path, capsys):
    path = script(
        tmp_path, "python -m verl.trainer.main_ppo data.train_files='/my data/a.parquet' actor_rollout_ref.model.path=m\n"
    )
    assert main([str(path)]) == 0
    command = capsys.readouterr().out.split("\n\n")[1]
    assert "'\"'" not in command
    arguments = shlex.split(command.replace("\\\n", " "))[2:]
    config = load_config(arguments)
    assert config.data.train_files == "/my data/a.parquet"
    assert Path(config.data.val_files).expanduser() == Path("~/data/rlhf/gsm8k/test.parquet").expanduser()


def test_what_hydra_cannot_read_is_a_string():
    assert read_arguments(["trainer.project_name=a(b", "~trainer.logger"]) == {
        "trainer.project_name": "a(b",
        "trainer.logger": None,
    }
    with pytest.raises(ConfigError, match="expected key=value"):
        read_arguments(["nonsense"])
