"""From messages to the tokens between two turns of the policy, by the model's chat template (agent.history).

`TurnTemplate` never renders again what the policy sampled. Its tokens after a turn follow from one rule: render a conversation whose last
answer is a sentinel, followed by the new messages and the generation prompt; the text after the token that ends the sentinel's turn follows
any turn. The rule holds only if that text does not depend on earlier turns, so the constructor checks it for the model's template on token
ids, with several histories, kinds of messages and contents.

`ConversationTemplate` renders the whole conversation before each turn. It serves templates that change earlier turns when new turns follow:
they drop their thinking or move the system message. If the new rendering continues the tokens of the row, only the added tokens are
appended, so sampled tokens stay as they are. If not, the policy sees the new rendering from its first token, in a new context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from lockstep.agents.environment import Action, Message, ToolCall
from lockstep.data.conversations import ChatTemplate
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "Sentinel7c1f"
_NEXT = "Next9e2d"
_BEGUN = re.compile(r"<[\w:]*think\w*>\s*(?:</[\w:]*think\w*>\s*)?\Z")
"""Thinking that the generation prompt begins, or marks as empty: it belongs to the answer."""
_CONTENTS = (_NEXT, f" {_NEXT}  with spaces \n", f'{{"{_NEXT}": [1, "é"]}}')
_REMEDY = "; agent.history=template renders the whole conversation before each turn instead"
_TOOLS_TEXT = """You may call these functions, each described by a JSON schema:
{schemas}
To call one, write its name and arguments as JSON between tags, and end your turn:
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""


class TurnTemplate:
    """The tokens of the first prompt and of the messages between turns.

    `tools` are the JSON schemas that the policy is shown. A template without a place for tools gets them as a system message in Hermes'
    form, and their results as messages of the user. `stop_ids` are the tokens that end a turn of the model.
    """

    end_ids: frozenset[int]
    """Tokens that end a turn in the template's text: they must end responses too."""
    has_tools: bool
    """Whether the template has a place for tools and their results."""
    has_several_calls: bool
    """Whether the template takes more than one call in a turn."""
    renders_conversation: bool = False
    """Whether `next_tokens` must see the row. If not, `next_text` is a text to encode, and `after` takes its tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        stop_ids: Set[int] = frozenset(),
    ) -> None:
        """Raise ConfigError if the rule does not hold for the template."""
        if not tokenizer.chat_template:
            raise ConfigError("agents need a tokenizer with a chat template: messages of several turns have no form without one")
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_kwargs)
        self._tools = list(tools) or None
        special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= {token: int(tokenizer.convert_tokens_to_ids(token)) for token in tokenizer.all_special_tokens}  # type: ignore[arg-type]
        self._special = special
        self._pattern = re.compile("|".join(map(re.escape, sorted(filter(None, special), key=len, reverse=True))) or r"(?!)")
        self._stop_ids = stop_ids
        self.has_tools = self._tools is not None and self._takes_tools()
        self._ends: dict[bool, str] = {}
        """Whether the turn has calls -> the token that ends it."""
        self.has_several_calls = True
        self._prepare()
        self.end_ids = frozenset(special[end] for end in self._ends.values())

    def _prepare(self) -> None:
        """Find the tokens that end turns. Raise ConfigError if the rule does not hold for the template."""
        calls = (ToolCall("first", {"a": 1}), ToolCall("second", {}))
        most_calls = 2 if self.has_tools else 0
        for number in range(most_calls + 1):
            try:
                self._check(calls[:number])
            except DataError as error:
                if number < 2:
                    raise ConfigError(f"the chat template of this model cannot carry on a conversation: {error}") from error
                self.has_several_calls = False

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens before the policy's first turn. Raise DataError if the template refuses the messages."""
        return self._encode(self.start_text(messages))

    def next_tokens(self, conversation: Sequence[Message | Action], row: Sequence[int]) -> tuple[list[int], bool]:
        """Return the tokens before the policy's next turn, and whether they start a new context instead of continuing `row`, the tokens of
        the present one. `conversation` has the messages and the policy's turns; its last Action ended the row.

        Raise DataError if the template refuses the messages.
        """
        return self.after(conversation, self._encode(self.next_text(conversation))), False

    def next_text(self, conversation: Sequence[Message | Action]) -> str:
        """Return the text before the policy's next turn: the end of the last turn, the messages after it, and the generation prompt."""
        last = _last_action(conversation)
        action = conversation[last]
        assert isinstance(action, Action)
        return self._following_text([part for part in conversation[last + 1 :] if not isinstance(part, Action)], action.calls)

    def after(self, conversation: Sequence[Message | Action], ids: Sequence[int]) -> list[int]:
        """Return `next_tokens` from the tokens of `next_text`: without the end of the turn, unless the limit of tokens cut the turn."""
        action = conversation[_last_action(conversation)]
        assert isinstance(action, Action)
        end = self.end_of_turn(action.calls)
        assert ids[0] == end, "special tokens are tokens of their own"
        return list(ids) if action.is_cut else list(ids[1:])

    def start_text(self, messages: Sequence[Message]) -> str:
        """Return the text of a whole conversation, up to a turn of the policy. Raise DataError if the template refuses it."""
        shown = self._shown(messages)
        if self._tools is not None and not self.has_tools:
            text = _TOOLS_TEXT.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools))
            if shown and shown[0]["role"] == "system":
                text = f"{shown[0]['content']}\n\n{text}"
                shown = shown[1:]
            shown = [{"role": "system", "content": text}, *shown]
        return self._template.render(shown, self._tools if self.has_tools else None, add_generation_prompt=True)

    def end_of_turn(self, calls: Sequence[ToolCall] = ()) -> int:
        """Return the token that ends a turn with these calls."""
        return self._special[self._ends[bool(calls) and self.has_tools]]

    def following(self, messages: Sequence[Message], calls: Sequence[ToolCall] = ()) -> list[int]:
        """Return the tokens after the token that ended a turn with these calls: the messages and the generation prompt.

        Raise DataError if the template refuses the messages.
        """
        return self._encode(self._following_text(messages, calls))[1:]

    def _following_text(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> str:
        asks = [{"role": "user", "content": "Hello"}]
        return self._tail(asks, messages, calls if self.has_tools else ())

    # -- the rule ----------------------------------------------------------------------------------------------------------

    def _tail(self, history: Sequence[Message], messages: Sequence[Message], calls: Sequence[ToolCall]) -> str:
        """Return the text from the token that ends the sentinel's turn on."""
        end = self._ends[bool(calls)]
        after = self._after_sentinel(history, messages, calls)
        place = after.find(end)
        if place < 0:
            raise DataError(f"the chat template does not end a turn with {end!r} before these messages: {list(messages)!r}"[:500])
        return after[place:]

    def _after_sentinel(self, history: Sequence[Message], messages: Sequence[Message], calls: Sequence[ToolCall]) -> str:
        answer: Message = {"role": "assistant", "content": _SENTINEL}
        if calls:
            answer = call_message([ToolCall(call.name, {"a": _SENTINEL}) for call in calls])
        tools = self._tools if self.has_tools else None
        text = self._template.render([*history, answer, *self._shown(messages)], tools, add_generation_prompt=True)
        place = text.rfind(_SENTINEL)
        if place < 0:
            raise DataError("the chat template leaves out what an answer says")
        return text[place + len(_SENTINEL) :]

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in the template's form: results of tools with the ids of their calls, or as messages of the user."""
        shown = []
        number = 0
        for message in messages:
            if message["role"] != "tool":
                number = 0
                shown.append(message)
            elif self.has_tools:
                shown.append(message | {"tool_call_id": _call_id(number)})
                number += 1
            else:
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                if number:
                    shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n{text}"}
                else:
                    shown.append({"role": "user", "content": text})
                number += 1
        return shown

    # -- the check ---------------------------------------------------------------------------------------------------------

    def _takes_tools(self) -> bool:
        """Return whether the template shows tools and the results of calls."""
        self.has_tools = True
        asks: list[Message] = [{"role": "user", "content": "Hello"}]
        try:
            if self._template.render(asks, self._tools) == self._template.render(asks):
                return False
            results = [{"role": "tool", "name": "first", "content": _NEXT}]
            return _NEXT in self._after_sentinel(asks, results, [ToolCall("first", {"a": 1})])
        except DataError:
            return False
        finally:
            self.has_tools = False

    def _check(self, calls: Sequence[ToolCall]) -> None:
        what = "a result of a tool" if len(calls) == 1 else "results of two tools" if calls else "a message of the user"
        for content in _CONTENTS:
            if calls:
                messages = [{"role": "tool", "name": call.name, "content": content} for call in calls]
            else:
                messages = [{"role": "user", "content": content}]
            tails = []
            for history in _histories():
                try:
                    if bool(calls) not in self._ends:
                        end = self._first_end(self._after_sentinel(history, messages, calls))
                        if end is None:
                            raise ConfigError(
                                f"the chat template of this model has no special token between an answer and {what}{_REMEDY}"
                            )
                        self._ends[bool(calls)] = end
                    tails.append(self._encode(self._tail(history, messages, calls)))
                except DataError as error:  # no system message, or no empty history: others are left
                    refusal = error
            if len(tails) < 2:
                raise refusal
            if any(tail != tails[0] for tail in tails):
                raise ConfigError(
                    f"what the chat template of this model writes for {what} depends on the turns before, so it cannot be put after "
                    f"sampled tokens{_REMEDY}"
                )

    def _first_end(self, after: str) -> str | None:
        """Return the token that ends the sentinel's turn: the first token that the model stops with, else the first special token."""
        tokens = self._pattern.findall(after.partition(_NEXT)[0])
        stops = [token for token in tokens if self._special[token] in self._stop_ids]
        return next(iter(stops or tokens), None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; special tokens in the text count. Encoding many texts at once takes as long as a few."""
        options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(list(texts), **options)["input_ids"]
        return ids

    def _encode(self, text: str) -> list[int]:
        return self.encode([text])[0]


class ConversationTemplate(TurnTemplate):
    """Renders the whole conversation before each turn. Checks nothing: a template that breaks every prefix costs a new context per turn."""

    renders_conversation = True

    def _prepare(self) -> None:
        asks: list[Message] = [{"role": "user", "content": "Hello"}]
        calls = (ToolCall("first", {"a": 1}), ToolCall("second", {}))
        most_calls = 2 if self.has_tools else 0
        for number in range(most_calls + 1):
            answers = [{"role": "tool", "name": call.name, "content": _NEXT} for call in calls[:number]]
            try:
                after = self._after_sentinel(asks, answers or [{"role": "user", "content": _NEXT}], calls[:number])
            except DataError as error:
                if number < 2:
                    raise ConfigError(f"the chat template of this model cannot carry on a conversation: {error}") from error
                self.has_several_calls = False
                continue
            if (end := self._first_end(after)) is not None:
                self._ends.setdefault(bool(number), end)
        begun = _BEGUN.search(self._template.render(asks, add_generation_prompt=True))
        self._begun = begun[0] if begun else ""
        self._special_ids = frozenset(self._special.values())

    def next_tokens(self, conversation: Sequence[Message | Action], row: Sequence[int]) -> tuple[list[int], bool]:
        """See TurnTemplate. The template gets an answer as its text, or without the blanks around it, which some generation prompts leave
        to the policy; if that breaks the prefix or is refused, as content and calls."""
        refusal = None
        whole = None
        for form in (str, str.strip, None):
            try:
                whole = self._encode(self.start_text([self._message(part, form) for part in conversation]))
            except DataError as error:
                refusal = error
                continue
            if (new := self._added(row, whole)) is not None:
                return new, False
        if whole is None:
            assert refusal is not None
            raise refusal
        return whole, True

    def _message(self, part: Message | Action, form: Callable[[str], str] | None) -> Message:
        """Return a message for the template: an answer as text in this form, or as content and calls (None)."""
        if not isinstance(part, Action):
            return part
        if form is not None:
            return {"role": "assistant", "content": self._begun + form(part.text)}
        if part.calls and self.has_tools:
            return call_message(part.calls, self._begun + part.content)
        # A malformed call has no other form than its text.
        return {"role": "assistant", "content": self._begun + (part.text if part.calls or part.faults else part.content)}

    def _added(self, row: Sequence[int], whole: Sequence[int]) -> list[int] | None:
        """Return the tokens of the rendering after the row, or None if it does not begin with the row's text.

        Rows are compared as text: a policy may split a word into other tokens than the tokenizer would. The row ends after the same number
        of special tokens.
        """
        if list(whole[: len(row)]) == list(row):
            return list(whole[len(row) :])
        count = sum(i in self._special_ids for i in row)
        places = [place for place, i in enumerate(whole) if i in self._special_ids]
        ends_with_one = row[-1] in self._special_ids
        if len(places) < count + (not ends_with_one):
            return None
        place = places[count - 1] + 1 if ends_with_one else places[count]
        return list(whole[place:]) if self._text(whole[:place]) == self._text(row) else None

    def _text(self, ids: Sequence[int]) -> str:
        options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))


def _last_action(conversation: Sequence[Message | Action]) -> int:
    return max(i for i, part in enumerate(conversation) if isinstance(part, Action))


def _histories() -> list[list[Message]]:
    asks = {"role": "user", "content": "Hello"}
    says = {"role": "assistant", "content": "Hi there."}
    thinks = says | {"content": "<think>\nHm.\n</think>\n\nHi.", "reasoning_content": "Hm."}
    return [
        [asks],
        [{"role": "system", "content": "Be brief."}, asks],
        [asks, says, {"role": "user", "content": "And now?\n"}],
        [asks, thinks, {"role": "user", "content": "More"}],
    ]


def call_message(calls: Sequence[ToolCall], content: str = "") -> Message:
    """Return an answer with calls in the form of chat templates."""
    told = [
        {"id": _call_id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": told}


def _call_id(number: int) -> str:
    """Nine characters, as Mistral's templates demand."""
    return f"{number:09d}"
