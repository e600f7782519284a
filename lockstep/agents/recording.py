"""Recorded turns of environments: a run writes them, and `lockstep replay` plays the episodes again without the environments.

```text
RUN/episodes/12.jsonl.gz   the 12th batch of prompts, an episode a line
  index, sample, seed      the episode's key
  messages                 the conversation
  heard                    turn by turn: how many of the messages, reward, done, info, faults
  error, retries, ...      see Episode.record
RUN/episodes/kinds.json    the tools that the policy was shown, and whether the reward function judges
```

Sampling depends on keys alone, so the policy repeats its turns and the recorded answers fit.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.agents.environment import Action, Environment, Turn
from lockstep.agents.tools import Tool
from lockstep.errors import DataError
from lockstep.utils.files import named_errors

if TYPE_CHECKING:
    from lockstep.protocol import DataProto

FOLDER = "episodes"
KINDS = "kinds.json"


class Recorder:
    """Writes the episodes of a run's batches into its folder."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._last: int | None = None
        self._kinds: dict[str, Any] = {}  # of earlier steps too, which a resumed run may not see again
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._kinds = json.loads((self._folder / KINDS).read_text())

    def write(self, number: int, episodes: DataProto, prompts: DataProto, kinds: Mapping[str, Any]) -> None:
        """Write the episodes of batch `number`, and what `recorded_class` needs of each environment, by name.

        A file from before, of a step that is repeated, is replaced. A second call for the same batch appends: a greedy baseline plays the
        same prompts again.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        known = self._kinds | json.loads(json.dumps(dict(kinds), default=str))
        if known != self._kinds:
            self._kinds = known
            with named_errors(self._folder / KINDS):
                (self._folder / KINDS).write_text(json.dumps(known, indent=1))
        keys = (prompts.non_tensor_batch[name] for name in ("index", "sample"))
        rows = zip(*keys, episodes.non_tensor_batch["episode"], strict=True)
        path = self._folder / f"{number}.jsonl.gz"
        with named_errors(path), gzip.open(path, "at" if number == self._last else "wt", compresslevel=1) as file:
            for index, sample, told in rows:
                file.write(json.dumps({"index": int(index), "sample": int(sample)} | told, default=str) + "\n")
        self._last = number


class RecordedEnvironment(Environment):
    """Repeats the turns of the recorded episode with the same index, sample and seed."""

    is_quick = True
    file: str

    def __init__(self, **_: Any) -> None:
        """Take any arguments, like the environment that was recorded."""
        self._turns: Iterator[Turn] = iter(())

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """Return the first messages. An episode whose environment failed fails again, as often."""
        told = _store(self.file).take((int(row["index"]), int(row["sample"]), seed))
        self._turns = _turns(told)
        return next(self._turns)

    def step(self, action: Action) -> Turn:
        """Return the next turn."""
        turn = next(self._turns, None)
        if turn is None:
            raise DataError(f"{self.file}: the episode has more turns than were recorded: the policy is not the one that played it")
        return turn


class _Store:
    """The recorded episodes of a file; each is taken once, in the file's order."""

    def __init__(self, file: str) -> None:
        self._left: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
        self._lock = threading.Lock()
        self.kinds: dict[str, Any] = {}
        with open(file) as lines:
            self.kinds = json.loads(next(lines))
            for line in lines:
                told = json.loads(line)
                self._left[told["index"], told["sample"], told["seed"]].append(told)

    def take(self, key: tuple[int, int, int]) -> dict[str, Any]:
        """Return the next episode of a key. Raise as the environment did, as often as it did."""
        with self._lock:
            if not self._left[key]:
                raise DataError(f"no episode was recorded for the prompt {key[0]}, sample {key[1]} with the seed {key[2]}")
            told = self._left[key][0]
            failures = told.setdefault("failures_left", told["retries"] + (told["error"] is not None))
            if failures:
                told["failures_left"] -= 1
                if told["failures_left"] or told["error"] is None:
                    raise RuntimeError(told["error"] or "the environment failed here, and was begun anew")
            self._left[key].pop(0)
            if told["error"] is not None:
                raise RuntimeError(told["error"])
            return told


def recorded_class(file: str, name: str | None) -> type[Environment]:
    """Return the class that repeats the environment `name` (None: the configuration's) from a file of `lockstep replay`.

    Raise DataError if the file has no such environment.
    """
    return _class(file, name or "")


@functools.cache
def _class(file: str, name: str) -> type[Environment]:
    kinds = _store(file).kinds
    if name not in kinds:
        raise DataError(f"{file} has no episodes of the environment {name!r}; it has {sorted(kinds)}")
    tools = tuple(Tool(schema["function"]["name"], schema, _uncalled) for schema in kinds[name]["tools"])
    said = {"is_judged": kinds[name]["is_judged"], "shows_prompt": kinds[name].get("shows_prompt", False)}
    return type("Recorded", (RecordedEnvironment,), {"file": file, "tools": tools} | said)


@functools.cache
def _store(file: str) -> _Store:
    try:
        return _Store(file)
    except (OSError, ValueError, LookupError, StopIteration) as error:
        raise DataError(f"agent.recorded={file} cannot be read: {error!r}; lockstep replay writes such a file") from error


def _turns(told: Mapping[str, Any]) -> Iterator[Turn]:
    """Yield the environment's turns of a conversation: its messages stand between the policy's."""
    start = 0
    for heard in told["heard"]:
        end = start + heard["messages"]
        yield Turn(told["messages"][start:end], heard["reward"], heard["done"], heard["info"], heard.get("faults", 0))
        start = end + 1  # the policy's


def _uncalled(**_: Any) -> str:
    raise AssertionError("recorded environments call no tools")
