"""The journal of a step: what was generated and scored, so that workers that are started again need not do it twice.

```text
{run_dir}/journal/batch_12.{fingerprint of weights and settings}/
  generated.{fingerprint of prompts and sampling}     what a batch of prompts was answered with
  scored.{fingerprint of the responses}               what the judges said of that
```

Only runs that may begin again (trainer.max_restarts) keep one. A file is used only where the fingerprints are the present ones, and is
deleted when the step's metrics are written. It is safetensors with its SHA-256 before it: reading one that somebody else wrote runs no
code.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lockstep.config.ppo import PPOConfig
from lockstep.config.resume import kept_values
from lockstep.config.sampling import SamplingParams
from lockstep.observability import metrics as kinds
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.missing_rewards import record_failures
from lockstep.trainer.ppo.scored import Scored

_ABOUT = "about"
_DIGEST = 64
"""Hex digits of SHA-256."""


class Journal:
    """The files. `weights` gives what stands for the policy's present weights; it is asked once per step."""

    def __init__(self, config: PPOConfig, weights: Callable[[], Any], say: Callable[[str], None]) -> None:
        self._folder, self._weights, self._say = config.trainer.run_dir / "journal", weights, say
        kept = kept_values(config)
        self._settings = [kept, _code(kept.values()), torch.__version__]
        self._known: str | None = None
        self._is_told = False

    def read(self, number: int, what: str, *of: Any) -> tuple[DataProto, dict[str, Any]] | None:
        """What was kept of batch `number` as `what`, where it was of the same: columns, and what else. What is damaged, or of other
        weights or settings, is said and deleted."""
        folder, name = self._place(number), f"{what}.{_fingerprint(of)}"
        for other in self._folder.glob(f"batch_{number}.*"):
            if other != folder:
                self._refuse(other, "is of other weights or settings")
        try:
            batch, about = _unpack((folder / name).read_bytes())
            if about["name"] != f"{folder.name}/{name}":
                raise ValueError("it has the name of another one")
            return batch, about["more"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            self._refuse(folder / name, f"is damaged: {error}")
            return None

    def write(self, number: int, what: str, batch: DataProto, more: dict[str, Any], *of: Any) -> None:
        """Keep it. What cannot be written, or would not be read back as it is, is said once, and the run goes on without."""
        folder, name = self._place(number), f"{what}.{_fingerprint(of)}"
        try:
            packed = _pack(batch, {"name": f"{folder.name}/{name}", "more": more})
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "draft").write_bytes(packed)
            (folder / "draft").rename(folder / name)
        except (OSError, TypeError, ValueError) as error:
            if not self._is_told:
                self._say(f"warning: what is generated and scored is not journaled, so a restart does it again: {error}")
            self._is_told = True

    def clear(self, number: int) -> None:
        """Delete what is kept of the batches up to `number`: their step is done, and the weights are others."""
        self._known = None
        for folder in self._folder.glob("batch_*.*"):
            if int(folder.name.split(".")[0].removeprefix("batch_")) <= number:
                shutil.rmtree(folder, ignore_errors=True)

    def _place(self, number: int) -> Path:
        if self._known is None:
            self._known = _fingerprint([self._settings, self._weights()])
        return self._folder / f"batch_{number}.{self._known}"

    def _refuse(self, path: Path, why: str) -> None:
        self._say(f"warning: the journal's {path} {why}; it is not used, and deleted")
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def journaled(rollout: Any, scorer: Any, journal: Journal) -> tuple[Any, Any]:
    """Rollout workers and scorer as a step asks them, with what the journal has in place of doing it again."""
    kind = JournaledEpisodes if hasattr(type(rollout), "reads") else JournaledRollout
    return kind(rollout, journal), JournaledScorer(scorer, journal)


class JournaledRollout:
    """Rollout workers as `stages.generate` asks them. Nobody hears of responses that come from the journal before all are there."""

    def __init__(self, rollout: Any, journal: Journal) -> None:
        self._rollout, self._journal = rollout, journal

    def generate_sequences(self, prompts: DataProto, *, sampling: SamplingParams, step: int, **arguments: Any) -> DataProto:
        """As the workers do it."""
        of = (prompts, dataclasses.asdict(sampling), _code(prompts.non_tensor_batch.get("environment", ())))
        if (kept := self._journal.read(step, "generated", *of)) is not None:
            self._note(kept[0], prompts, step)
            return kept[0]
        found: DataProto = self._rollout.generate_sequences(prompts, sampling=sampling, step=step, **arguments)
        self._journal.write(step, "generated", found, {}, *of)
        return found

    def _note(self, kept: DataProto, prompts: DataProto, step: int) -> None:
        """What is to be done with responses that were not generated."""
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)


class JournaledEpisodes(JournaledRollout):
    """The same of episodes, whose environments may read any column. They are recorded again: a greedy baseline's would replace them."""

    reads = None

    def _note(self, kept: DataProto, prompts: DataProto, step: int) -> None:
        self._rollout.record(kept, prompts, step)


class JournaledScorer:
    """A `Scorer` as a step asks it."""

    def __init__(self, scorer: Any, journal: Journal) -> None:
        self._scorer, self._journal = scorer, journal

    def score(self, batch: DataProto, number: int, scoring: Any = None) -> tuple[Scored, dict[str, Metric]]:
        """See Scorer."""
        before = DataProto(dict(batch.columns), dict(batch.non_tensor_batch), dict(batch.meta_info))
        if (kept := self._journal.read(number, "scored", before)) is not None:
            columns, more = kept
            batch.columns |= columns.columns
            batch.non_tensor_batch |= columns.non_tensor_batch
            batch.meta_info |= columns.meta_info
            failures = [None if failure is None else Failure(**failure) for failure in more["failures"]]
            metrics = {name: getattr(kinds, kind)(*values) for name, (kind, values) in more["metrics"].items()}
            scored = Scored(failures, more["total"], more["extra"], more["parts"])
            if any(failures):  # a resumed run drops the lines of the steps that it does again
                record_failures(self._scorer.run_dir, number, batch, scored, self._scorer.tokenizer)
            return scored, metrics
        scored, metrics = self._scorer.score(batch, number, scoring)
        failed = [None if failure is None else dataclasses.asdict(failure) for failure in scored.failures]
        told = {name: [type(metric).__name__, list(dataclasses.astuple(metric))] for name, metric in metrics.items()}
        more = {"failures": failed, "total": scored.total, "extra": scored.extra, "parts": scored.parts, "metrics": told}
        self._journal.write(number, "scored", _added(before, batch), more, before)
        return scored, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


def _added(before: DataProto, after: DataProto) -> DataProto:
    """The columns and facts that a batch did not have before."""

    def new(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in now.items() if then.get(name) is not value}

    columns, objects = new(before.columns, after.columns), new(before.non_tensor_batch, after.non_tensor_batch)
    return DataProto(columns, objects, new(before.meta_info, after.meta_info))


def _code(values: Iterable[Any]) -> dict[str, str]:
    """The SHA-256 of each file of Python code that a setting names, alone or in a list: rewards, environments, tools."""
    named = [name for value in values for name in (value if isinstance(value, list) else [value])]
    files = {name.split(":")[0] for name in named if isinstance(name, str) and ".py" in name}
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files) if Path(file).is_file()}


def _fingerprint(part: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, part)
    return digest.hexdigest()[:32]


def _add(digest: Any, part: Any) -> None:
    if isinstance(part, DataProto):
        for name, column in sorted(part.columns.items()):
            _add(digest, name)
            for tensor in (column.values, column.lengths) if isinstance(column, Ragged) else (column,):
                _add(digest, tensor)
        _add(digest, {name: list(values) for name, values in part.non_tensor_batch.items()})
    elif isinstance(part, Tensor):
        _add(digest, [str(part.dtype), list(part.shape)])
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(part, tuple):
        for one in part:
            _add(digest, one)
    else:
        digest.update(json.dumps(part, sort_keys=True, default=repr).encode() + b"\0")


def _pack(batch: DataProto, about: dict[str, Any]) -> bytes:
    """Raises TypeError for what JSON does not give back as it was."""
    tensors: dict[str, Tensor] = {}
    for name, column in batch.columns.items():
        parts = {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else {"dense": column}
        tensors |= {f"{part}/{name}": tensor.detach().cpu().contiguous().clone() for part, tensor in parts.items()}
    about = about | {"objects": {name: list(values) for name, values in batch.non_tensor_batch.items()}, "meta": batch.meta_info}
    text = json.dumps(about)
    if repr(json.loads(text)) != repr(about):
        raise TypeError("what an environment or a reward function returned is not of plain numbers, strings, lists and dicts")
    tensors[_ABOUT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    data = save(tensors)
    return hashlib.sha256(data).hexdigest().encode() + data


def _unpack(packed: bytes) -> tuple[DataProto, dict[str, Any]]:
    """Raises ValueError where it is not what was packed."""
    digest, data = packed[:_DIGEST], packed[_DIGEST:]
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise ValueError("its SHA-256 is not the one that it was written with")
    tensors = load(data)
    about = json.loads(bytes(tensors.pop(_ABOUT).numpy()))
    columns: dict[str, Any] = {}
    for key, tensor in tensors.items():
        part, name = key.split("/", 1)
        if part == "dense":
            columns[name] = tensor
        elif part == "values":
            columns[name] = Ragged(tensor, tensors[f"lengths/{name}"])
    return DataProto(columns, about["objects"], about["meta"]), about
