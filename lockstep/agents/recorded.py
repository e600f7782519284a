"""What environments said, on disk: a run writes it, `lockstep replay` plays the episodes again from it, without the environments.

```text
RUN/episodes/12.jsonl.gz   the 12th batch of prompts, an episode a line
  index, sample, seed      which it is
  messages                 the conversation
  heard                    turn by turn: how many of the messages, reward, done, info, faults
  error, retries, ...      see Episode.told
RUN/episodes/kinds.json    what the policy was told of tools, and who judges
```

Sampling depends on keys alone, so the policy says again what it said, and the recorded answers fit.
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
        self._kinds: dict[str, Any] = {}  # those of earlier steps too, which a run that goes on may not see again
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._kinds = json.loads((self._folder / KINDS).read_text())

    def write(self, number: int, episodes: DataProto, prompts: DataProto, kinds: Mapping[str, Any]) -> None:
        """The episodes of batch `number`, and what `recorded_class` needs of each environment, by its name.

        What there is from before, of a step that is done again, is replaced; a second time by this recorder is a second set for the same
        prompts (that of a greedy baseline), and is added.
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
    """Says what was said then, in an episode with the same index, sample and seed."""

    is_quick = True
    file: str

    def __init__(self, **_: Any) -> None:
        """Arguments are those of the environment whose part this plays."""
        self._turns: Iterator[Turn] = iter(())

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """The first messages. An episode whose environment failed fails again, as often."""
        told = _shelf(self.file).take((int(row["index"]), int(row["sample"]), seed))
        self._turns = _turns(told)
        return next(self._turns)

    def step(self, action: Action) -> Turn:
        """The next answer."""
        turn = next(self._turns, None)
        if turn is None:
            raise DataError(f"{self.file}: the episode has more turns than were recorded: the policy is not the one that played it")
        return turn


class _Shelf:
    """The recorded episodes of a file; each is taken once, in the order of the file."""

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
        """Raises as the environment did, as often as it did."""
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
    """The class that plays the part of the environment `name` (None: that of the configuration), from a file of `lockstep replay`.

    Raises DataError where the file has none of that name.
    """
    return _class(file, name or "")


@functools.cache
def _class(file: str, name: str) -> type[Environment]:
    kinds = _shelf(file).kinds
    if name not in kinds:
        raise DataError(f"{file} has no episodes of the environment {name!r}; it has {sorted(kinds)}")
    tools = tuple(Tool(schema["function"]["name"], schema, _uncalled) for schema in kinds[name]["tools"])
    said = {"is_judged": kinds[name]["is_judged"], "shows_prompt": kinds[name].get("shows_prompt", False)}
    return type("Recorded", (RecordedEnvironment,), {"file": file, "tools": tools} | said)


@functools.cache
def _shelf(file: str) -> _Shelf:
    try:
        return _Shelf(file)
    except (OSError, ValueError, LookupError, StopIteration) as error:
        raise DataError(f"agent.recorded={file} cannot be read: {error!r}; lockstep replay writes such a file") from error


def _turns(told: Mapping[str, Any]) -> Iterator[Turn]:
    """The environment's side of a conversation: its messages stand between those of the policy."""
    start = 0
    for heard in told["heard"]:
        end = start + heard["messages"]
        yield Turn(told["messages"][start:end], heard["reward"], heard["done"], heard["info"], heard.get("faults", 0))
        start = end + 1  # the policy's


def _uncalled(**_: Any) -> str:
    raise AssertionError("recorded environments call no tools")
