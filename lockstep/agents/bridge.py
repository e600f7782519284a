"""Bridge: messages to the tokens that stand between two turns of the policy. What the policy sampled is never rendered again.

The tokens after a turn follow from one rule. Render a conversation whose last answer is a sentinel, and after it the new messages with the
generation prompt; what stands after the token that ends the sentinel's turn is what follows any turn. That holds only where it does not
depend on what came before, so it is proven for the model's own template when the bridge is made: with several histories, kinds of
messages and contents, on token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from lockstep.agents.environment import Action, Message, ToolCall
from lockstep.data.conversations import ChatTemplate
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "Sentinel7c1f"
NEXT = "Next9e2d"
_CONTENTS = (NEXT, f" {NEXT}  with spaces \n", f'{{"{NEXT}": [1, "é"]}}')
_WAY_OUT = "; agent.history=template renders the whole conversation before each turn instead"
_TOOLS_TEXT = """You may call these functions, each described by a JSON schema:
{schemas}
To call one, write its name and arguments as JSON between tags, and end your turn:
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""


class Bridge:
    """The tokens of the first prompt, and those between turns. `tools` are the JSON schemas that the policy is told of.

    A template that has no place for tools gets them as a system message in Hermes' form, and their results as messages of the user.
    `stop_ids` are the tokens that end a turn of the model.
    """

    end_ids: frozenset[int]
    """Tokens that end a turn in the template's own text: they must end responses too."""
    has_tools: bool
    """Whether the template has a place for tools and their results."""
    has_several_calls: bool
    """Whether the template takes more than one call in a turn."""
    renders_anew: bool = False
    """Whether `next_tokens` must see the row; if not, `next_text` says what is to be encoded, and `after` what comes of it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        stop_ids: Set[int] = frozenset(),
    ) -> None:
        """Raises ConfigError, saying what depends on what, where the rule does not hold for the template."""
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
        """Whether calls came before -> the token that ends such a turn."""
        self.has_several_calls = True
        self._prepare()
        self.end_ids = frozenset(special[end] for end in self._ends.values())

    def _prepare(self) -> None:
        """Find the tokens that end turns. Raises ConfigError where the bridge cannot serve the template."""
        calls = (ToolCall("first", {"a": 1}), ToolCall("second", {}))
        for number in range(3 if self.has_tools else 1):
            try:
                self._prove(calls[:number])
            except DataError as error:
                if number < 2:
                    raise ConfigError(f"the chat template of this model cannot carry on a conversation: {error}") from error
                self.has_several_calls = False

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The tokens up to the policy's first turn. Raises DataError when the template refuses the messages."""
        return self._encode(self.start_text(messages))

    def next_tokens(self, said: Sequence[Message | Action], row: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens before the policy's next turn, and whether they are a context of their own instead of going on after `row`, the tokens
        of the present one. `said` is the conversation; its last Action is what ended the row.

        Raises DataError when the template refuses the messages.
        """
        return self.after(said, self._encode(self.next_text(said))), False

    def next_text(self, said: Sequence[Message | Action]) -> str:
        """What is to be encoded before the policy's next turn: the end of the last one, the messages after it, and what begins the next."""
        last = _last_action(said)
        action = said[last]
        assert isinstance(action, Action)
        return self._following_text([part for part in said[last + 1 :] if not isinstance(part, Action)], action.calls)

    def after(self, said: Sequence[Message | Action], ids: Sequence[int]) -> list[int]:
        """`next_tokens` from the tokens of `next_text`: without the end of the turn, unless its limit has cut it."""
        action = said[_last_action(said)]
        assert isinstance(action, Action)
        end = self.end_of_turn(action.calls)
        assert ids[0] == end, "special tokens are tokens of their own"
        return list(ids) if action.is_cut else list(ids[1:])

    def start_text(self, messages: Sequence[Message]) -> str:
        """A whole conversation, up to a turn of the policy, as text. Raises DataError when the template refuses it."""
        shown = self._shown(messages)
        if self._tools is not None and not self.has_tools:
            text = _TOOLS_TEXT.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools))
            if shown and shown[0]["role"] == "system":
                text = f"{shown[0]['content']}\n\n{text}"
                shown = shown[1:]
            shown = [{"role": "system", "content": text}, *shown]
        return self._template.render(shown, self._tools if self.has_tools else None, add_generation_prompt=True)

    def end_of_turn(self, calls: Sequence[ToolCall] = ()) -> int:
        """The token that ends a turn: for one that its limit has cut."""
        return self._special[self._ends[bool(calls) and self.has_tools]]

    def following(self, messages: Sequence[Message], calls: Sequence[ToolCall] = ()) -> list[int]:
        """The tokens after the one that ended a turn with these calls: the messages, and what begins the next turn.

        Raises DataError when the template refuses the messages.
        """
        return self._encode(self._following_text(messages, calls))[1:]

    def _following_text(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> str:
        asks = [{"role": "user", "content": "Hello"}]
        return self._tail(asks, messages, calls if self.has_tools else ())

    # -- the rule ----------------------------------------------------------------------------------------------------------

    def _tail(self, history: Sequence[Message], messages: Sequence[Message], calls: Sequence[ToolCall]) -> str:
        """From the token that ends the sentinel's turn on."""
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
        """The messages as the template takes them: results of tools with the ids of their calls, or as the user's."""
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

    # -- the proof ---------------------------------------------------------------------------------------------------------

    def _takes_tools(self) -> bool:
        """Whether the template shows tools, and the results of calls."""
        self.has_tools = True
        asks: list[Message] = [{"role": "user", "content": "Hello"}]
        try:
            if self._template.render(asks, self._tools) == self._template.render(asks):
                return False
            results = [{"role": "tool", "name": "first", "content": NEXT}]
            return NEXT in self._after_sentinel(asks, results, [ToolCall("first", {"a": 1})])
        except DataError:
            return False
        finally:
            self.has_tools = False

    def _prove(self, calls: Sequence[ToolCall]) -> None:
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
                                f"the chat template of this model has no special token between an answer and {what}{_WAY_OUT}"
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
                    f"sampled tokens{_WAY_OUT}"
                )

    def _first_end(self, after: str) -> str | None:
        """The token that ends the sentinel's turn: the first that the model stops with, or else the first special one."""
        tokens = self._pattern.findall(after.partition(NEXT)[0])
        stops = [token for token in tokens if self._special[token] in self._stop_ids]
        return next(iter(stops or tokens), None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, special ones included where they are written. Many at once take as long as a few."""
        options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(list(texts), **options)["input_ids"]
        return ids

    def _encode(self, text: str) -> list[int]:
        return self.encode([text])[0]


def _last_action(said: Sequence[Message | Action]) -> int:
    return max(i for i, part in enumerate(said) if isinstance(part, Action))


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
    """An answer with calls, as chat templates take it."""
    told = [
        {"id": _call_id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": told}


def _call_id(number: int) -> str:
    """Nine characters: what Mistral's templates insist on."""
    return f"{number:09d}"
