"""The journal of a step: its responses and scores on disk, so that restarted workers need not compute them again.

```text
{run_dir}/journal/batch_12.{fingerprint of weights and settings}/
  generated.{fingerprint of prompts and sampling}     the responses to a batch of prompts
  scored.{fingerprint of the responses}               their scores
```

Only runs that may restart (trainer.max_restarts) keep one. A file is used only if its fingerprints match, and is deleted when the step's
metrics are written. It is safetensors with its SHA-256 before it: reading a file of another user runs no code.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lockstep.config.identity import kept_values
from lockstep.config.ppo import PPOConfig
from lockstep.config.sampling import SamplingParams
from lockstep.observability import metrics as kinds
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.interfaces import Rollout, Scoring
from lockstep.trainer.ppo.rewards import Scored, ScoreStage, record_failures

_ABOUT = "about"
_DIGEST = 64
"""Hex digits of SHA-256."""


class Journal:
    """The files. `weights` returns checksums of the policy's present weights; it is called once per step."""

    def __init__(self, config: PPOConfig, weights: Callable[[], Any], say: Callable[[str], None]) -> None:
        self._folder = config.trainer.run_dir / "journal"
        self._weights = weights
        self._say = say
        settings = kept_values(config)
        self._settings = [settings, _code(settings.values()), torch.__version__]
        self._known: str | None = None
        self._has_warned = False

    def read(self, number: int, what: str, *of: Any) -> tuple[DataProto, dict[str, Any]] | None:
        """Return the entry `what` of batch `number` (columns, and the rest) if its fingerprints match, else None. Delete damaged and
        outdated entries with a warning."""
        folder = self._place(number)
        name = f"{what}.{_fingerprint(of)}"
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
        """Write an entry. Warn once if it cannot be written, or could not be read back as it is."""
        folder = self._place(number)
        name = f"{what}.{_fingerprint(of)}"
        try:
            packed = _pack(batch, {"name": f"{folder.name}/{name}", "more": more})
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "draft").write_bytes(packed)
            (folder / "draft").rename(folder / name)
        except (OSError, TypeError, ValueError) as error:
            if not self._has_warned:
                self._say(f"warning: what is generated and scored is not journaled, so a restart does it again: {error}")
            self._has_warned = True

    def clear(self, number: int) -> None:
        """Delete the entries of the batches up to `number`: their step is done, and the weights have changed."""
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


class JournaledRollout:
    """A `Rollout` that takes responses from the journal. The scoring gets no early notice of them."""

    def __init__(self, rollout: Rollout, journal: Journal) -> None:
        self._rollout = rollout
        self._journal = journal

    @property
    def reads(self) -> Sequence[str] | None:
        """See Rollout."""
        return self._rollout.reads

    def receiving(self, handle: Callable[[Any], None]) -> AbstractContextManager[Any]:
        """See Rollout."""
        return self._rollout.receiving(handle)

    def generate_sequences(self, prompts: DataProto, *, sampling: SamplingParams, step: int, on_finished: Any = None) -> DataProto:
        """See Rollout. Responses from the journal are recorded again: a greedy baseline would have replaced them."""
        of = (prompts, dataclasses.asdict(sampling), _code(prompts.non_tensor_batch.get("environment", ())))
        entry = self._journal.read(step, "generated", *of)
        if entry is not None:
            responses, _ = entry
            self.record(responses, prompts, step)
            return responses
        responses = self._rollout.generate_sequences(prompts, sampling=sampling, step=step, on_finished=on_finished)
        self._journal.write(step, "generated", responses, {}, *of)
        return responses

    def record(self, responses: DataProto, prompts: DataProto, step: int) -> None:
        """See Rollout."""
        self._rollout.record(responses, prompts, step)


class JournaledScorer:
    """A `ScoreStage` that takes scores from the journal. Their failures are recorded in `run_dir` as in the first run."""

    def __init__(self, scorer: ScoreStage, journal: Journal, run_dir: Path, tokenizer: Any) -> None:
        self._scorer = scorer
        self._journal = journal
        self._run_dir = run_dir
        self._tokenizer = tokenizer

    def begin(self, batch: DataProto) -> Scoring | None:
        """See Judge."""
        return self._scorer.begin(batch)

    def score(self, batch: DataProto, number: int, scoring: Scoring | None = None) -> tuple[Scored, dict[str, Metric]]:
        """See Scorer."""
        before = DataProto(dict(batch.columns), dict(batch.non_tensor_batch), dict(batch.meta_info))
        entry = self._journal.read(number, "scored", before)
        if entry is not None:
            columns, more = entry
            batch.columns |= columns.columns
            batch.non_tensor_batch |= columns.non_tensor_batch
            batch.meta_info |= columns.meta_info
            failures = [None if failure is None else Failure(**failure) for failure in more["failures"]]
            metrics = {name: getattr(kinds, kind)(*values) for name, (kind, values) in more["metrics"].items()}
            scored = Scored(failures, more["total"], more["extra"], more["parts"])
            if any(failures):  # a resumed run drops the lines of the steps that it repeats
                record_failures(self._run_dir, number, batch, scored, self._tokenizer)
            return scored, metrics
        scored, metrics = self._scorer.score(batch, number, scoring)
        more = {
            "failures": [None if failure is None else dataclasses.asdict(failure) for failure in scored.failures],
            "total": scored.total,
            "extra": scored.extra,
            "parts": scored.parts,
            "metrics": {name: [type(metric).__name__, list(dataclasses.astuple(metric))] for name, metric in metrics.items()},
        }
        self._journal.write(number, "scored", _added(before, batch), more, before)
        return scored, metrics


def _added(before: DataProto, after: DataProto) -> DataProto:
    """Return the columns and facts that the batch did not have before."""

    def new(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in now.items() if then.get(name) is not value}

    columns = new(before.columns, after.columns)
    objects = new(before.non_tensor_batch, after.non_tensor_batch)
    return DataProto(columns, objects, new(before.meta_info, after.meta_info))


def _code(values: Iterable[Any]) -> dict[str, str]:
    """Return the SHA-256 of each file of Python code that a setting names, alone or in a list: rewards, environments, tools."""
    files = set()
    for value in values:
        names = value if isinstance(value, list) else [value]
        files |= {name.split(":")[0] for name in names if isinstance(name, str) and ".py" in name}
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files) if Path(file).is_file()}


def _fingerprint(part: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, part)
    return digest.hexdigest()[:32]


def _add(digest: Any, part: Any) -> None:
    if isinstance(part, DataProto):
        for name, column in sorted(part.columns.items()):
            _add(digest, name)
            tensors = (column.values, column.lengths) if isinstance(column, Ragged) else (column,)
            for tensor in tensors:
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
    """Raise TypeError for values that JSON would change."""
    tensors: dict[str, Tensor] = {}
    for name, column in batch.columns.items():
        parts = {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else {"dense": column}
        for part, tensor in parts.items():
            tensors[f"{part}/{name}"] = tensor.detach().cpu().contiguous().clone()
    objects = {name: list(values) for name, values in batch.non_tensor_batch.items()}
    about = about | {"objects": objects, "meta": batch.meta_info}
    text = json.dumps(about)
    if repr(json.loads(text)) != repr(about):
        raise TypeError("what an environment or a reward function returned is not of plain numbers, strings, lists and dicts")
    tensors[_ABOUT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    data = save(tensors)
    return hashlib.sha256(data).hexdigest().encode() + data


def _unpack(packed: bytes) -> tuple[DataProto, dict[str, Any]]:
    """Raise ValueError unless the checksum is right."""
    digest = packed[:_DIGEST]
    data = packed[_DIGEST:]
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
