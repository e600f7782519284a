"""Conversations to text, and which characters of it are trained. No files, no batches, no token ids.

A conversation is rendered whole, once. Where a message stands in it follows from rendering the messages before it (with the generation
prompt, if an assistant speaks next: what that supplies is not trained) and the messages up to it. Both must be the start of the whole.
They are not where a template renders a message otherwise when more follow, for example without its thinking. Then the template's own
`{% generation %}` markers decide; without them the conversation is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
"""First character, and the one after the last."""

_REFUSALS = (RecursionError, TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)
"""What a template may raise, its own words and those of the Python that it runs."""
_MARKS = ("train", "weight")
"""Fields of a message that say whether it is trained: ours, and OpenAI's."""
_PROBE = "\ue000"
"""A character that no text has."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class MarkedText:
    """A text and the spans of it that are trained, in order. `is_rendered`: by a template, so it has all its special tokens."""

    text: str
    spans: tuple[Span, ...]
    is_rendered: bool

    def __post_init__(self) -> None:
        try:
            self.text.encode()
        except UnicodeEncodeError as error:  # JSON can spell halves of a character, which no tokenizer takes
            raise DataError(f"the text is not valid Unicode: {error}") from None


def read_messages(value: Any) -> list[Message]:
    """A row's messages as templates expect them. Raises DataError for what is none.

    Fields that are None are left out (Arrow gives every message the fields of all), a message that only calls tools says "", and
    `tool_calls` and their arguments may be JSON text.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"expected a list of messages, got {value!r}")
    return [_read_message(message) for message in value]


def _read_message(given: Any) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise DataError(f"a message must be a dict with role and content, not {given!r}")
    message = {name: field for name, field in given.items() if field is not None}
    if calls := read_json("tool_calls", message.pop("tool_calls", None)):
        if not isinstance(calls, list):
            raise DataError(f"tool_calls must be a list of calls, not {calls!r}")
        message["tool_calls"] = [_read_call(call) for call in calls]
        message.setdefault("content", "")
    if not isinstance(message.get("content"), str | list):
        raise DataError(f"the content of a message must be text or a list of parts, in {given!r}")
    return message


def _read_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool call must have a function with a name, not {call!r}")
    arguments = read_json("arguments", function.get("arguments") or "{}")  # of a tool without any, some clients write ""
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def read_json(name: str, value: Any) -> Any:
    """The value, decoded if it is text. Raises DataError for text that is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}: {value!r}") from error
    except RecursionError:
        raise DataError(f"{name} is nested too deep") from None


def _shown(message: Message) -> Message:
    """What a template sees of a message."""
    return {name: field for name, field in message.items() if name not in _MARKS}


def _shown_as_text(message: Message) -> Message:
    """The same with the arguments of calls as JSON text."""

    def call_as_text(call: Message) -> Message:
        function = call.get("function", call)
        function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return call | {"function": function} if "function" in call else function

    calls = {"tool_calls": [call_as_text(call) for call in message["tool_calls"]]} if "tool_calls" in message else {}
    return _shown(message) | calls


def _shown_as_parts(message: Message) -> Message:
    """The same with the content as a list of one part of text: templates of models that also read images know no other form."""
    content = message["content"]
    return _shown(message) | ({"content": [{"type": "text", "text": content}]} if isinstance(content, str) else {})


def _check_thinking(message: Message, shown: str) -> None:
    """Raises DataError where a message has thinking that the text of it lacks."""
    content = message["content"] if isinstance(message["content"], str) else ""
    thoughts = [message.get(name) for name in ("reasoning_content", "reasoning", "thinking")]
    thoughts += [content.partition("</think>")[0].rpartition("<think>")[2] if "</think>" in content else None]
    for thought in thoughts:
        if isinstance(thought, str) and thought.strip() not in shown:
            raise DataError(
                f"the chat template drops the thinking of a trained message ({thought.strip()[:40]!r}...); take it out of the row, or use "
                "a template (or data.apply_chat_template_kwargs) that shows it",
                key="data.apply_chat_template_kwargs",
            )


def _check_calls(messages: Sequence[Message], shown: str) -> None:
    """Raises DataError where one of the messages calls a tool of which the text says nothing."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call.get("function", call)["name"]
            if name not in shown:
                raise DataError(
                    f"the chat template leaves out the call of the tool {name!r}; write the call into the content of the message, or use "
                    "a template that shows `tool_calls`"
                )


def is_marked_as_trained(message: Message) -> bool | None:
    """Return whether the message says that it is trained (`train`, or OpenAI's `weight`); None if it says nothing.

    Raises DataError for another value than true and false, or 0 and 1, and where the two contradict each other.
    """
    train = message.get("train")
    weight = message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"`train` of a message must be true or false, not {train!r}")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise DataError(f"`weight` of a message must be 0 (not trained) or 1, not {weight!r}")
    if train is not None and weight is not None and train != bool(weight):
        raise DataError(f"a message has train={train} and weight={weight!r}; leave one of them out")
    return bool(weight) if train is None and weight is not None else train


def choose_messages(messages: Sequence[Message], train_on: str, start: int = 0) -> list[bool]:
    """Return which messages are trained: none of those before `start`, and none that says it is not (`is_marked_as_trained`).

    `train_on` "all" trains every character. Raises DataError where a message asks for what `train_on` does not do: with `flag` every
    assistant message must say something, with `all` none may be left out, and otherwise only the assistant's are trained.
    """
    marks = [is_marked_as_trained(message) for message in messages]
    assistant = [message["role"] == "assistant" for message in messages]
    for message, mark, speaks in zip(messages, marks, assistant, strict=True):
        if train_on == "flag":
            if mark is None and speaks:
                raise DataError(
                    f"train_on=flag needs a boolean `train` in every assistant message; there is none in {message!r}",
                    key="data.train_on",
                )
        elif train_on == "all":
            if mark is False:
                raise DataError(
                    f"train_on=all trains every token, but a message is not to be trained: {message!r}; set train_on=assistant",
                    key="data.train_on",
                )
        elif mark and not speaks:
            raise DataError(
                f"only train_on=flag trains a message of {message['role']!r}, and one is to be trained: {message!r}",
                key="data.train_on",
            )
    if train_on == "flag":
        return [bool(mark) for mark in marks]
    if train_on == "all":
        return [True] * len(messages)
    chosen = [speaks and i >= start for i, speaks in enumerate(assistant)]
    if train_on == "last" and any(chosen):
        last = len(chosen) - 1 - chosen[::-1].index(True)
        chosen = [i == last for i in range(len(messages))]
    return [wanted and mark is not False for wanted, mark in zip(chosen, marks, strict=True)]


class ChatTemplate:
    """A tokenizer's chat template. `kwargs` are passed to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | {
            *tokenizer.all_special_tokens
        }
        self._special_tokens = tuple(sorted(filter(None, special), key=len, reverse=True))
        self._special = re.compile("|".join(map(re.escape, self._special_tokens)) or r"(?!)")
        self._forms = [_shown, _shown_as_text, _shown_as_parts]  # a few templates take the arguments of a call as text only
        if tokenizer.chat_template and self._loses_text():
            self._forms = [_shown_as_parts]

    def _loses_text(self) -> bool:
        """Whether the template leaves a text out without a word, unless it comes as a part."""
        probe = [{"role": "user", "content": _PROBE}]
        try:
            return _PROBE not in self.render(probe)
        except DataError:
            return False

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        add_generation_prompt: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of the messages; `more` is passed to the template too. Raises DataError when it refuses them."""
        if not self._tokenizer.chat_template:
            raise DataError(
                "the row has messages, but the tokenizer has no chat template; use a tokenizer that has one, or plain strings"
            )
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt} | self._kwargs | dict(more)
        refusals = []
        for form in self._forms:
            try:
                return str(self._tokenizer.apply_chat_template([form(message) for message in messages], tokenize=False, **options))
            except _REFUSALS as error:
                refusals.append(error)
        raise DataError(f"the tokenizer's chat template refuses the messages: {refusals[0]}") from refusals[0]

    def render_all(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        add_generation_prompt: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """As `render`. Raises DataError also where the template leaves the tools out, or a call of one."""
        text = self.render(messages, tools, add_generation_prompt, more)
        if tools and self._says_without_tools(text, messages, add_generation_prompt, more):
            raise DataError(
                "the chat template leaves the tools out; write them into a system message, or use a template that has a place for `tools`"
            )
        _check_calls(messages, text)
        return text

    def _says_without_tools(
        self, text: str, messages: Sequence[Message], add_generation_prompt: bool, more: Mapping[str, Any]
    ) -> bool:
        try:
            return self.render(messages, None, add_generation_prompt, more) == text
        except DataError:  # a template that cannot do without
            return False

    def mark(self, messages: Sequence[Message], trained: Sequence[bool], tools: Any = None) -> MarkedText:
        """The whole conversation with the spans of the trained messages, each up to its end-of-turn token.

        Raises DataError when the template refuses the messages, or does not say where one of them stands.
        """
        text = self.render_all(messages, tools)
        spans = []
        chosen = [i for i, wanted in enumerate(trained) if wanted]
        for i in chosen:
            span = self._span(text, messages, i, tools)
            if span is None:
                spans = self._marked_spans(text, messages, trained, tools)
                break
            _check_thinking(messages[i], text[slice(*span)])
            spans.append(span)
        for i, span in zip(chosen, spans, strict=True):
            _check_calls([messages[i]], text[slice(*span)])
        return MarkedText(text, tuple(spans), True)

    def _span(self, text: str, messages: Sequence[Message], i: int, tools: Any) -> Span | None:
        """Where message `i` stands in the text; None where the messages before and up to it are not rendered as its start."""
        if messages[i]["content"] == "":
            # What stands around nothing is what stands around a letter: its end cannot be told from a special token before it.
            told = [*messages[:i], messages[i] | {"content": _PROBE}, *messages[i + 1 :]]
            longer = self.render(told, tools)
            span = self._span(longer, told, i, tools) if longer.replace(_PROBE, "", 1) == text else None
            if span is not None:
                return span[0], span[1] - len(_PROBE)
        speaks = messages[i]["role"] == "assistant"
        try:
            before = self._before(text, messages, i, tools)
            after = text if i + 1 == len(messages) else self._start_of(text, self.render(messages[: i + 1], tools))
        except DataError:  # some templates take no list that ends so
            return None
        if not (text.startswith(after) and after.startswith(before)):
            return None
        return (len(before), self._end_of_turn(text, len(before), len(after)) if speaks else len(after))

    def _before(self, text: str, messages: Sequence[Message], i: int, tools: Any) -> str:
        """The text before message `i`, with the words that open it where it is an answer. Raises DataError where that cannot be told."""
        speaks = messages[i]["role"] == "assistant"
        if i > 0:
            before = self.render(messages[:i], tools, add_generation_prompt=speaks)
            return before if speaks else self._start_of(text, before)
        # An empty list is not rendered: a first answer begins where the words stand that open any.
        asked = [{"role": "user", "content": _PROBE}]
        opened = self.render(asked, tools, add_generation_prompt=True)
        opening = opened.removeprefix(self._start_of(opened, self.render(asked, tools)))
        if not speaks or not opening or opening not in text:
            raise DataError("nothing stands before the first message")
        return text[: text.index(opening) + len(opening)]

    def _start_of(self, text: str, rendered: str) -> str:
        """`rendered` without the special tokens and blanks that some templates put after the last message only."""
        while not text.startswith(rendered) and (rendered[-1].isspace() or rendered.endswith(self._special_tokens)):
            last = next((token for token in self._special_tokens if rendered.endswith(token)), rendered[-1])
            rendered = rendered[: -len(last)]
        return rendered

    def _marked_spans(self, text: str, messages: Sequence[Message], trained: Sequence[bool], tools: Any) -> list[Span]:
        """The spans between the template's own markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=tools)
        speaks = [message["role"] == "assistant" for message in messages]
        if not _MARKER.search(template) or any(t and not s for t, s in zip(trained, speaks, strict=True)):
            raise DataError(self._refusal(trained))
        options = {"tools": tools} | self._tokenizer.special_tokens_map | self._kwargs
        shown = [self._forms[0](message) for message in messages]
        rendered: Any = render_jinja_template([shown], chat_template=template, return_assistant_tokens_mask=True, **options)
        texts, found = rendered
        if texts != [text] or len(found[0]) != sum(speaks):
            raise DataError(
                f"the {{% generation %}} markers of the chat template give {len(found[0])} parts for {sum(speaks)} assistant messages"
            )
        positions = [i for i, speaks_here in enumerate(speaks) if speaks_here]
        chosen = [span for i, span in zip(positions, found[0], strict=True) if trained[i]]
        return [(start, self._end_of_turn(text, start, end)) for start, end in chosen]

    def _refusal(self, trained: Sequence[bool]) -> str:
        return (
            f"the chat template of {self._tokenizer.name_or_path or 'the tokenizer'} renders a conversation otherwise when it goes on "
            "(it drops earlier thinking, moves the system message, or its generation prompt has a text that the answer lacks), or does not "
            "say where a first message begins, so what a message became cannot be told"
            + ("; train_on=last trains the last message alone" if sum(trained) > 1 else "")
            + "; a template with {% generation %} markers, or data.apply_chat_template_kwargs, may fix it"
        )

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Where an answer from `start` to `end` is over: after the special token that ends it, without the blanks after that, which the
        model has no part in. Where it has none, the special token that follows at once is what the model stops with.
        """
        tokens = list(self._special.finditer(text, start, end))
        if tokens and not text[tokens[-1].end() : end].strip():
            return tokens[-1].end()
        following = self._special.match(text, end)
        return following.end() if following else end
