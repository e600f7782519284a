"""Dialogues with a preferred and a rejected answer: Dahoas/full-hh-rlhf, and Anthropic/hh-rlhf, which it is made from.

The first has a prompt that ends with `Assistant:` and the answers apart; the second has whole dialogues in chosen and rejected. Either
becomes a list of messages in one of three forms: `rl` (prompts, scored by a reward model), `sft` (prompt and response), `rm` (prompt,
chosen, rejected).
"""

import itertools
import re
from typing import Any

import pyarrow as pa

from lockstep.data.preprocess.recipe import REWARD_MODEL, Message, Recipe, SourceRow, UnusableRow, WrittenRow, text

_TURN = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def parse_dialogue(dialogue: str) -> list[Message]:
    """The turns of `\\n\\nHuman: ... \\n\\nAssistant: ...` as messages, without blanks around them; the last may be empty.

    Raises UnusableRow unless it begins with Human, the two take turns, and every turn but the last says something.
    """
    before, *turns = _TURN.split(dialogue)
    if before.strip() or not turns or turns[0] != "Human":
        raise UnusableRow("the dialogue does not begin with 'Human:'")
    messages = [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(turns[::2], turns[1::2], strict=True)]
    for message, following in itertools.pairwise(messages):
        if message["role"] == following["role"]:
            raise UnusableRow("Human and Assistant do not take turns")
        if not message["content"]:
            raise UnusableRow("a turn of the dialogue is empty")
    return messages


def _sft(row: SourceRow, _: str) -> WrittenRow:
    prompt, response = _answered(row, "response" if "response" in row else "chosen")
    return WrittenRow(prompt, {"response": response}, {})


def _rl(row: SourceRow, instruction: str) -> WrittenRow:
    answered = _sft(row, instruction)
    return WrittenRow(answered.prompt, {"reward_model": {"style": "model", "ground_truth": answered.columns["response"]}}, {})


def _rm(row: SourceRow, _: str) -> WrittenRow:
    prompt, chosen = _answered(row, "chosen")
    other_prompt, rejected = _answered(row, "rejected")
    if prompt != other_prompt:
        raise UnusableRow("chosen and rejected answer different dialogues")
    if chosen == rejected:
        raise UnusableRow("chosen and rejected are the same")
    return WrittenRow(prompt, {"chosen": chosen, "rejected": rejected}, {})


def _answered(row: SourceRow, column: str) -> tuple[list[Message], str]:
    """The messages before an answer, and the answer."""
    if "prompt" in row:
        *messages, last = parse_dialogue(text(row, "prompt"))
        if last["role"] != "assistant" or last["content"]:
            raise UnusableRow("the prompt does not end with 'Assistant:'")
        answer = text(row, column).strip()
        if _TURN.search("\n\n" + answer):
            raise UnusableRow(f"{column} has a turn of another speaker in it")
        return messages, answer
    *messages, last = parse_dialogue(text(row, column))
    if last["role"] != "assistant" or not last["content"]:
        raise UnusableRow(f"{column} does not end with an answer")
    return messages, last["content"]


def _recipe(convert: Any, **columns: pa.DataType) -> Recipe:
    return Recipe(hub_id="Dahoas/full-hh-rlhf", ability="alignment", convert=convert, columns=columns, extra_info={})


RECIPES = {
    "rl": _recipe(_rl, reward_model=REWARD_MODEL),
    "sft": _recipe(_sft, response=pa.string()),
    "rm": _recipe(_rm, chosen=pa.string(), rejected=pa.string()),
}
