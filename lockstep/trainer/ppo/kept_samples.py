"""Some samples of a step with their numbers by token, in the run's folder: what `lockstep report` shows.

```text
samples/train_12.npz   step 12; val_12.npz: the validation after it
  rows      JSON: of each row its prompt and response, reward, failure, finish reason, ...; the text of every token; counts by data source
  lengths   response tokens of the first rows, those whose numbers by token are here
  tokens, mask, log_probs, advantages, ...   these rows' numbers by token, end to end
```

Nothing here is part of a step or of its time.
"""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.plain import plain
from lockstep.trainer.ppo.scored import Scored
from lockstep.trainer.ppo.stages import token_columns

FOLDER = "samples"
MAX_TOKENS = 32_768
"""Tokens of a step whose numbers are kept: a file is at most about a megabyte."""
_COLUMNS = ("turn", "entropys", "values", "token_level_rewards", "advantages", "returns", "rollout_is_weights")
"""Kept as they are, beside what `_token_columns` makes of log-probs."""
_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class SampleKeeper:
    """Writes samples into `run_dir`/samples. `num_rows` are kept of each batch (-1: all; 0: none, and no file)."""

    run_dir: Path
    num_rows: int
    tokenizer: Any

    def keep(self, name: str, batch: DataProto, scored: Scored, log_probs: Callable[[DataProto], DataProto] | None = None) -> None:
        """Write `name`.npz; a file of that name is replaced. `log_probs` computes old_log_probs under the policy as it is now.

        A disk that cannot take it is a warning: nothing that is learned depends on it.
        """
        count = self._num_kept(batch)
        if count == 0:
            return
        counts = _counts(batch, scored)
        batch, scored = batch.select_idxs(slice(count)), scored.select(range(count))
        if log_probs is not None:
            after = log_probs(batch.select(token_columns(batch), []))
            batch.set("new_log_probs", after.ragged("old_log_probs"))
        arrays = _token_columns(batch)
        ids = np.unique(arrays["tokens"]).tolist()
        # Of no rows, where every episode is missing, tokenizers make one text.
        vocabulary = dict(zip(ids, self.tokenizer.batch_decode([[i] for i in ids]), strict=True)) if ids else {}
        texts = {"rows": self._texts(batch, scored), "vocabulary": vocabulary, "sources": counts}
        arrays["rows"] = np.frombuffer(json.dumps(plain(texts), allow_nan=False).encode(), dtype=np.uint8)
        try:
            _write(self.run_dir / FOLDER, name, arrays)
        except OSError as error:
            warnings.warn(f"the samples {name} are not kept for lockstep report: {error}", stacklevel=2)

    def _num_kept(self, batch: DataProto) -> int:
        """The first `num_rows`, and the other samples of the last one's prompt."""
        uids, count = batch.non_tensor_batch["uid"], len(batch) if self.num_rows < 0 else min(self.num_rows, len(batch))
        while 0 < count < len(batch) and uids[count] == uids[count - 1]:
            count += 1
        return count

    def _texts(self, batch: DataProto, scored: Scored) -> list[dict[str, Any]]:
        objects = batch.non_tensor_batch
        prompts, responses = (
            self.tokenizer.batch_decode([row.tolist() for row in batch.ragged(name).rows()]) for name in ("prompts", "responses")
        )
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
            if "episode" in row["said"]:  # what was said in it is the response
                row["said"]["episode"] = {k: v for k, v in row["said"]["episode"].items() if k not in ("messages", "heard")}
            texts.append(row)
        return texts


def _token_columns(batch: DataProto) -> dict[str, np.ndarray]:
    """Numbers by token of the first rows, as many as MAX_TOKENS holds.

    log_probs are those under the policy before the update, or the sampler's; log_ratio is after minus before the update,
    sampler_log_ratio trainer minus sampler, kl policy minus reference: differences are taken before they are rounded to float16.
    """
    lengths = batch.ragged("responses").lengths.numpy()
    count = int(np.searchsorted(np.cumsum(lengths), MAX_TOKENS, side="right"))
    total = int(lengths[:count].sum())

    def column(name: str) -> np.ndarray | None:
        return batch.ragged(name).values[:total].float().cpu().numpy() if name in batch else None

    sampler, old = column("rollout_log_probs"), column("old_log_probs")
    log_probs = sampler if old is None else old
    columns = {name: column(name) for name in _COLUMNS} | {"log_probs": log_probs}
    for name, after, before in (
        ("log_ratio", column("new_log_probs"), log_probs),
        ("sampler_log_ratio", old, sampler),
        ("kl", log_probs, column("ref_log_prob")),
    ):
        columns[name] = None if after is None or before is None else after - before
    mask = batch.ragged("response_mask").values[:total].cpu().numpy().astype(np.uint8)
    others = _tokens_of_others(mask, lengths[:count])
    for name in ("log_probs", "log_ratio", "sampler_log_ratio", "kl"):
        if (values := columns[name]) is not None:
            columns[name] = np.where(others, np.nan, values)
    arrays = {name: values.clip(-_HALF, _HALF).astype(np.float16) for name, values in columns.items() if values is not None}
    tokens = batch.ragged("responses").values[:total].cpu().numpy().astype(np.int32)
    return arrays | {"lengths": lengths[:count].astype(np.int32), "tokens": tokens, "mask": mask}


def _tokens_of_others(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Tokens that the policy did not write, of which its probability says nothing; a row whose mask is all 0 was left out, not written."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    has_own = np.bincount(rows, weights=mask, minlength=len(lengths)) > 0
    return np.asarray((mask == 0) & has_own[rows])


def _counts(batch: DataProto, scored: Scored) -> dict[str, dict[str, Any]]:
    """Data source -> how many rows and prompts of it have a reward, and whether each is 0 or 1: what an interval needs to be known of."""
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
