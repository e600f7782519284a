"""TemplateBridge: the whole conversation is rendered anew before each turn (agent.history=template).

For templates that write earlier turns otherwise when more follow: without their thinking, with the system message somewhere else. Where the
new rendering goes on from the tokens of the row so far, only what it adds is put after them, so that what was sampled stays as it was
sampled. Where it does not, the policy sees the new rendering from its first token, and the episode goes on in a new context.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.agents.bridge import NEXT, Bridge, call_message
from lockstep.agents.environment import Action, Message, ToolCall
from lockstep.errors import ConfigError, DataError

_BEGUN = re.compile(r"<[\w:]*think\w*>\s*(?:</[\w:]*think\w*>\s*)?\Z")
"""Thinking that the generation prompt begins, or says that there is none of: it belongs to the answer."""


class TemplateBridge(Bridge):
    """See the module. Needs no proof: a template that breaks every prefix costs a new context for every turn, and nothing else."""

    renders_anew = True

    def _prepare(self) -> None:
        asks: list[Message] = [{"role": "user", "content": "Hello"}]
        calls = (ToolCall("first", {"a": 1}), ToolCall("second", {}))
        for number in range(3 if self.has_tools else 1):
            answers = [{"role": "tool", "name": call.name, "content": NEXT} for call in calls[:number]]
            try:
                after = self._after_sentinel(asks, answers or [{"role": "user", "content": NEXT}], calls[:number])
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

    def next_tokens(self, said: Sequence[Message | Action], row: Sequence[int]) -> tuple[list[int], bool]:
        """See Bridge. An answer is shown to the template as the text that it is, or without the blanks around it, which some generation
        prompts leave to the policy; where that breaks the prefix, or is refused, as content and calls."""
        refusal = None
        whole = None
        for form in (str, str.strip, None):
            try:
                whole = self._encode(self.start_text([self._message(part, form) for part in said]))
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
        """What the template sees: an answer as text of this form, or as its parts."""
        if not isinstance(part, Action):
            return part
        if form is not None:
            return {"role": "assistant", "content": self._begun + form(part.text)}
        if part.calls and self.has_tools:
            return call_message(part.calls, self._begun + part.content)
        # What was meant as a call and has no other form stays as it was written.
        return {"role": "assistant", "content": self._begun + (part.text if part.calls or part.faults else part.content)}

    def _added(self, row: Sequence[int], whole: Sequence[int]) -> list[int] | None:
        """What the rendering has after the row; None where it does not begin with the row's text.

        Tokens are compared as text: a policy may cut a word into other tokens than the tokenizer would. The row ends where as many special
        tokens have gone by.
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
