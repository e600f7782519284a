"""`lockstep rewards check`: a good reward passes; each fault of a bad one is found, named and shown."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep import cli
from lockstep.tools.reward_check import command as check_rewards

FAULTY = """
import contextlib, os, random, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = float(solution_str.strip() == ground_truth)
    match data_source:
        case "raises on empty":
            return right / len(solution_str.split()[0])
        case "hangs on long input":
            if len(solution_str) > 50_000:
                time.sleep(60)
        case "dies on emoji":
            if "\\u2705" in solution_str:
                os._exit(3)
        case "is random":
            return random.random()
        case "scores gold wrong":
            return right if extra_info["number"] % 2 else 0.0
        case "scores nothing":
            return 0.0
        case "pays the echo":
            return 1.0 if solution_str in (ground_truth, extra_info["question"]) else 0.0
        case "runs what it reads":
            if "open(" in solution_str or "create_connection" in solution_str:
                with contextlib.suppress(SystemExit):
                    exec(solution_str.removeprefix("```python").removesuffix("```"), {})
    return right
"""
EXPECTED = {
    "raises on empty": {"raised"},
    "hangs on long input": {"timeout"},
    "dies on emoji": {"crashed"},
    "is random": {"differs"},
    "scores gold wrong": {"gold wrong"},
    "scores nothing": {"gold wrong"},
    "pays the echo": {"hack"},
    "runs what it reads": set(),
    "good": set(),
}


def write_rows(path, sources, number=2):
    rows = [
        {
            "data_source": source,
            "prompt": f"ab {i}",
            "reward_model": {"style": "rule", "ground_truth": f"cd {i}"},
            "extra_info": {"question": f"ab {i}", "number": i},
        }
        for source in sources
        for i in range(number)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def run(embedded_task, tmp_path, capsys):
    """Run the command on the embedded model; returns exit status, what was printed, and the JSON report."""

    def run(*arguments):
        model = f"actor_rollout_ref.model.path={embedded_task.model}"
        status = check_rewards.main(
            ["check", model, "reward.num_workers=2", "--json", str(tmp_path / "r.json"), *map(str, arguments)]
        )
        printed = capsys.readouterr()
        report = tmp_path / "r.json"
        return status, printed.out + printed.err, json.loads(report.read_text()) if report.exists() else None

    return run


def test_a_good_reward_is_clean_and_the_models_samples_show_how_many_groups_carry_a_signal(run, embedded_task):
    status, printed, report = run(
        f"data.train_files={embedded_task.train_file}", f"data.val_files={embedded_task.val_file}", "data.max_prompt_length=16",
        "data.max_response_length=12", "actor_rollout_ref.rollout.n=4", "trainer.device=cpu", "--rows", 6, "--model-samples", 5,
    )  # fmt: skip
    assert status == 0
    assert "clean: 0 errors" in printed
    assert report["is_clean"] is True
    (source,) = report["sources"]
    assert (source["data_source"], source["num_rows"], source["num_gold_right"]) == ("lockstep/reverse", 6, 6)
    assert (report["groups"]["num_groups"], report["groups"]["samples"]) == (5, 4)
    assert 0 < report["groups"]["mean_score"] < 1
    assert next(kind for kind in report["kinds"] if kind["kind"] == "sample of the model")["num_cases"] == 20


def test_each_fault_of_a_bad_reward_is_found_and_named(run, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    status, printed, report = run(
        f"data.train_files={write_rows(tmp_path / 'rows.parquet', EXPECTED)}", "reward.timeout_s=1.5",
        f"reward.custom_reward_function.path={tmp_path / 'faulty.py'}",
    )  # fmt: skip
    assert status == 1
    found = {source: set() for source in EXPECTED}
    for problem in report["problems"]:
        if problem["data_source"] is not None:
            found[problem["data_source"]].add(problem["kind"])
            assert f"{problem['kind']} ({problem['data_source']})" in printed
    # A random score is not the best for gold, and pays nonsense.
    found["is random"] -= {"gold wrong", "hack"}
    assert found == EXPECTED
    escapes = [problem for problem in report["problems"] if problem["data_source"] is None]
    assert [(problem["kind"], problem["count"]) for problem in escapes] == [("escape", 2)]
    assert "IndexError" in printed
    assert "did not end within 1.5 s" in printed
    assert "how many groups carry a signal: add --model-samples" in printed


def test_programs_are_tried_in_the_sandbox_and_do_not_get_out(run, tmp_path):
    row = {
        "data_source": "mbpp",
        "prompt": "add",
        "reward_model": {"test_cases": {"test_list": ["assert add(1, 2) == 3"]}},
        "extra_info": {"code": "def add(a, b):\n    return a + b"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "code.parquet")
    status, printed, report = run(f"data.train_files={tmp_path / 'code.parquet'}", "reward.sandbox.wall_s=2")
    assert (status, report["problems"]) == (0, []), printed
    paid = {kind["kind"]: kind["num_paid"] for kind in report["kinds"]}
    assert paid["gold"] == 1
    assert not any(number for kind, number in paid.items() if kind.startswith("program that"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "nobody's"),
        (["data.val_files=none.parquet"], "none.parquet"),
        (["reward.timeout=3"], "reward.timeout_s"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--rows", "0"], "--rows must be at least 1, not 0"),
        (["--model-samples", "-1"], "--model-samples must be at least 1, not -1"),
    ],
)
def test_what_training_would_refuse_is_one_clear_error(run, tmp_path, arguments, expected):
    rows = write_rows(tmp_path / "rows.parquet", ["nobody's"])
    status, printed, _ = run(f"data.train_files={rows}", *arguments)
    assert status == 1
    assert "Traceback" not in printed
    assert expected in printed[printed.index("error: ") :]


def test_the_command_is_rewards_check(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lockstep", "rewards"])
    assert cli.main() == 2
    assert "lockstep rewards check" in capsys.readouterr().err
    assert check_rewards.main(["chekc"]) == 2
    assert "'chekc'" in capsys.readouterr().err
    assert check_rewards.main(["--help"]) == 0
    assert "--model-samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["grpo", "data.train_files=none.parquet", "actor_rollout_ref.model.path=smollm2-135m"], "none.parquet"),
        (["grpo", "data.trainfiles=x"], "the nearest valid key is 'data.train_files'"),
        (["sft", "data.train_files=x", "model.path=x"], "lockstep sft has no rewards to check"),
        (["grop"], "'grop' is neither key=value nor a training command"),
    ],
)
def test_the_recipe_is_named_as_for_other_commands(capsys, words, expected):
    assert check_rewards.main(["check", *words]) == 1
    assert expected in capsys.readouterr().err
