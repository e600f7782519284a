"""Some responses with their scores, to be read while a run goes on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.protocol import DataProto
from lockstep.utils.printable import say


def print_examples(
    data: DataProto,
    answer: Mapping[str, Any],
    sources: Sequence[Any],
    reward_models: Sequence[Any],
    decode: Callable[[Tensor], str],
    count: int,
) -> None:
    """Print `count` rows of each data source. `answer` is what `RewardManager` returns as a dict."""
    printed: Counter[Any] = Counter()
    sums = [row.sum().item() for row in answer["reward_tensor"].rows()]
    scores = answer["reward_extra_info"].get("score", sums)
    for i, (source, reward_model) in enumerate(zip(sources, reward_models, strict=True)):
        if printed[source] < count:
            printed[source] += 1
            failure = answer["failures"][i]
            shown = (
                f"[data_source] {source}\n[prompt] {decode(data.ragged('prompts')[i])}\n"
                f"[response] {decode(data.ragged('responses')[i])}\n[ground_truth] {(reward_model or {}).get('ground_truth')}\n"
                f"[score] {f'missing: {failure.kind}' if failure else f'{scores[i]:g}'}"
            )
            say(shown)
