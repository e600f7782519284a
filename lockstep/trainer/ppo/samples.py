"""Samples of the model's responses on disk and on the screen. Nothing here is part of a step's result.

- A few for the display and the trackers: `choose_samples`.
- All rows of a batch as text: `write_samples` (trainer.rollout_data_dir, trainer.validation_data_dir).
- Some rows with their numbers by token, for `lockstep report`: `SampleKeeper`, in the run's folder.

```text
samples/train_12.npz   step 12; val_12.npz: the validation after it
  rows      JSON: of each row its prompt and response, reward, failure, finish reason, ...; the text of every token; counts by data source
  lengths   response tokens of the first rows, those whose numbers by token are here
  tokens, mask, log_probs, advantages, ...   these rows' numbers by token, end to end
```
"""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.rewards import Scored
from lockstep.trainer.ppo.stages import token_columns
from lockstep.utils.json_values import as_json

NUM_SHOWN = 8
FOLDER = "samples"
MAX_TOKENS = 32_768
"""Tokens of a step whose numbers are kept: a file is at most about a megabyte."""
_COLUMNS = ("turn", "entropys", "values", "token_level_rewards", "advantages", "returns", "rollout_is_weights")
"""Kept as they are, beside what `_token_columns` makes of log-probs."""
_HALF = float(np.finfo(np.float16).max)


def choose_samples(batch: DataProto, scored: Scored, tokenizer: Any, count: int = NUM_SHOWN) -> list[dict[str, Any]]:
    """Return prompt, response, score (None if missing), number of tokens and ground truth of some rows: the longest, the best, the worst,
    then the first ones."""
    lengths = batch.ragged("responses").lengths.tolist()
    truths = _truths(batch)
    judged = [i for i, failure in enumerate(scored.failures) if failure is None]
    extremes = [max(range(len(batch)), key=lengths.__getitem__)]
    if judged:
        extremes.append(max(judged, key=scored.total.__getitem__))
        extremes.append(min(judged, key=scored.total.__getitem__))
    chosen = list(dict.fromkeys([*extremes, *range(len(batch))]))[:count]
    samples = []
    for i in chosen:
        sample: dict[str, Any] = {
            "prompt": tokenizer.decode(batch.ragged("prompts")[i].tolist(), skip_special_tokens=True),
            "response": tokenizer.decode(batch.ragged("responses")[i].tolist(), skip_special_tokens=True),
            "score": scored.total[i] if i in judged else None,
            "tokens": lengths[i],
            "ground_truth": truths[i],
        }
        samples.append(sample)
    return samples


def share_with_signal(scored: Scored, n: int) -> float:
    """Return the share of prompts whose `n` samples, which lie side by side, differ in score. Missing scores do not count."""
    scores = [None if failure else total for failure, total in zip(scored.failures, scored.total, strict=True)]
    groups = [set(scores[start : start + n]) - {None} for start in range(0, len(scores), n)]
    return sum(len(group) > 1 for group in groups) / max(len(groups), 1)


def write_samples(
    directory: str,
    step: int,
    batch: DataProto,
    info: dict[str, list[Any]],
    tokenizer: Any,
    failures: Sequence[Failure | None] | None = None,
) -> None:
    """Write `{step}.jsonl`: the text, the score and everything the reward function returned (`info`) of each row; no score where
    `failures` has one. A key of `info` that the row has already, such as `step`, becomes `said_step`."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    inputs = _texts_of(batch, "prompts", tokenizer, skip_special_tokens=True)
    outputs = _texts_of(batch, "responses", tokenizer, skip_special_tokens=True)
    scores = [row.sum().item() for row in batch.ragged("token_level_scores").rows()]
    truths = _truths(batch)
    failures = failures or [None] * len(batch)
    lines = []
    for i in range(len(batch)):
        score = scores[i] if failures[i] is None else None
        row = {"step": step, "input": inputs[i], "output": outputs[i], "gts": truths[i], "score": score}
        own = set(row)
        for key, values in info.items():
            if key != "score":
                row[f"said_{key}" if key in own else key] = values[i]
        lines.append(json.dumps(as_json(row), allow_nan=False) + "\n")
    path = Path(directory) / f"{step}.jsonl"
    try:
        path.write_text("".join(lines))
    except OSError as error:  # the error of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _truths(batch: DataProto) -> list[Any]:
    return [(row or {}).get("ground_truth") for row in batch.non_tensor_batch.get("reward_model", [None] * len(batch))]


def _texts_of(batch: DataProto, name: str, tokenizer: Any, **options: bool) -> list[str]:
    texts: list[str] = tokenizer.batch_decode([row.tolist() for row in batch.ragged(name).rows()], **options)
    return texts


@dataclass(frozen=True)
class SampleKeeper:
    """Writes samples into `run_dir`/samples: `num_rows` of each batch (-1: all; 0: none, and no file)."""

    run_dir: Path
    num_rows: int
    tokenizer: Any

    def keep(self, name: str, batch: DataProto, scored: Scored, log_probs: Callable[[DataProto], DataProto] | None = None) -> None:
        """Write or replace `name`.npz. `log_probs` computes old_log_probs under the present policy.

        Warn if the file cannot be written: nothing that is learned depends on it.
        """
        count = self._num_kept(batch)
        if count == 0:
            return
        counts = _counts(batch, scored)
        batch = batch.select_idxs(slice(count))
        scored = scored.select(range(count))
        if log_probs is not None:
            after = log_probs(batch.select(token_columns(batch), []))
            batch.set("new_log_probs", after.ragged("old_log_probs"))
        arrays = _token_columns(batch)
        ids = np.unique(arrays["tokens"]).tolist()
        # From no rows, if every episode is missing, tokenizers make one text.
        vocabulary = dict(zip(ids, self.tokenizer.batch_decode([[i] for i in ids]), strict=True)) if ids else {}
        texts = {"rows": self._texts(batch, scored), "vocabulary": vocabulary, "sources": counts}
        arrays["rows"] = np.frombuffer(json.dumps(as_json(texts), allow_nan=False).encode(), dtype=np.uint8)
        try:
            _write(self.run_dir / FOLDER, name, arrays)
        except OSError as error:
            warnings.warn(f"the samples {name} are not kept for lockstep report: {error}", stacklevel=2)

    def _num_kept(self, batch: DataProto) -> int:
        """The first `num_rows`, and the other samples of the last one's prompt."""
        uids = batch.non_tensor_batch["uid"]
        count = len(batch) if self.num_rows < 0 else min(self.num_rows, len(batch))
        while 0 < count < len(batch) and uids[count] == uids[count - 1]:
            count += 1
        return count

    def _texts(self, batch: DataProto, scored: Scored) -> list[dict[str, Any]]:
        objects = batch.non_tensor_batch
        prompts = _texts_of(batch, "prompts", self.tokenizer)
        responses = _texts_of(batch, "responses", self.tokenizer)
        lengths = batch.ragged("responses").lengths.tolist()
        texts = []
        for i, failure in enumerate(scored.failures):
            row: dict[str, Any] = {
                "prompt": prompts[i],
                "response": responses[i],
                "truth": (objects["reward_model"][i] or {}).get("ground_truth") if "reward_model" in objects else None,
                "source": objects["data_source"][i] if "data_source" in objects else None,
                "group": objects["uid"][i],
                "length": lengths[i],
                "finish": objects["finish_reason"][i] if "finish_reason" in objects else None,
                "reward": None if failure else scored.total[i],
                "failure": f"{failure.kind}: {failure.text}" if failure else None,
            }
            row["said"] = {key: values[i] for key, values in (scored.parts | scored.extra).items() if values[i] is not None}
            if "episode" in row["said"]:  # its messages are the response
                row["said"]["episode"] = {k: v for k, v in row["said"]["episode"].items() if k not in ("messages", "heard")}
            texts.append(row)
        return texts


def _token_columns(batch: DataProto) -> dict[str, np.ndarray]:
    """Numbers by token of the first rows, as many as MAX_TOKENS holds.

    log_probs are computed by the policy before the update, or by the sampler; log_ratio is after minus before the update,
    sampler_log_ratio trainer minus sampler, kl policy minus reference: differences are taken before rounding to float16.
    """
    lengths = batch.ragged("responses").lengths.numpy()
    count = int(np.searchsorted(np.cumsum(lengths), MAX_TOKENS, side="right"))
    total = int(lengths[:count].sum())

    def column(name: str) -> np.ndarray | None:
        return batch.ragged(name).values[:total].float().cpu().numpy() if name in batch else None

    sampler = column("rollout_log_probs")
    old = column("old_log_probs")
    log_probs = sampler if old is None else old
    columns = {name: column(name) for name in _COLUMNS} | {"log_probs": log_probs}
    columns["log_ratio"] = _difference(column("new_log_probs"), log_probs)
    columns["sampler_log_ratio"] = _difference(old, sampler)
    columns["kl"] = _difference(log_probs, column("ref_log_prob"))
    mask = batch.ragged("response_mask").values[:total].cpu().numpy().astype(np.uint8)
    others = _tokens_of_others(mask, lengths[:count])
    for name in ("log_probs", "log_ratio", "sampler_log_ratio", "kl"):
        values = columns[name]
        if values is not None:
            columns[name] = np.where(others, np.nan, values)
    arrays = {name: values.clip(-_HALF, _HALF).astype(np.float16) for name, values in columns.items() if values is not None}
    tokens = batch.ragged("responses").values[:total].cpu().numpy().astype(np.int32)
    return arrays | {"lengths": lengths[:count].astype(np.int32), "tokens": tokens, "mask": mask}


def _difference(after: np.ndarray | None, before: np.ndarray | None) -> np.ndarray | None:
    return None if after is None or before is None else after - before


def _tokens_of_others(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return which tokens the policy did not write: their probability means nothing. A row whose mask is all 0 was left out."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    has_own = np.bincount(rows, weights=mask, minlength=len(lengths)) > 0
    return np.asarray((mask == 0) & has_own[rows])


def _counts(batch: DataProto, scored: Scored) -> dict[str, dict[str, Any]]:
    """Return, by data source, how many rows and prompts have a reward, and whether each is 0 or 1: an interval needs these."""
    sources = batch.non_tensor_batch.get("data_source", ["unknown"] * len(batch))
    found: dict[str, list[tuple[Any, float]]] = {}
    for source, group, reward, failure in zip(sources, batch.non_tensor_batch["uid"], scored.total, scored.failures, strict=True):
        if failure is None:
            found.setdefault(str(source), []).append((group, reward))
    return {
        source: {
            "rows": len(pairs),
            "prompts": len({group for group, _ in pairs}),
            "is_binary": all(reward in (0.0, 1.0) for _, reward in pairs),
        }
        for source, pairs in found.items()
    }


def _write(folder: Path, name: str, arrays: dict[str, np.ndarray]) -> None:
    """The file has its name only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.npz"
    with draft.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    os.replace(draft, folder / f"{name}.npz")
