"""Which rows of the data are tried: some of every data_source."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.data.tag import Tag

_MAX_VISITED = 20_000
"""Rows that are read in search of a rare data_source."""


@dataclass(frozen=True)
class TriedRow:
    """One row of the data, as a reward sees it."""

    split: str
    """"train" or "val"."""
    position: int
    """Its place in the dataset of that split."""
    index: int
    """Its number in the files."""
    data_source: str | None
    prompt: str
    ground_truth: Any
    extra_info: Any
    test_cases: Any
    tag: Tag

    @classmethod
    def of(cls, split: str, position: int, item: Mapping[str, Any]) -> TriedRow:
        """The row of an item of RLHFDataset."""
        reward_model = item.get("reward_model") or {}
        ground_truth = reward_model.get("ground_truth")
        return cls(
            split=split,
            position=position,
            index=item.get("index", position),
            data_source=item.get("data_source"),
            prompt=_as_text(item.get("raw_prompt", "")),
            ground_truth=ground_truth,
            extra_info=item.get("extra_info"),
            test_cases=reward_model.get("test_cases") or ground_truth,
            tag=Tag.of(item.get("data_source"), reward_model),
        )


def choose_rows(datasets: Mapping[str, Any], num_rows: int, num_sources: int, seed: int) -> list[TriedRow]:
    """At most `num_rows` rows of all splits, as evenly over the data_sources as these allow, drawn by `seed`.

    Rows are read in a random order until each of the `num_sources` data_sources has its share, or 20,000 were read. They come back
    grouped by data_source.
    """
    places = [(split, position) for split, dataset in datasets.items() for position in range(len(dataset))]
    random.Random(seed).shuffle(places)
    share = -(-num_rows // max(num_sources, 1))
    found: dict[str | None, list[TriedRow]] = {}
    for split, position in places[: max(_MAX_VISITED, num_rows)]:
        row = TriedRow.of(split, position, datasets[split][position])
        found.setdefault(row.data_source, []).append(row)
        if sum(len(rows) >= share for rows in found.values()) >= num_sources:
            break
    turns = itertools.chain.from_iterable(itertools.zip_longest(*found.values()))
    chosen = list(filter(None, turns))[:num_rows]
    return sorted(chosen, key=lambda row: list(found).index(row.data_source))


def _as_text(prompt: Any) -> str:
    """A prompt as the text that a response could echo."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)
