"""Prompts of a call as token ids, and a call as requests to the engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.data.conversations import ChatTemplate, read_messages
from lockstep.errors import ConfigError, DataError
from lockstep.tools.serve.fields import BadRequest, shortened
from lockstep.tools.serve.protocol import Call, GivenPrompt
from lockstep.workers.rollout.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptReader:
    """Tokenises for a model of this vocabulary and context. For one thread at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, context: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self.context = context
        longest_token = max(map(len, tokenizer.get_vocab()))
        self.most_characters = None if context is None else context * longest_token
        """A longer text has more tokens than the context holds."""
        self._template = ChatTemplate(tokenizer, {})

    def read(self, name: str, prompt: GivenPrompt, add_special_tokens: bool) -> list[int]:
        """The ids of a prompt, which errors call `name`. Raises BadRequest for one that the model cannot continue."""
        if isinstance(prompt, str):
            if self.most_characters is not None and len(prompt) > self.most_characters:
                raise BadRequest(
                    f"{name} has {len(prompt)} characters; the model's context holds {self.context} tokens, of at most "
                    f"{self.most_characters} characters",
                    "prompt",
                    code="context_length_exceeded",
                )
            prompt = self.encode(prompt, add_special_tokens)
        self._check(name, prompt)
        return prompt

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids)))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, template_kwargs: Mapping[str, Any]) -> str:
        """A conversation as the model's own template writes it, in training too. Raises BadRequest where it has none, or refuses it."""
        if not self._tokenizer.chat_template:
            raise BadRequest("the model has no chat template; use /v1/completions", "messages", code="no_chat_template")
        try:
            return self._template.render_all(read_messages(messages), tools, more=template_kwargs)
        except DataError as error:
            raise BadRequest(str(error), "messages") from error

    def _check(self, name: str, ids: Sequence[int]) -> None:
        if not ids:
            raise BadRequest(f"{name} has no tokens; it needs one or more", "prompt")
        wrong = next((token for token in ids if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise BadRequest(f"{name} has token {shortened(wrong)}; the model knows 0 to {self._vocabulary - 1}", "prompt")
        if self.context is not None and len(ids) >= self.context:
            raise BadRequest(
                f"{name} has {len(ids)} tokens; the model's context holds {self.context}, one of them for the answer",
                "prompt",
                code="context_length_exceeded",
            )


def requests_of(
    call: Call, prompts: Sequence[Sequence[int]], stop_token_ids: tuple[int, ...], context: int | None
) -> list[Request]:
    """A request for each answer: those to the first prompt first. Raises BadRequest for parameters that cannot be sampled with.

    With a seed, what is drawn depends on it, the place in the call and the prompt alone.
    """
    drawing, seed = call.drawing, call.drawing.seed
    longest = context or max(map(len, prompts)) + 4096
    try:
        params = SamplingParams(
            temperature=drawing.temperature,
            top_k=drawing.top_k,
            top_p=drawing.top_p,
            min_p=drawing.min_p,
            repetition_penalty=drawing.repetition_penalty,
            presence_penalty=drawing.presence_penalty,
            frequency_penalty=drawing.frequency_penalty,
            max_tokens=max(1, longest if drawing.max_tokens is None else drawing.max_tokens),
            stop_token_ids=(*(() if drawing.ignore_eos else stop_token_ids), *drawing.stop_token_ids),
            stop=drawing.stop,
            seed=(secrets.randbits(63) if seed is None else seed) & (2**63 - 1),
        )
    except ConfigError as error:
        raise BadRequest(str(error)) from error
    return [
        Request(
            torch.tensor(ids, dtype=torch.int64),
            (0, number, sample),
            sampling=params,
            streams=call.stream,
            top_log_probs=call.top_log_probs or 0,
            prompt_log_probs=call.echo and call.top_log_probs is not None,
        )
        for number, ids in enumerate(prompts)
        for sample in range(call.n)
    ]
