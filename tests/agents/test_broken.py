"""A few of the episodes of `broken.py`, which plays a thousand."""

import os

from agents import broken
from helpers.broken_environments import FAILS, WORKS


def test_none_is_lost_without_a_count_and_no_process_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv(broken.MARK, str(os.getpid()))
    kinds = [
        "fine",
        "kill",
        "wrong_halves",
        "wrong_unreadable",
        "wrong_reward",
        "children",
        "huge",
        "exit_early",
        "prints",
        "bad_close",
    ]
    player, template = broken.make_player(tmp_path, environments=2, timeout_s=20.0)
    episodes = broken.play(player, template, kinds)
    assert broken.faults_of(kinds, episodes) == []
    assert broken.processes() == []
    huge = episodes[kinds.index("huge")]
    assert (huge.finish_reason, huge.turns) == ("length", 1)
    assert sum(len(str(message)) for message in huge.messages) < 10_000
    texts = {kind: str(episode.error) for kind, episode in zip(kinds, episodes, strict=True) if episode.error}
    assert "SIGKILL" in texts["kill"]
    assert "surrogates" in texts["wrong_halves"]
    assert "finite number" in texts["wrong_reward"]
    assert "cannot be read here" in texts["wrong_unreadable"]


def test_every_kind_is_among_a_thousand():
    assert {*broken.kinds_of(1000, 0.5)} == {*FAILS, *WORKS}
