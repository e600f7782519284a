"""What a dataset's own module says, and how it says that a row cannot be used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

SourceRow = Mapping[str, Any]
Message = dict[str, str]

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
REWARD_MODEL = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])


class UnusableRow(Exception):
    """A row that cannot be used; the message is the reason, worded so that rows with the same fault share it."""


@dataclass(frozen=True)
class WrittenRow:
    """A row as it is written, without what is the same for all rows."""

    prompt: list[Message] | None
    """None where the recipe has no such column."""
    columns: dict[str, Any]
    """The recipe's own columns, such as reward_model."""
    extra_info: dict[str, Any]
    data_source: str | None = None
    """None is the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one dataset is read and written."""

    hub_id: str
    """Where the dataset is on the hub; also its `data_source`."""
    ability: str
    about: str = ""
    """What is read, where it is no one dataset."""
    convert: Callable[[SourceRow, str], WrittenRow]
    """A row and the instruction to a WrittenRow; raises UnusableRow."""
    instruction: str = ""
    """What the prompt asks for besides the question: the form of the answer that the reward reads."""
    columns: Mapping[str, pa.DataType]
    extra_info: Mapping[str, pa.DataType]
    """Fields of extra_info besides split and index."""
    secondary: str = r"(?!)"
    """Files with this pattern in their name hold rows a second time, or in another form: used only when there is nothing else."""
    held_out: tuple[str, ...] = ("test", "validation")
    """The split to validate on: the first of these that is there."""
    has_prompt: bool = True
    split_of: Callable[[SourceRow], str | None] | None = None
    """The split that a row of a single file belongs to whose name has none; None: all are for training."""

    @property
    def is_on_hub(self) -> bool:
        """Whether `hub_id` names a dataset on the hub."""
        return "/" in self.hub_id

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file that is written."""
        extra = [("split", pa.string()), ("index", pa.int64()), *self.extra_info.items()]
        return pa.schema(
            {
                "data_source": pa.string(),
                **({"prompt": MESSAGES} if self.has_prompt else {}),
                "ability": pa.string(),
                **self.columns,
                "extra_info": pa.struct(extra),
            }
        )


def text(row: SourceRow, column: str) -> str:
    """The text in a column. Raises UnusableRow when the column is missing, is no text, or is blank."""
    if column not in row:
        raise UnusableRow(f"no column {column!r}")
    value = row[column]
    if not isinstance(value, str):
        raise UnusableRow(f"{column} is {'empty' if value is None else type(value).__name__ + ', not text'}")
    if not value.strip():
        raise UnusableRow(f"{column} is empty")
    return value


def ask(question: str, instruction: str) -> list[Message]:
    """One user message: the question, and after an empty line the instruction, if there is one."""
    return [{"role": "user", "content": f"{question}\n\n{instruction}" if instruction else question}]
