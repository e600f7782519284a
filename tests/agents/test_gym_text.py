import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.run import roles, train

from lockstep.agents import Action
from lockstep.agents.gym_text import GymText
from lockstep.config import load_config
from lockstep.errors import ConfigError
from lockstep.utils.files import load_object


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


GAMES = {
    "FrozenLake-v1": {"is_slippery": True, "max_episode_steps": 6},
    "CliffWalking-v1": {"max_episode_steps": 6},
    "Blackjack-v1": {},
}


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    """A random policy whose tokens are words of the games, so that it often says one."""
    folder = tmp_path_factory.mktemp("player")
    task = SimpleNamespace(
        SPECIAL=["<pad>", "<eos>", "<user>", "<assistant>"],
        WORDS=["left", "down", "right", "up", "stick", "hit", *"SFHGPYTCx[]\n .,:0123456789abcdehilmnorstuvwy"],
        MARKS=(),
        TEMPLATE="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        warm_up=lambda chance: [{"none": 0}],
        prompts=lambda chance, count: [{"none": 0}],
    )
    load_object(str(Path(__file__).parents[2] / "examples" / "agents" / "make.py"), "make")(task, folder, 0)
    return folder / "model"


@pytest.mark.parametrize("game", GAMES)
def test_a_policy_is_trained_and_validated_on_every_game(player, tmp_path, game):
    row = {"prompt": "Play.", "data_source": game, "env_kwargs": {"name": game} | GAMES[game]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    config = load_config(
        [
            f"data.train_files={tmp_path / 'rows.jsonl'}",
            f"data.val_files={tmp_path / 'rows.jsonl'}",
            "data.train_batch_size=4",
            "data.max_prompt_length=160",
            "data.max_response_length=350",
            f"actor_rollout_ref.model.path={player}",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1",
            "algorithm.adv_estimator=grpo",
            "agent.environment=lockstep.agents.gym_text:GymText",
            "agent.max_turns=6",
            "agent.max_turn_tokens=8",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            f"trainer.validation_data_dir={tmp_path / 'validation'}",
            "trainer.device=cpu",
            "trainer.total_training_steps=2",
            "trainer.test_freq=2",
        ]
    )
    metrics = [row for row in train(config, {"p": [1]}, roles("ActorRollout", pool="p")) if "agent/turns" in row]
    lowest, highest = {"FrozenLake-v1": (0, 1), "CliffWalking-v1": (-600, -0.01), "Blackjack-v1": (-1, 1)}[game]
    assert len(metrics) == 2
    for row in metrics:
        assert row["agent/missing"] == 0
        assert 1 <= row["agent/turns"] <= 6
        assert lowest <= row["critic/score/mean"] <= highest
    assert 1 <= metrics[-1][f"val-aux/{game}/turns/mean@1"] <= 6
    told = [json.loads(line)["episode"] for line in (tmp_path / "validation" / "2.jsonl").read_text().splitlines()]
    assert len(told) == 4
    assert all(episode["messages"][0]["content"].startswith("Play.") for episode in told)
