"""Files of prompts as questions: the rows that PPO would validate on."""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.config.ppo import PPOConfig
from lockstep.data.row_files import RowFiles, choose_rows
from lockstep.errors import DataError
from lockstep.tools.evaluate.question import Question, digest
from lockstep.trainer.ppo.prompts import open_dataset

_UNNAMED = "unknown"
"""The source of rows that name none, as in validation."""


def data_questions(config: PPOConfig, files: Any, tokenizer: Any, limit: int | None) -> tuple[list[Question], dict[str, Any]]:
    """The rows that PPO would validate on, the first `limit` of them, and how they are asked.

    With a tokenizer they are what PPO's dataset makes of them: lengths, truncation and filter as the config says. A server (None) has its
    own template and limits. Raises DataError for files or rows that cannot be used.
    """
    data = config.data
    paths = [files] if isinstance(files, str) else list(files)
    items: Iterable[Mapping[str, Any]]
    if tokenizer is not None:
        dataset = open_dataset(config, tokenizer, paths, data.val_max_samples)
        items = [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]
    else:
        rows = RowFiles(paths)
        if data.prompt_key not in rows.columns:
            raise DataError(
                f"no column {data.prompt_key!r} in {paths}: the columns are {sorted(rows.columns)}; set data.prompt_key"
            )
        chosen = choose_rows(len(rows), data.val_max_samples, data.shuffle, config.data_seed)[:limit].tolist()
        items = [row | {"raw_prompt": row[data.prompt_key], "index": i} for i, row in zip(chosen, rows.rows(chosen), strict=True)]
    questions = [_question(item) for item in items]
    if not questions:
        raise DataError(f"no rows in {paths}")
    template = {"files": paths, "form": "chat", "template_kwargs": dict(data.apply_chat_template_kwargs)}
    return questions, template | {"hash": digest([template["form"], template["template_kwargs"]])}


def _question(item: Mapping[str, Any]) -> Question:
    prompt = item["raw_prompt"]
    ids = item.get("prompt_ids")
    said = (
        prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content")) for turn in prompt if turn.get("role") == "user")
    )
    columns = {name: item.get(name) for name in ("data_source", "reward_model", "extra_info")}
    source = str(item.get("data_source") or _UNNAMED)
    return Question(source, said, prompt, False, columns, int(item.get("index", 0)), None if ids is None else tuple(ids))
