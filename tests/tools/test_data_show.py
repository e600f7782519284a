from __future__ import annotations

import json

import pytest
from helpers.word_tokenizer import TEMPLATE, plain_tokenizer  # noqa: F401

from lockstep import cli
from lockstep.tools.data_show import main


@pytest.fixture
def show(tmp_path, plain_tokenizer, capsys):  # noqa: F811
    """`show(rows, *options)`: exit status and output of the command on a file of these rows."""
    plain_tokenizer.chat_template = TEMPLATE.replace("['user', 'system']", "['user', 'system', 'assistant']")
    plain_tokenizer.pad_token = plain_tokenizer.eos_token
    plain_tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "rows.jsonl"

    def command(rows, *options):
        path.write_text("\n".join(map(json.dumps, rows)))
        status = main(["show", str(path), "--model", str(tmp_path / "model"), *options])
        printed = capsys.readouterr()
        return status, printed.out.replace(str(path), "FILE") + printed.err

    return command


CHAT = {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]}


def test_supervised_rows_are_shown_with_the_trained_tokens_marked(show):
    status, out = show([CHAT, {"text": "w1 w2"}], "--as", "sft")
    assert (status, out) == (
        0,
        "--- FILE row 0: 6 tokens, 2 trained (33%)\n<user> w1 w2 <assistant>[[ w3 <eos>]]\n\n"
        "--- FILE row 1: 3 tokens, 2 trained (67%)\nw1[[ w2<eos>]]\n\n"
        "2 of 2 rows read: 9 tokens, 4 trained (44%)\ntokens in a row: median 6, most 6\n",
    )


def test_pairs_are_shown_after_their_prompt_and_identical_ones_counted(show):
    pair = {"prompt": "w1 ", "chosen": "w2", "rejected": "w3 w4"}
    status, out = show([pair, pair | {"rejected": "w2"}], "--as", "pairs", "--plain")
    assert status == 0
    assert out.startswith(
        "--- FILE row 0, prompt: 1 tokens\nw1\n"
        "--- FILE row 0, chosen: 3 tokens, 2 trained (67%)\n[[w2<eos>]]\n"
        "--- FILE row 0, rejected: 4 tokens, 3 trained (75%)\n[[w3 w4<eos>]]\n\n"
    )
    assert "left out, since chosen and rejected are the same: 1\n" in out


def test_prompts_are_shown_as_rl_reads_them(show):
    status, out = show([{"prompt": "w1", "data_source": "mine"}], "--as", "rl")
    assert (status, out) == (0, "--- row 0: 3 tokens, data_source mine\n<user> w1 <assistant>\n\n1 rows\n")
    assert "<assistant> w9" in show([{"prompt": "w1"}], "--as", "rl", "--template-kwargs", '{"suffix": "w9"}')[1]


def test_rows_that_cannot_be_used_are_named_and_the_others_shown(show):
    status, out = show([{"text": "w1 w2"}, {"other": 1}, {"text": "w1 " * 9}], "--as", "sft", "--max-length", "5")
    assert status == 1
    assert "w1[[ w2<eos>]]" in out
    assert "--- cannot be used: FILE row 1: expected messages" in out
    assert "cannot be used: 2\n  FILE row 1: expected messages" in out
    assert "FILE row 2: the row has 10 tokens" in out
    status, out = show([{"text": "w1 w2 w3 w4 w5 w6"}], "--as", "sft", "--max-length", "4", "--truncation", "middle")
    assert (status, out.splitlines()[1]) == (0, "w1[[ w2 ... w6<eos>]]")


@pytest.mark.parametrize("text", ["{a: 1}", "[1]"])
def test_template_arguments_that_are_no_json_object_are_said(show, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        show([{"text": "w1"}], "--as", "sft", "--template-kwargs", text)
    assert f"argument --template-kwargs: {text} is no" in capsys.readouterr().err


def test_a_terminal_gets_colours(show, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "w1\033[32m w2<eos>\033[0m" in show([{"text": "w1 w2"}], "--as", "sft")[1]


def test_a_file_that_is_not_there_is_an_error_and_the_command_is_in_the_table(show, tmp_path, capsys):
    assert main(["show", str(tmp_path / "none.jsonl"), "--as", "sft", "--model", str(tmp_path / "model")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert cli.COMMANDS["data"][0] == main.__module__
