"""The loop of `lockstep chat`, on a real stream of a tiny model and on one that is slow to stop."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import save_tiny_model

from lockstep import cli
from lockstep.tools import chat
from lockstep.tools.chat import Chat, main
from lockstep.workers.rollout.request import Completion, Tokens


class Words:
    """A tokenizer of few tokens, one of them half a character and one a control character; a conversation is as long as it has words."""

    chat_template = "x"
    backend_tokenizer = None
    tokens = {1: b"hello ", 2: b"\x1b[2J", 3: b"b", 4: b"\xc3", 5: b"\xa9"}

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace")

    def apply_chat_template(self, conversations, tokenize=False, **kwargs):
        self.seen = conversations[0]
        return [str(len(conversations[0]))]

    def __call__(self, texts, **options):
        return {"input_ids": [[1] * int(text) for text in texts]}


class Slow:
    """A stream that gives one token at a time and calls `at` after each."""

    def __init__(self, ids, at=lambda number: None, error=None):
        self.ids, self.at, self.error, self.given, self.is_aborted = ids, at, error, 0, False

    def add(self, request):
        self.given, self.is_aborted = 0, False
        return 0

    def next(self):
        if self.error or self.is_aborted or self.given == len(self.ids):
            reason = "error" if self.error else "abort" if self.is_aborted else "stop"
            ids = torch.tensor(self.ids[: self.given])
            return Completion(0, ids, ids.float(), reason, 0, self.error)
        self.given += 1
        self.at(self.given)
        token = torch.tensor(self.ids[self.given - 1 : self.given])
        return Tokens(0, token, token.float())

    def abort(self, index):
        self.is_aborted = True


def talk(stream, *lines, monkeypatch):
    said = iter(lines)

    def read(prompt):
        line = next(said, EOFError)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    tokenizer = Words()
    talked = Chat(SimpleNamespace(tokenizer=tokenizer), stream, "be kind")
    talked.run()
    return talked, tokenizer


def test_answers_are_printed_as_they_come_escaped_and_kept(monkeypatch, capsys):
    talked, tokenizer = talk(Slow([1, 2, 4, 5, 3]), "hi", "", "again", monkeypatch=monkeypatch)
    assert capsys.readouterr().out.count("hello \\x1b[2Jéb\n") == 2, "half a character waits for its other half"
    assert [message["role"] for message in talked.messages] == ["user", "assistant"] * 2
    assert [message["role"] for message in tokenizer.seen] == ["system", "user", "assistant", "user"]


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    stream = Slow([1] * 50, at=lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 2 else None)
    talked, _ = talk(stream, "hi", KeyboardInterrupt, "more", monkeypatch=monkeypatch)
    assert talked.messages[1]["content"] == "hello hello "
    assert len(talked.messages) == 4
    assert "hello hello  (stopped)" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_program(monkeypatch):
    def press(number):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        talk(Slow([1, 1], at=press), "hi", monkeypatch=monkeypatch)


def test_reset_forgets_exit_ends_and_other_commands_help(monkeypatch, capsys):
    talked, _ = talk(Slow([1]), "hi", "/reset", "/what", "/exit", "never", monkeypatch=monkeypatch)
    assert talked.messages == []
    assert capsys.readouterr().out.count("/reset forgets the conversation") == 2


def test_a_question_without_an_answer_is_not_in_the_conversation(monkeypatch, capsys):
    talked, _ = talk(Slow([], error="the prompt has 99 tokens"), "hi", monkeypatch=monkeypatch)
    assert talked.messages == []
    assert "error: the prompt has 99 tokens; /reset begins a new conversation" in capsys.readouterr().err


def test_the_command_talks_to_a_real_model(tmp_path, monkeypatch, capsys):
    lines = iter(["abc", "jij"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/exit"))
    model = save_tiny_model(tmp_path / "model", seed=3)
    assert main([model, "--device", "cpu", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(chat, "load_model_of", lambda options: pytest.fail("loaded a model"))
    assert main([model, "--top-p", "3"]) == 1
    assert cli.COMMANDS["chat"][0] == main.__module__
