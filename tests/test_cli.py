import contextlib
import subprocess
import sys

import pytest

import lockstep
from lockstep import cli


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    return cli.main()


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_names_every_command(monkeypatch, capsys, words):
    assert run(monkeypatch, *words) == 0
    text = capsys.readouterr().out
    assert [name for name in (*cli.COMMANDS, *cli.ALGORITHMS) if f" {name} " not in text.replace("\n", " ")] == []


def test_an_unknown_command_names_the_nearest(monkeypatch, capsys):
    for word, nearest in (("gropo", "grpo"), ("reward_modl", "reward-model"), ("reinforce++", "reinforce_plus_plus")):
        assert run(monkeypatch, word) == 2
        assert f"unknown command '{word}'; the nearest is '{nearest}'" in capsys.readouterr().err


def test_a_word_that_is_like_no_command_names_none(monkeypatch, capsys):
    assert run(monkeypatch, "xyzzy") == 2
    assert "nearest" not in capsys.readouterr().err


def test_help_and_version_are_words_too(monkeypatch, capsys):
    def printed(*words):
        with contextlib.suppress(SystemExit):  # argparse's way
            assert run(monkeypatch, *words) == 0
        return capsys.readouterr().out

    assert printed("help") == printed("--help")
    assert printed("version") == printed("--version")
    assert printed("help", "generate") == printed("generate", "--help")
    assert printed("help", "sft", "data") == printed("sft", "--help", "data")


def test_help_has_every_command_once_in_one_group():
    lines = [line.split()[0] for line in cli._help().splitlines() if line.startswith("  ") and line[2] != " "]
    assert sorted(set(lines) & set(cli.COMMANDS)) == sorted(cli.COMMANDS)
    assert sum(map(len, cli.GROUPS.values())) == len(cli.COMMANDS)


def test_an_algorithm_is_ppo_with_its_preset_in_either_spelling(monkeypatch, capsys):
    for word in ("dr_grpo", "dr-grpo"):
        assert run(monkeypatch, word, "--help", "norm_adv_by_std_in_grpo") == 0
        assert "algorithm.norm_adv_by_std_in_grpo=False" in capsys.readouterr().out
    assert run(monkeypatch, "reward_model", "--help", "data") == 0


def test_help_imports_nothing_that_takes_time():
    """What a clock would say depends on the machine; these are what it would say it of."""
    slow = "{'torch', 'transformers', 'omegaconf', 'numpy', 'importlib.resources', 'inspect'}"
    program = f"import sys; from lockstep import cli; cli._main(['--help']); print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m lockstep.cli ppo --help all | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")


def test_the_package_is_run_as_the_command():
    ran = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{lockstep.__version__}\n", "")
