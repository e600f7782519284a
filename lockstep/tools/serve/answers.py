"""Answers in OpenAI's forms from the engine's completions, whole or as the events of a stream."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.tools.serve.schema import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogProbs,
    ChatPiece,
    ChatRequest,
    ChatTokenLogProb,
    CompletionRequest,
    Delta,
    NoAnswer,
    TextChoice,
    TextCompletion,
    TextLogProbs,
    TokenLogProb,
    Usage,
)
from lockstep.tools.serve.text import ResponseText, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.workers.rollout.request import Completion, Tokens, TopLogProbs

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


@dataclass(frozen=True)
class Scored:
    """Tokens with their log-probs, and those of the most likely tokens at each place (None: not asked for)."""

    ids: list[int]
    log_probs: list[float | None]
    """None where there is none: the first token of a prompt."""
    top: TopLogProbs | None

    def __add__(self, other: Scored) -> Scored:
        top = None if self.top is None or other.top is None else self.top + other.top
        return Scored(self.ids + other.ids, self.log_probs + other.log_probs, top)


class Answers:
    """The answers to one call, whose prompts are `prompts` as token ids. `place` counts the answers: those to the first prompt first."""

    def __init__(
        self, call: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], model: str, vocabulary: Vocabulary
    ) -> None:
        self._call = call
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._is_chat = isinstance(call, ChatRequest)
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head: dict[str, Any] = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._growing = [ResponseText(vocabulary, call.stop, call.skip_special_tokens) for _ in range(call.num_answers)]
        self._num_characters = [0] * call.num_answers
        """Characters that each answer's log-probs cover by now."""
        self.num_generated = 0

    # -- whole ---------------------------------------------------------------------------------------------------------------------

    def choice(self, place: int, completion: Completion) -> TextChoice | ChatChoice:
        """One answer. Raises NoAnswer if the engine left out log-probs that were asked for."""
        call = self._call
        ids = completion.ids.tolist() if call.max_generated != 0 else []  # the engine always draws one
        self.num_generated += len(ids)
        text = self._growing[place].whole(ids, completion.finish_reason)
        scored = None
        if call.num_top is not None:
            scored = self._scored(ids, completion.log_probs[: len(ids)], completion.top_log_probs)
        if call.echo:
            text = self._prompt_text(place) + text
            if scored is not None:
                if completion.prompt_log_probs is None:  # a shorter list would be taken for the whole one
                    raise NoAnswer("this engine gives no log-probs of prompts; serve with --engine native")
                prompt = list(self._prompts[place // call.n])
                scored = self._scored(prompt, completion.prompt_log_probs, completion.prompt_top_log_probs) + scored
        reason = completion.finish_reason
        if self._is_chat:
            message = AnswerMessage(role="assistant", content=text)
            return ChatChoice(index=place, message=message, logprobs=self._chat_log_probs(scored), finish_reason=reason)
        return TextChoice(index=place, text=text, logprobs=self._text_log_probs(place, scored), finish_reason=reason)

    def whole(self, choices: list[Any]) -> TextCompletion | ChatCompletion:
        """The answer to the call, of all its choices."""
        if self._is_chat:
            return ChatCompletion(**self._head, object="chat.completion", choices=choices, usage=self.usage())
        return TextCompletion(**self._head, object="text_completion", choices=choices, usage=self.usage())

    # -- as a stream ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[bytes]:
        """The events before the first token."""
        for place in range(self._call.num_answers):
            if self._is_chat:
                yield self._event(
                    [ChatPiece(index=place, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None)]
                )
            elif self._call.echo:
                yield self._event([self._piece(place, self._prompt_text(place))])

    def tokens(self, place: int, tokens: Tokens) -> Iterator[bytes]:
        """The event of new tokens of an answer, if there is something to say by now."""
        if self._call.max_generated == 0:
            return
        ids = tokens.ids.tolist()
        self.num_generated += len(ids)
        text = self._growing[place].add(ids)
        scored = None
        if self._call.num_top is not None:
            scored = self._scored(ids, tokens.log_probs, tokens.top_log_probs)
        if text or scored is not None:
            yield self._event([self._piece(place, text, scored)])

    def end(self, place: int, completion: Completion) -> Iterator[bytes]:
        """The last event of an answer."""
        text = self._growing[place].finish(completion.finish_reason)
        yield self._event([self._piece(place, text, finish_reason=completion.finish_reason)])

    def finish(self) -> Iterator[bytes]:
        """The events after all answers."""
        if self._call.includes_usage:
            yield self._event([], usage=self.usage())
        yield DONE

    def _piece(
        self, place: int, text: str, scored: Scored | None = None, finish_reason: str | None = None
    ) -> TextChoice | ChatPiece:
        if self._is_chat:
            delta = Delta(content=text) if text else Delta()
            return ChatPiece(index=place, delta=delta, logprobs=self._chat_log_probs(scored), finish_reason=finish_reason)
        return TextChoice(index=place, text=text, logprobs=self._text_log_probs(place, scored), finish_reason=finish_reason)

    def _event(self, choices: list[Any], **more: Any) -> bytes:
        event: TextCompletion | ChatChunk
        if self._is_chat:
            event = ChatChunk(**self._head, object="chat.completion.chunk", choices=choices, **more)
        else:
            event = TextCompletion(**self._head, object="text_completion", choices=choices, **more)
        return b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"

    # -- parts ---------------------------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """The tokens that were read and written by now."""
        num_read = sum(map(len, self._prompts))
        return Usage(prompt_tokens=num_read, completion_tokens=self.num_generated, total_tokens=num_read + self.num_generated)

    def _given_prompt(self, place: int) -> str | list[int]:
        assert isinstance(self._call, CompletionRequest), "only these are echoed"
        return self._call.prompt[place // self._call.n]

    def _prompt_text(self, place: int) -> str:
        """The prompt of an answer as it came, or as its tokens read."""
        prompt = self._given_prompt(place)
        return prompt if isinstance(prompt, str) else str(self._vocabulary.tokenizer.decode(prompt))

    def _num_added(self, place: int) -> int:
        """How many tokens the tokenizer put before the prompt, which are not in its text."""
        prompt = self._given_prompt(place)
        if not isinstance(prompt, str):
            return 0
        ids = self._prompts[place // self._call.n]
        special = set(self._vocabulary.tokenizer.all_special_ids)
        for index, token in enumerate(ids):
            if token not in special or prompt.startswith(self._vocabulary.piece(token)):
                return index
        return len(ids)

    def _scored(self, ids: list[int], log_probs: Tensor, top: TopLogProbs | None) -> Scored:
        """Leave out what was not asked for, since an engine may give more likely tokens, and numbers that are not finite."""
        finite = [value if math.isfinite(value) else None for value in log_probs.tolist()]
        num_top = self._call.num_top
        if not num_top or top is None:
            return Scored(ids, finite, None)
        shown = [[(token, value) for token, value in likely[:num_top] if math.isfinite(value)] for likely in top[: len(ids)]]
        return Scored(ids, finite, shown)

    def _text_log_probs(self, place: int, scored: Scored | None) -> TextLogProbs | None:
        if scored is None:
            return None
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
        return TextLogProbs(tokens=names, token_logprobs=scored.log_probs, top_logprobs=top, text_offset=offsets)

    def _chat_log_probs(self, scored: Scored | None) -> ChatLogProbs | None:
        if scored is None:
            return None
        top = scored.top if scored.top is not None else [[] for _ in scored.ids]
        content = []
        for token, log_prob, likely in zip(scored.ids, scored.log_probs, top, strict=True):
            most_likely = [TokenLogProb(**self._token(*one)) for one in likely]
            content.append(ChatTokenLogProb(**self._token(token, log_prob), top_logprobs=most_likely))
        return ChatLogProbs(content=content, refusal=None)

    def _token(self, token: int, log_prob: float | None) -> dict[str, Any]:
        return {"token": self._vocabulary.piece(token), "logprob": log_prob, "bytes": self._vocabulary.bytes(token)}


def error_event(body: dict[str, Any]) -> bytes:
    """The last event of a stream in which something went wrong."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
