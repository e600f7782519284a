"""Games of gymnasium whose states and moves are a few words: FrozenLake, CliffWalking, Blackjack."""

import re
from typing import Any

from lockstep.agents.environment import Action, Environment, Turn
from lockstep.errors import ConfigError, MissingExtra

_MOVES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
}
"""Game -> words for its actions in gymnasium's order."""
_MARKED = re.compile(r"\x1b\[\d+m(.)\x1b\[0m")


class GymText(Environment):
    """`agent.environment=lockstep.agents.gym_text:GymText`, with the game and its options in the rows' `env_kwargs`.

    The policy sees the state as text and moves by a word. Other text costs a turn and is answered by the words. Rewards are the game's, on
    the turn that earned them; `success` in the info says whether the last reward was more than 0.
    """

    is_quick = True

    def __init__(self, name: str = "FrozenLake-v1", **options: Any) -> None:
        """`options` go to gymnasium.make. Raises ConfigError for a game without words, MissingExtra without gymnasium."""
        try:
            import gymnasium
        except ImportError as error:
            raise MissingExtra(f"the game {name}", "gymnasium", "agents") from error
        game = name.partition("-")[0]
        if game not in _MOVES:
            raise ConfigError(
                f"GymText knows the games {', '.join(_MOVES)}, not {name!r}; write an Environment of your own (docs/agents.md)"
            )
        self._moves = _MOVES[game]
        self._shows_map = game != "Blackjack"
        self._game = gymnasium.make(name, **({"render_mode": "ansi"} if self._shows_map else {}) | options)

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """Return the first state, after the row's prompt if it has one."""
        state, _ = self._game.reset(seed=seed)
        rules = row.get("prompt")
        text = self._text(state)
        return Turn([{"role": "user", "content": f"{rules}\n{text}" if isinstance(rules, str) and rules.strip() else text}])

    def step(self, action: Action) -> Turn:
        """Move by the last of the game's words in the policy's turn."""
        said = re.findall("|".join(self._moves), action.content.lower())
        if not said:
            return Turn([{"role": "user", "content": f"Say one of: {', '.join(self._moves)}."}])
        state, reward, terminated, truncated, _ = self._game.step(self._moves.index(said[-1]))
        done = bool(terminated or truncated)
        info = {"success": int(float(reward) > 0)} if done else {}
        return Turn([] if done else [{"role": "user", "content": self._text(state)}], float(reward), done, info)

    def close(self) -> None:
        """End the game."""
        self._game.close()

    def _text(self, state: Any) -> str:
        if not self._shows_map:
            own, dealer, ace = state
            return f"You have {own}{' with a usable ace' if ace else ''}, the dealer shows {dealer}."
        lines = str(self._game.render()).splitlines()
        return _MARKED.sub(r"[\1]", "\n".join(line for line in lines if line.strip() and not line.strip().startswith("("))).strip()
