import pytest

from lockstep.agents import Action
from lockstep.agents.gym_text import GymText
from lockstep.errors import ConfigError


def test_frozen_lake_is_played_with_words():
    game = GymText(is_slippery=False)
    assert game.reset({"prompt": "Reach G."}, 1).messages[0]["content"] == "Reach G.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert "left, down, right, up" in game.step(Action("?", "fly")).messages[0]["content"]
    for word in ("down", "I go Down.", "right", "down", "right"):
        turn = game.step(Action(word, word))
        assert (turn.reward, turn.done) == (0.0, False)
    assert turn.messages[0]["content"] == "SFFF\nFHFH\nFFFH\nHF[F]G"
    turn = game.step(Action("", "right"))
    assert (turn.reward, turn.done, turn.info, turn.messages) == (1.0, True, {"success": 1}, [])
    game.close()


def test_the_same_seed_is_the_same_game_and_others_are_known_by_their_words():
    texts = [GymText("Blackjack-v1").reset({}, seed).messages[0]["content"] for seed in (3, 3, 4, 5, 6)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2
    assert "dealer shows" in texts[0]
    cliff = GymText("CliffWalking-v1")
    assert "x" in cliff.reset({}, 0).messages[0]["content"]
    assert cliff.step(Action("", "right")).reward == -100.0
    with pytest.raises(ConfigError, match="FrozenLake"):
        GymText("CartPole-v1")
