"""What the model wrote, as text on disk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.plain import plain
from lockstep.trainer.ppo.scored import Scored

NUM_SHOWN = 8


def choose_samples(batch: DataProto, scored: Scored, tokenizer: Any, count: int = NUM_SHOWN) -> list[dict[str, Any]]:
    """Prompt, response, score (None where it is missing), number of tokens and ground truth of some rows: the longest, the best, the worst,
    then the first ones."""
    lengths, truths = batch.ragged("responses").lengths.tolist(), _truths(batch)
    judged = [i for i, failure in enumerate(scored.failures) if failure is None]
    extremes = [max(range(len(batch)), key=lengths.__getitem__)]
    extremes += [choose(judged, key=scored.total.__getitem__) for choose in (max, min) if judged]
    return [
        {name: tokenizer.decode(batch.ragged(f"{name}s")[i].tolist(), skip_special_tokens=True) for name in ("prompt", "response")}
        | {"score": scored.total[i] if i in judged else None, "tokens": lengths[i], "ground_truth": truths[i]}
        for i in list(dict.fromkeys([*extremes, *range(len(batch))]))[:count]
    ]


def share_with_signal(scored: Scored, n: int) -> float:
    """The share of prompts whose `n` samples, which lie side by side, differ in score. What has no score differs from nothing."""
    scores = [None if failure else total for failure, total in zip(scored.failures, scored.total, strict=True)]
    groups = [{score for score in scores[start : start + n] if score is not None} for start in range(0, len(scores), n)]
    return sum(len(group) > 1 for group in groups) / max(len(groups), 1)


def write_samples(
    directory: str,
    step: int,
    batch: DataProto,
    info: dict[str, list[Any]],
    tokenizer: Any,
    failures: Sequence[Failure | None] | None = None,
) -> None:
    """Write `{step}.jsonl`: the text, the score and everything the reward function said (`info`) of each row; no score where
    `failures` has one. What it said under a name of the row's own, such as `step`, is `said_step`."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    inputs, outputs = (
        tokenizer.batch_decode([row.tolist() for row in batch.ragged(name).rows()], skip_special_tokens=True)
        for name in ("prompts", "responses")
    )
    scores = [row.sum().item() for row in batch.ragged("token_level_scores").rows()]
    truths, failures = _truths(batch), failures or [None] * len(batch)
    lines = []
    for i in range(len(batch)):
        score = scores[i] if failures[i] is None else None
        row = {"step": step, "input": inputs[i], "output": outputs[i], "gts": truths[i], "score": score}
        row |= {f"said_{key}" if key in row else key: values[i] for key, values in info.items() if key != "score"}
        lines.append(json.dumps(plain(row), allow_nan=False) + "\n")
    path = Path(directory) / f"{step}.jsonl"
    try:
        path.write_text("".join(lines))
    except OSError as error:  # that of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _truths(batch: DataProto) -> list[Any]:
    return [(row or {}).get("ground_truth") for row in batch.non_tensor_batch.get("reward_model", [None] * len(batch))]
