"""benchmarks/rollout_cpu.py: no engine meets a prompt twice, and prefill is taken out of decoding."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.rollout_cpu import Load, Run, grouped, measure, mixed, rates_of, with_other_tokens


def test_other_tokens_have_the_same_lengths_and_groups() -> None:
    for load in (mixed(12), grouped(16)):
        other = with_other_tokens(load, seed=5)
        assert list(map(len, other[0])) == list(map(len, load[0]))
        assert other[1] == load[1]
        alike, other_alike = ([prompt == prompts[0] for prompt in prompts] for prompts in (load[0], other[0]))
        assert alike == other_alike
        assert not set(map(tuple, load[0])) & set(map(tuple, other[0]))


def test_every_run_has_prompts_of_its_own_that_all_engines_share() -> None:
    seen: dict[str, list[Load]] = {"one": [], "other": []}

    def run(name: str) -> Run:
        def generate(load: Load) -> int:
            seen[name].append(load)
            return sum(load[1])

        return Run(generate)

    found = measure({name: run(name) for name in seen}, mixed(3), repeats=2)
    assert seen["one"] == seen["other"]
    prompts = [tuple(prompt) for load in seen["one"] for prompt in load[0]]
    assert len(prompts) == len(set(prompts)) == 12
    assert [sum(load[1]) for load in seen["one"]][::2] == [3, 3]
    assert len(found["one"]["decode_tokens_per_s"]) == 2


def test_a_run_that_is_short_of_tokens_is_an_error() -> None:
    with pytest.raises(AssertionError, match="2 tokens of 3"):
        Run(lambda load: 2).timed(([[1]], [3]))


def test_decoding_is_what_a_run_takes_beyond_its_prefill() -> None:
    rates = rates_of(([[1, 2, 3], [4]], [5, 7]), whole=(4.0, 6.0), prefill=(2.0, 1.0))
    assert rates["tokens_per_s"] == 3
    assert rates["prefill_tokens_per_s"] == 2
    assert rates["decode_tokens_per_s"] == 5
    assert rates["decode_tokens_per_cpu_s"] == 2
