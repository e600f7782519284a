"""Math with a Python tool over several turns: GSM8K as an environment."""

from typing import Any

from lockstep.agents.environment import Action, Turn
from lockstep.agents.shipped_tools import SANDBOX_QUEUE_S, python
from lockstep.agents.tools import ToolEnvironment
from lockstep.errors import DataError
from lockstep.rewards.graders import default_compute_score


class MathTurns(ToolEnvironment):
    """`agent.environment=lockstep.agents.math_turns:MathTurns`, with rows as `lockstep preprocess gsm8k` writes them.

    The policy may run programs. A turn without a call is an answer, which the rule of the row's data_source grades. After a wrong answer
    the policy may try again, `attempts` times in all. A right answer earns 1 / its number. `right` in the info says whether the last answer
    was right.
    """

    is_judged = False
    is_quick = True
    shows_prompt = True
    queue_s = SANDBOX_QUEUE_S
    tools = (python,)

    def __init__(self, tools: Any = (), attempts: int = 2) -> None:
        super().__init__(tools)
        self._left = self._attempts = attempts

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """Return the question."""
        truth = (row.get("reward_model") or {}).get("ground_truth")
        if truth is None:
            raise DataError("MathTurns needs rows with reward_model.ground_truth, as lockstep preprocess gsm8k writes them")
        self._source = row["data_source"]
        self._truth = truth
        turn = super().reset(row, seed)
        assert isinstance(turn, Turn)
        return turn

    def step(self, action: Action) -> Turn:
        """Return the result of a program, or the reward of an answer."""
        if action.calls or action.faults:
            turn = super().step(action)
            assert isinstance(turn, Turn)
            return turn
        judged = default_compute_score(self._source, action.content, self._truth)
        score = float(judged["score"] if isinstance(judged, dict) else judged)
        number = self._attempts - self._left + 1
        self._left = self._left - 1
        info = {"right": int(score > 0), "attempts": number}
        if score > 0 or not self._left:
            return Turn(reward=score / number, done=True, info=info)
        return Turn([{"role": "user", "content": "That is not right. Check it with a program and answer again."}], 0.0, info=info)
