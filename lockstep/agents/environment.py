"""What an episode's other side is: the interface that users write."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""role and content, as chat templates take them."""


@dataclass(frozen=True)
class ToolCall:
    """A function that the policy wants called."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """Something in a response that was meant as a call and is none. `text` is for the policy: what was wrong, what is expected."""

    text: str


@dataclass(frozen=True)
class Action:
    """One turn of the policy."""

    text: str
    """The whole response, special tokens included but for the one that ended it."""
    content: str
    """What it says beside its calls, without special tokens."""
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[Fault, ...] = ()
    is_cut: bool = False
    """Whether the limit of tokens ended it."""


@dataclass(slots=True)
class Turn:
    """One turn of the environment."""

    messages: list[Message] = field(default_factory=list)
    """What the policy sees next. After a call: a message with role "tool" for each call, in order."""
    reward: float | None = None
    """For the policy's last turn; None: nothing is said of that turn. `reset` gives none."""
    done: bool = False
    """Whether the episode is over."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers become metrics (their mean over episodes); all of it is in the recorded samples."""
    faults: int = 0
    """How many of the policy's calls could not be made as it wrote them: an unknown tool, wrong arguments, a ToolError."""


class Environment:
    """The other side of one episode; every episode has an object of its own. Methods may be `async`.

    What a policy can be blamed for (a wrong call, a program that fails) is text in the next Turn. An exception is the environment's own
    failure: the episode is begun anew in a fresh object, and left out of training when that fails too. It is never a reward of 0.
    """

    tools: Sequence[Any] = ()
    """What the policy is told of: Python functions, `Tool`s, or names of the class's own methods."""
    is_quick: bool = False
    """Whether its methods return at once whatever the policy says: then it lives in the worker's own process, without one of its own."""
    queue_s: float = 0.0
    """How long a call of one with `is_quick` may wait for its turn, as programs wait for a place in the sandbox; it is given beside
    agent.step_timeout_s."""
    is_judged: bool = False
    """Whether the run's reward function judges the policy's last turn, beside what the environment says of turns."""

    shows_prompt: bool | None = None
    """Whether `reset` begins with the row's prompt, which is then measured with the description of tools before training
    (data.filter_overlong_prompts, data.truncation). None: where the class has no `reset` of its own."""

    def reset(self, row: dict[str, Any], seed: int) -> Turn | Awaitable[Turn]:
        """The first messages, of a row of the data set. All chance must come from `seed`. The default: the row's prompt."""
        prompt = row["prompt"]
        return Turn([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))

    def step(self, action: Action) -> Turn | Awaitable[Turn]:
        """What follows the policy's turn."""
        raise NotImplementedError(f"{type(self).__name__} must have a method step(action) that returns a Turn")

    def close(self) -> Awaitable[None] | None:
        """Give back what the episode held. Called once, however it ended: after a call that is late when that has ended, and only in a
        process that had to be killed, or died, not at all."""
        return None
