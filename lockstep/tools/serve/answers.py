"""What the engine answered, in the JSON forms of OpenAI's completions and chat completions, whole or as events of a stream."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.tools.serve.protocol import Call
from lockstep.tools.serve.text import ResponseText, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.workers.rollout.request import Completion, Tokens, TopLogProbs

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


class NoAnswer(Exception):
    """The engine could not answer one request."""


@dataclass(frozen=True)
class Scored:
    """Tokens with their log-probs, and those of the most likely tokens at each place (None: not asked for)."""

    ids: list[int]
    log_probs: list[float | None]
    """None where there is none: the first token of a prompt."""
    top: TopLogProbs | None

    @classmethod
    def of(cls, ids: Sequence[int], log_probs: Tensor, top: TopLogProbs | None) -> Scored:
        return cls(list(ids), [value if math.isfinite(value) else None for value in log_probs.tolist()], top)

    def __add__(self, other: Scored) -> Scored:
        top = None if self.top is None or other.top is None else self.top + other.top
        return Scored(self.ids + other.ids, self.log_probs + other.log_probs, top)


class Answers:
    """The answers to one call, of `prompts` as token ids; `texts` are the prompts as text where they were given so."""

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]], model: str, vocabulary: Vocabulary) -> None:
        self._call, self._prompts, self._vocabulary = call, prompts, vocabulary
        kind, prefix = ("chat.completion", "chatcmpl") if call.is_chat else ("text_completion", "cmpl")
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._object = kind
        count = len(prompts) * call.n
        self._growing = [self._text() for _ in range(count)]
        self._num_characters = [0] * count
        """Characters that each answer's log-probs cover by now."""
        self.num_generated = 0

    def _text(self) -> ResponseText:
        return ResponseText(self._vocabulary, self._call.drawing.stop, self._call.skip_special_tokens)

    # -- whole ---------------------------------------------------------------------------------------------------------------------

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The response to the call, with one completion for each answer in order."""
        choices = [self._choice(place, completion) for place, completion in enumerate(completions)]
        return self._head | {"object": self._object, "choices": choices, "usage": self.usage()}

    def _choice(self, place: int, completion: Completion) -> Json:
        call, ids = self._call, completion.ids.tolist()
        if call.drawing.max_tokens == 0:
            ids = []  # the engine always draws one
        self.num_generated += len(ids)
        text = self._text().whole(ids, completion.finish_reason)
        scored = None
        if call.top_log_probs is not None:
            scored = Scored.of(ids, completion.log_probs[: len(ids)], self._top(completion.top_log_probs, len(ids)))
        if call.echo:
            text = self.prompt_text(place) + text
            if scored is not None:
                if completion.prompt_log_probs is None:  # a shorter list would be taken for the whole one
                    raise NoAnswer("this engine gives no log-probs of prompts; serve with --engine native")
                top = self._top(completion.prompt_top_log_probs, len(self._prompt(place)))
                scored = Scored.of(self._prompt(place), completion.prompt_log_probs, top) + scored
        choice: Json = {"index": place, "finish_reason": completion.finish_reason, "logprobs": self._log_probs(place, scored)}
        return choice | ({"message": {"role": "assistant", "content": text}} if call.is_chat else {"text": text})

    # -- as a stream ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[bytes]:
        """The events before the first token."""
        for place in range(len(self._growing)):
            if self._call.is_chat:
                yield self._event([self._piece(place, "", None, None, role="assistant")])
            elif self._call.echo:
                yield self._event([self._piece(place, self.prompt_text(place), None, None)])

    def tokens(self, place: int, tokens: Tokens) -> Iterator[bytes]:
        """The event of new tokens of an answer, if there is something to say by now."""
        if self._call.drawing.max_tokens == 0:
            return
        ids = tokens.ids.tolist()
        self.num_generated += len(ids)
        text = self._growing[place].add(ids)
        scored = None
        if self._call.top_log_probs is not None:
            scored = Scored.of(ids, tokens.log_probs, self._top(tokens.top_log_probs, len(ids)))
        if text or scored is not None:
            yield self._event([self._piece(place, text, self._log_probs(place, scored), None)])

    def end(self, place: int, completion: Completion) -> Iterator[bytes]:
        """The last event of an answer."""
        yield self._event(
            [self._piece(place, self._growing[place].finish(completion.finish_reason), None, completion.finish_reason)]
        )

    def finish(self) -> Iterator[bytes]:
        """The events after all answers."""
        if self._call.include_usage:
            yield self._event([], usage=self.usage())
        yield DONE

    def _event(self, choices: list[Json], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._call.is_chat else self._object
        return event(self._head | {"object": kind, "choices": choices} | more)

    def _piece(self, place: int, text: str, log_probs: Json | None, reason: str | None, role: str | None = None) -> Json:
        piece: Json = {"index": place, "logprobs": log_probs, "finish_reason": reason}
        if not self._call.is_chat:
            return piece | {"text": text}
        delta = {"role": role, "content": text} if role else {"content": text} if text else {}
        return piece | {"delta": delta}

    # -- parts ---------------------------------------------------------------------------------------------------------------------

    def usage(self) -> Json:
        """The tokens that were read and written; a prompt counts once."""
        read = sum(map(len, self._prompts))
        return {"prompt_tokens": read, "completion_tokens": self.num_generated, "total_tokens": read + self.num_generated}

    def _prompt(self, place: int) -> Sequence[int]:
        return self._prompts[place // self._call.n]

    def prompt_text(self, place: int) -> str:
        """The prompt of an answer as it came, or as its tokens read."""
        prompt = self._call.prompts[place // self._call.n]
        return prompt if isinstance(prompt, str) else str(self._vocabulary.tokenizer.decode(prompt))

    def _num_added(self, place: int) -> int:
        """How many tokens the tokenizer put before the prompt, which are not in its text."""
        prompt, ids = self._call.prompts[place // self._call.n], self._prompt(place)
        if not isinstance(prompt, str):
            return 0
        special = set(self._vocabulary.tokenizer.all_special_ids)
        return next(
            (i for i, token in enumerate(ids) if token not in special or prompt.startswith(self._vocabulary.piece(token))), len(ids)
        )

    def _top(self, top: TopLogProbs | None, count: int) -> TopLogProbs | None:
        """Without those that were not asked for: an engine may give one more."""
        return (
            None
            if not self._call.top_log_probs or top is None
            else [
                [(token, value) for token, value in place[: self._call.top_log_probs] if math.isfinite(value)]
                for place in top[:count]
            ]
        )

    def _log_probs(self, place: int, scored: Scored | None) -> Json | None:
        if scored is None:
            return None
        return self._chat_log_probs(scored) if self._call.is_chat else self._plain_log_probs(place, scored)

    def _plain_log_probs(self, place: int, scored: Scored) -> Json:
        names = [self._vocabulary.name(token) for token in scored.ids]
        num_added = self._num_added(place) if self._call.echo and self._num_characters[place] == 0 else 0
        offsets = [0] * num_added
        for token in scored.ids[num_added:]:
            # A token that starts within a character, which another began, stands where that stands.
            starts = [byte & 0xC0 != 0x80 for byte in self._vocabulary.bytes(token)]
            offsets.append(self._num_characters[place] - (0 if not starts or starts[0] else 1))
            self._num_characters[place] += sum(starts)
        top: list[dict[str, float] | None] | None = None
        if scored.top is not None:
            top = []
            for name, log_prob, likely in zip(names, scored.log_probs, scored.top, strict=True):
                named: dict[str, float] = {}
                for token, value in likely:  # of two tokens with one name, the likelier one
                    named.setdefault(self._vocabulary.name(token), value)
                if log_prob is not None:
                    named.setdefault(name, log_prob)
                top.append(named or None)
        return {"tokens": names, "token_logprobs": scored.log_probs, "top_logprobs": top, "text_offset": offsets}

    def _chat_log_probs(self, scored: Scored) -> Json:
        tops = scored.top if scored.top is not None else [[] for _ in scored.ids]
        entries = []
        for token, log_prob, likely in zip(scored.ids, scored.log_probs, tops, strict=True):
            entries.append(self._entry(token, log_prob) | {"top_logprobs": [self._entry(*one) for one in likely]})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, log_prob: float | None) -> Json:
        return {"token": self._vocabulary.piece(token), "logprob": log_prob, "bytes": self._vocabulary.bytes(token)}


def event(data: Json) -> bytes:
    """A server-sent event. Raises ValueError for a number that JSON does not have."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
