"""What is asked, and what was answered."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.encoder import ChatPrompt
from lockstep.data.tag import Tag


@dataclass(frozen=True)
class Question:
    """One question, as a model is asked it and as its answers are judged."""

    source: str
    """Its data_source, or the name of its task: what numbers are summed up by."""
    text: str
    """The question alone, without examples before it: what it is known by, and what is looked for in training data."""
    prompt: ChatPrompt
    """Messages for the chat template, or a text."""
    is_plain: bool
    """Whether the prompt is a text that goes to the model as it is."""
    columns: dict[str, Any]
    """data_source, reward_model and extra_info, as a reward reads them."""
    index: int = 0
    """Its number in its files, which random numbers depend on."""
    prompt_ids: tuple[int, ...] | None = None
    """Where they are known already."""
    choices: tuple[str, ...] = ()
    """Continuations of the prompt of which the likeliest is the answer; empty where the answer is written."""

    @property
    def tag(self) -> Tag:
        """What its row says about its judges."""
        return Tag.of(self.columns.get("data_source"), self.columns.get("reward_model"))

    @property
    def hash(self) -> str:
        """Names the question in result files: the same for the same text and truth, whatever the template."""
        truth = (self.columns.get("reward_model") or {}).get("ground_truth")
        return digest([self.source, self.text, truth])


@dataclass(slots=True)
class Sample:
    """One answer to one question."""

    question: int
    """The question's number."""
    number: int
    """Which of its samples."""
    text: str = ""
    finish_reason: str = "stop"
    """"stop", "length" or "error"."""
    num_tokens: int | None = None
    """None where a server does not say."""
    failure: str | None = None
    """Why it has no scores."""
    scores: dict[str, float] = field(default_factory=dict)
    preds: dict[str, str] = field(default_factory=dict)
    """Name of a score, or "*" for all -> the answer that it judged, for the majority."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is known of it."""


def digest(value: Any) -> str:
    """16 hex digits of anything that JSON can spell."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
