"""`lockstep eval` on the embedded task, as a user calls it."""

import json

import pytest
import torch
from helpers.run import make_trainer, roles

from lockstep import cli
from lockstep.tools.evaluate.answerers import AnswerSampling, LocalModel
from lockstep.tools.evaluate.command import main
from lockstep.tools.evaluate.questions import Question

LENGTHS = ["data.max_prompt_length=16", "data.max_response_length=12"]


@pytest.fixture(scope="module")
def run(embedded_config_in, tmp_path_factory):
    """A run of one step that validated with two samples, and what it measured."""
    folder = tmp_path_factory.mktemp("run")
    options = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    options += ["actor_rollout_ref.rollout.val_kwargs.n=2", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0"]
    trainer = make_trainer(embedded_config_in(folder, *options), {"global_pool": [1]}, roles("ActorRollout", "Critic", "RefPolicy"))
    try:
        trainer.init_workers()
        return folder, trainer.fit()
    finally:
        trainer.close()


@pytest.fixture
def evaluate(tmp_path, capsys, monkeypatch):
    """`evaluate(*arguments)`: exit status, output and results.json of the command."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, out="out"):
        status = main([*map(str, arguments), "--out", out, "--device", "cpu"])
        printed = capsys.readouterr()
        file = tmp_path / out / "results.json"
        return status, printed.out + printed.err, json.loads(file.read_text()) if file.is_file() else None

    return command


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_is_evaluated_as_it_validates(evaluate, run, tmp_path):
    folder, result = run
    status, out, found = evaluate(folder)
    assert status == 0, out
    (part,) = found["results"].values()
    assert (part["num_questions"], part["num_samples"], part["num_missing"]) == (32, 64, 0)
    assert (found["model"]["step"], found["sampling"]["temperature"], found["sampling"]["n"]) == (1, 1.0, 2)
    validated = result.last_validation
    for name, metric in {"mean@2": "mean@2", "pass@2": "best@2/mean"}.items():
        number = {"value": validated[f"val-core/lockstep/reverse/reward/{metric}"]}
        number |= {end: validated[f"val-aux/lockstep/reverse/reward/{metric}/{end}"] for end in ("low", "high")}
        assert part["scores"]["reward"][name] == number, "the same words, random numbers and arithmetic"
    assert "lockstep/reverse  reward" in out
    assert len(samples(tmp_path / "out")) == 64
    assert found["contamination"]["num_contaminated"] == 0
    assert found["contamination"]["num_too_short"] == 32


def test_the_likeliest_answers_are_the_models_own_and_a_result_compares_with_itself(evaluate, embedded_task, tmp_path):
    arguments = [embedded_task.model, "--data", embedded_task.val_file, "--limit", "24", *LENGTHS]
    status, out, first = evaluate(*arguments)
    assert status == 0, out
    assert first["sampling"]["temperature"] == 0.0
    assert "contamination" not in first
    status, out, second = evaluate(*arguments, "--against", tmp_path / "out", out="again")
    assert status == 0, out
    (difference,) = second["against"]["differences"].values()
    assert difference["reward"]["value"] == 0.0
    assert (difference["reward"]["p_value"], difference["reward"]["num_questions"]) == (1.0, 24)
    assert second["against"]["same_template"]
    assert second["against"]["differs"] == []
    assert "better on 0 and worse on 0 of 24 questions" in out
    assert [row["response"] for row in samples(tmp_path / "out")] == [row["response"] for row in samples(tmp_path / "again")]


def test_scores_of_two_judges_are_not_compared(evaluate, embedded_task, tmp_path, monkeypatch):
    for name, score in (("one", 0.5), ("other", -5.0)):
        code = f"def compute_score(data_source, solution_str, ground_truth):\n    return {score}\n"
        (tmp_path / f"{name}.py").write_text(code)
    arguments = [embedded_task.model, "--data", embedded_task.val_file, "--limit", "4", *LENGTHS]
    judge = f"reward.custom_reward_function.path={tmp_path}"
    status, out, _ = evaluate(*arguments, f"{judge}/one.py")
    assert status == 0, out
    monkeypatch.setattr("lockstep.tools.evaluate.command.load_model_of", lambda options: pytest.fail("loaded a model"))
    status, out, _ = evaluate(*arguments, f"{judge}/other.py", "--against", tmp_path / "out", out="again")
    assert status == 1
    assert "4 of 4 questions had another judge: one.py:compute_score before, other.py:compute_score now" in out
    assert not (tmp_path / "again").exists()


def test_a_question_that_was_trained_on_is_counted_and_left_out(evaluate, embedded_task, tmp_path):
    rows = [{"prompt": text, "data_source": "x", "reward_model": {"ground_truth": "a"}} for text in ("a b c d e f", "j i h g f e")]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "J, I, H, G, F, E!"}))
    (tmp_path / "judge.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 0.5\n")
    judge = f"reward.custom_reward_function.path={tmp_path}/judge.py"
    files = ["--data", tmp_path / "held_out.jsonl", f"data.train_files={tmp_path}/train.jsonl", "--max-tokens", "2"]
    status, out, found = evaluate(embedded_task.model, *files, judge, *LENGTHS)
    assert status == 0, out
    assert (found["contamination"]["num_contaminated"], found["contamination"]["num_questions"]) == (1, 2)
    assert found["contamination"]["without"]["x"]["reward"]["value"] == 0.5
    assert found["results"]["x"]["cut_by_length"]["value"] > 0
    assert "contaminated: 1 of 2 questions" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to ask: --task NAME, or --data FILES"),
        (["--task", "gsm8k", "--data", "x.parquet"], "--data and --task gsm8k are two things to ask; name one of them"),
        (["--data", "VAL", "--n", "2"], "draws the same answer 2 times"),
        (["--data", "VAL", "--against", "none.json"], "is not a result file"),
        (["--data", "none.parquet"], "none.parquet"),
        (["--task", "gsm8k", "--source", "/nowhere"], "/nowhere does not exist"),
        (["--data", "VAL", "rewards.x=1"], "rewards"),
        (["--data", "VAL", "--shots", "2"], "--shots is about a task"),
        (["--data", "VAL", "actor_rollout_ref.rollout.val_kwargs.n=2"], "rollout.val_kwargs.n changes nothing of what is asked"),
        (["--task", "gsm8k", "data.max_prompt_length=9"], "data.max_prompt_length changes nothing of --task gsm8k"),
        (["--task", "gsm8k", "reward.custom_reward_function.path=r.py"], "path changes nothing of --task gsm8k"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_a_model_is_loaded(evaluate, embedded_task, arguments, message, monkeypatch):
    monkeypatch.setattr("lockstep.tools.evaluate.command.load_model_of", lambda options: pytest.fail("loaded a model"))
    arguments = [str(embedded_task.val_file) if word == "VAL" else word for word in arguments]
    status, out, found = evaluate(embedded_task.model, *arguments, *([] if "--task" in arguments else LENGTHS))
    assert (status, found) == (1, None)
    assert message in out


class Engine:
    """Gives each prompt token its own number as its log-prob."""

    class config:
        name = "fake"

    gives = True

    def generate(self, requests, sampling):
        from lockstep.workers.rollout.request import Completion

        empty = torch.empty(0)
        return [
            Completion(i, empty.long(), empty, "length", 0, prompt_log_probs=-request.prompt_ids.float() if self.gives else None)
            for i, request in enumerate(requests)
        ]


class Letters:
    """A tokenizer with one token per character."""

    chat_template = None
    backend_tokenizer = None

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def test_the_likelihood_of_a_choice_is_that_of_its_own_tokens():
    model = LocalModel("m", Engine(), Letters(), (), {})
    questions = [Question("s", "", "ab", True, {}, choices=("c", "dd")), Question("s", "", "x", True, {}, choices=("y",))]
    assert model.log_likelihoods(questions) == [[-ord("c"), -2 * ord("d")], [-ord("y")]]
    model._engine.gives = False
    with pytest.raises(ValueError, match="gives no log-probs of prompts"):
        model.log_likelihoods(questions)


def test_drawing_in_a_way_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="top_p"):
        AnswerSampling(top_p=2.0)
    assert cli.COMMANDS["eval"][0] == main.__module__
