"""FrozenLake, played with words. The games that warm the model up are those of a player who goes the right way in four of ten moves and
anywhere in the others. `TASK=frozen_lake examples/agents/run.sh` runs it."""

from __future__ import annotations

import random
from typing import Any

from lockstep.agents import Action
from lockstep.agents.gym_text import GymText

MOVES = ("left", "down", "right", "up")
RIGHT_WAY = (1, 2, 1, 0, 1, 1, 1, 1, 2, 1, 1, 1, 2, 2, 2, 2)
"""For each of the 16 fields, a move of a shortest way to the goal."""
MARKS = ()
WORDS = (*"SFHG[]\n", *MOVES)
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS = {"name": "FrozenLake-v1", "is_slippery": False, "max_episode_steps": 12}


def warm_up(chance: random.Random) -> list[dict[str, Any]]:
    """Games."""
    return [{"messages": _game(chance)} for _ in range(6000)]


def prompts(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """All the same: the lake of gymnasium's 4x4 map."""
    return [{"prompt": "\n", "data_source": "frozen_lake", "env_kwargs": OPTIONS} for _ in range(count)]


def _game(chance: random.Random) -> list[dict[str, Any]]:
    game = GymText(**OPTIONS)
    turn = game.reset({}, chance.randrange(1 << 30))
    messages: list[dict[str, Any]] = []
    while not turn.done:
        messages += turn.messages
        field = _field(turn.messages[0]["content"])
        move = MOVES[RIGHT_WAY[field]] if chance.random() < 0.4 else chance.choice(MOVES)
        messages.append({"role": "assistant", "content": move})
        turn = game.step(Action(move, move))
    return messages


def _field(text: str) -> int:
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if "[" in line)
    return 4 * row + lines[row].index("[")
