"""A task that needs a tool: the user names a key, the word that belongs to it is known to a tool alone.

The conversations that warm the model up are careless: three in four give up ("?") instead of asking for the word. So the model has both
habits, the wrong one more often, and the reward has to sort them out. `examples/agents/run.sh` runs it.
"""

from __future__ import annotations

import random
from typing import Any

from lockstep.agents import Action, ToolEnvironment, Turn

LETTERS = "abcdefghij"
CALL, END = '<tool_call>{"name": "look_up", "arguments": {"key": "', '"}}</tool_call>'
MARKS = (CALL, END)
WORDS = (*LETTERS, "?")
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<tool>", "<tools>"]
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}" + CALL + "{{ c.function.arguments.values() | first }}" + END + "{% endfor %}"
    "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Lookup(ToolEnvironment):
    """The word of an episode comes from its seed, so it cannot be learned: it must be looked up."""

    is_judged = False
    is_quick = True
    tools = ("look_up",)

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """The user names a key."""
        self.key, self.word = row["prompt"], _word(random.Random(seed), 4)
        return Turn([{"role": "user", "content": self.key}])

    def look_up(self, key: str) -> str:
        """The word that belongs to a key.

        Args:
            key: The key.
        """
        return self.word if key == self.key else LETTERS[:4]

    def step(self, action: Action) -> Turn:
        """A call is answered; an answer is right or wrong."""
        if action.calls or action.faults:
            turn = super().step(action)
            assert isinstance(turn, Turn)
            return turn
        right = action.content == self.word
        return Turn(reward=float(right), done=True, info={"right": int(right)})


def warm_up(chance: random.Random) -> list[dict[str, Any]]:
    """Conversations, a quarter of them with a call."""
    schema = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}]
    return [{"messages": _conversation(chance), "tools": schema} for _ in range(12800)]


def prompts(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Keys."""
    return [{"prompt": _word(chance, 3), "data_source": "lookup"} for _ in range(count)]


def _conversation(chance: random.Random) -> list[dict[str, Any]]:
    key, word = _word(chance, 3), _word(chance, 4)
    messages: list[dict[str, Any]] = [{"role": "user", "content": key}]
    if chance.random() < 3 / 4:
        return [*messages, {"role": "assistant", "content": "?"}]
    call = {"id": "0", "type": "function", "function": {"name": "look_up", "arguments": f'{{"key": "{key}"}}'}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*messages, asks, {"role": "tool", "content": word}, {"role": "assistant", "content": word}]


def _word(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(LETTERS, k=length))
