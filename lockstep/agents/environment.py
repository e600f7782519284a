"""The interface between the policy and the other side of an episode: what users write."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""role and content, in the form of chat templates."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """A malformed call in a response. `text` tells the policy what was wrong and what is expected."""

    text: str


@dataclass(frozen=True)
class Action:
    """One turn of the policy."""

    text: str
    """The whole response with its special tokens, except the token that ended it."""
    content: str
    """The text beside the calls, without special tokens."""
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[Fault, ...] = ()
    is_cut: bool = False
    """Whether the limit of tokens ended the turn."""


@dataclass(slots=True)
class Turn:
    """One turn of the environment."""

    messages: list[Message] = field(default_factory=list)
    """The messages that the policy sees next. After calls: a message with role "tool" for each call, in order."""
    reward: float | None = None
    """Reward of the policy's last turn; None if that turn has no reward. `reset` returns None."""
    done: bool = False
    """Whether the episode is over."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers become metrics (their mean over episodes); all entries are in the recorded samples."""
    faults: int = 0
    """How many of the policy's calls failed as written: an unknown tool, wrong arguments, a ToolError."""


class Environment:
    """The other side of one episode; every episode has an object of its own. Methods may be `async`.

    A mistake of the policy (a wrong call, a failing program) is text in the next Turn. An exception is a failure of the environment: the
    episode restarts with a new object, and is left out of training if that fails too. It never becomes a reward of 0.
    """

    tools: Sequence[Any] = ()
    """The tools that the policy is shown: Python functions, `Tool`s, or names of the class's methods."""
    is_quick: bool = False
    """Whether its methods always return at once. The environment then lives in the worker's process instead of a process of its own."""
    queue_s: float = 0.0
    """How long a call of an environment with `is_quick` may wait for its turn, as programs wait for a place in the sandbox. Added to
    agent.step_timeout_s."""
    is_judged: bool = False
    """Whether the run's reward function judges the policy's last turn, in addition to the rewards of turns."""
    shows_prompt: bool | None = None
    """Whether `reset` starts with the row's prompt. The prompt is then measured with the description of tools before training
    (data.filter_overlong_prompts, data.truncation). None: yes, if the class does not define `reset`."""

    def reset(self, row: dict[str, Any], seed: int) -> Turn | Awaitable[Turn]:
        """Return the first messages for a row of the data set; by default the row's prompt. Randomness must come from `seed` only."""
        prompt = row["prompt"]
        return Turn([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))

    def step(self, action: Action) -> Turn | Awaitable[Turn]:
        """Return the environment's answer to the policy's turn."""
        raise NotImplementedError(f"{type(self).__name__} must have a method step(action) that returns a Turn")

    def close(self) -> Awaitable[None] | None:
        """Release the episode's resources. Called once, however the episode ended; after a late call, when that has returned. Not called if
        the environment's process was killed or died."""
        return None
