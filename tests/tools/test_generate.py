import io
import json
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny import save_tiny_model, tiny_model

from lockstep import cli
from lockstep.errors import ConfigError
from lockstep.tools.generate import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("generate") / "model", seed=3)


@pytest.fixture
def generate(model, capsys):
    """`generate(*arguments)`: exit status, output and errors."""

    def command(*arguments):
        status = main([model, *map(str, arguments), "--device", "cpu", "--max-tokens", "5"])
        return status, *capsys.readouterr()

    return command


def test_work_is_named_on_stderr_before_it_is_done_and_rows_are_not_packed(generate, monkeypatch):
    packings = []
    monkeypatch.setattr("lockstep.models.load.check_packing", lambda *arguments: packings.append(arguments))
    monkeypatch.setattr("lockstep.tools.load_model.find_model", Mock(side_effect=ConfigError("nothing")))
    status, _, err = generate("abc")
    assert (status, err.splitlines()[0].split()[0]) == (1, "loading")
    monkeypatch.undo()
    monkeypatch.setattr("lockstep.models.load.check_packing", lambda *arguments: packings.append(arguments))
    status, out, err = generate("abc", "--json")
    assert (status, packings) == (0, [])
    assert [line.split()[0] for line in err.splitlines()] == ["loading", "generating"]
    rows(out)  # stdout has nothing else


def rows(out):
    return [json.loads(line) for line in out.splitlines()]


def test_the_tokens_are_the_models_likeliest_and_the_log_probs_its_own(generate, model):
    from transformers import AutoTokenizer

    status, out, _ = generate("abc", "--json", "--log-probs")
    (row,) = rows(out)
    prompt = AutoTokenizer.from_pretrained(model)("abc", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = torch.cat([prompt, torch.tensor([row["token_ids"]])], 1)
        log_probs = tiny_model(seed=3)(whole).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    assert status == 0
    assert row["token_ids"] == log_probs.argmax(-1).tolist()
    expected = log_probs.max(-1).values.tolist()
    assert row["log_probs"] == pytest.approx(expected, abs=1e-4)
    lines = generate("abc", "--log-probs")[1].splitlines()
    assert [float(line.split()[0]) for line in lines] == pytest.approx([*expected, sum(expected)], abs=1e-3)


def test_several_prompts_and_samples_are_told_apart_and_a_chat_is_another_prompt(generate):
    _, out, _ = generate("abc", "jij", "--n", "2", "--temperature", "1")
    heads = [line.split(":")[0] for line in out.splitlines() if line.startswith("---")]
    assert heads == [f"--- prompt {i}, sample {k}" for i in (1, 2) for k in (1, 2)]
    assert [line.rpartition(": ")[2] for line in out.splitlines() if line.startswith("---")] == ["abc", "abc", "jij", "jij"]
    assert out.count("finish reason: ") == 4
    plain, chat = (rows(generate("abc", "--json", *more)[1])[0]["token_ids"] for more in ([], ["--chat"]))
    assert plain != chat


def test_prompts_come_from_files_and_standard_input(generate, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("abc\n\njij\x0c\u2028a\n")  # a line ends where a file's lines do
    messages = [{"role": "user", "content": "abc"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("abc", messages)))
    from_lines = rows(generate("--file", tmp_path / "lines.txt", "--json")[1])
    assert [row["prompt"] for row in from_lines] == ["abc", "jij\x0c\u2028a"]
    text, chat = rows(generate("--file", tmp_path / "rows.jsonl", "--json")[1])
    assert text["token_ids"] == from_lines[0]["token_ids"]
    assert chat["token_ids"] == rows(generate("abc", "--chat", "--json")[1])[0]["token_ids"]
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    assert rows(generate("--file", "-", "--json")[1])[0]["token_ids"] == text["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt"),
        (["abc", "--n", "0"], "--n must be at least 1"),
        (["abc", "--temperature", "-1"], "temperature"),
        (["abc", "--stop", "\\n"], "--stop has \\n, with a backslash"),
        (["abc", "--system", "short"], "--system is a message of a conversation"),
        (["--file", "none.txt"], "--file none.txt cannot be read"),
        (["--file", "none.jsonl"], "data file none.jsonl does not exist\n"),
    ],
)
def test_what_cannot_be_generated_is_said_before_a_model_is_loaded(generate, arguments, message, monkeypatch):
    monkeypatch.setattr("lockstep.tools.generate.load_model_of", lambda options: pytest.fail("loaded a model"))
    status, out, error = generate(*arguments)
    assert (status, out) == (1, "")
    assert message in error


@pytest.mark.parametrize("prompt", [None, 5, [], "", ["abc"]])
def test_a_row_of_a_file_that_is_no_prompt_is_named(generate, tmp_path, prompt):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": one}) for one in ("abc", prompt)))
    status, out, error = generate("--file", file)
    assert (status, out) == (1, "")
    assert f"{file} row 1: " in error


def test_a_file_without_rows_is_said(generate, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    assert f"no rows in {tmp_path}" in generate("--file", tmp_path / "rows.jsonl")[2]


def test_a_prompt_that_does_not_fit_is_an_error_of_its_own(generate):
    status, out, _ = generate("abc", "a" * 100, "--json")
    good, bad = rows(out)
    assert status == 1
    assert good["finish_reason"] in ("stop", "length")
    assert "the model's context holds 64" in bad["error"]
    assert cli.COMMANDS["generate"][0] == main.__module__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "error: --device cuda, but torch"),
        (["--engine", "vllm"], "error: --engine vllm needs the package vllm"),
        (["--max-num-seqs", "0"], "error: --max-num-seqs 0 is too small"),
        (["--gpu-memory-utilization", "2"], "error: --gpu-memory-utilization 2.0 is out of range"),
        (["--top-p", "2"], "error: --top-p 2.0 is out of range"),
    ],
)
def test_errors_name_the_commands_own_options(model, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lockstep.workers.rollout.registry.find_spec", lambda name: None)
    assert main([model, "abc", *arguments]) == 1
    assert message in capsys.readouterr().err
