"""Dialogues with a preferred and a rejected answer: Dahoas/full-hh-rlhf, Anthropic/hh-rlhf, which it is made from, and those like
UltraFeedback.

The first has a prompt that ends with `Assistant:` and the answers apart; the second has whole dialogues in chosen and rejected, the
third has them as messages. Each becomes a list of messages in one of three forms: `rl` (prompts, scored by a reward model), `sft`
(prompt and response), `rm` (prompt, chosen, rejected).
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
    if isinstance(row.get(column), list):
        *messages, last = [{"role": text(message, "role"), "content": text(message, "content")} for message in row[column] or [{}]]
        if last["role"] != "assistant" or not messages:
            raise UnusableRow(f"{column} is not a dialogue that ends with an answer")
        return messages, last["content"]
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


def _recipes(hub_id: str, secondary: str) -> dict[str, Recipe]:
    def recipe(convert: Any, **columns: pa.DataType) -> Recipe:
        return Recipe(hub_id=hub_id, ability="alignment", convert=convert, columns=columns, extra_info={}, secondary=secondary)

    return {
        "rl": recipe(_rl, reward_model=REWARD_MODEL),
        "sft": recipe(_sft, response=pa.string()),
        "rm": recipe(_rm, chosen=pa.string(), rejected=pa.string()),
    }


RECIPES = _recipes("Dahoas/full-hh-rlhf", secondary=r"(?!)")
ULTRAFEEDBACK = _recipes("HuggingFaceH4/ultrafeedback_binarized", secondary=r"_(sft|gen)-")
"""Its files for supervised training and generation hold the same rows in another order."""
