import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workers.rollout.counted import _mix, request_key, request_keys, uniforms


@given(st.integers(-(2**63), 2**63 - 1), st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3))
def test_a_key_is_what_wrapping_arithmetic_says(seed: int, key: tuple[int, int, int]) -> None:
    golden = torch.tensor(0x9E3779B97F4A7C15 - 2**64)
    state = torch.tensor(seed)
    for part in key:
        state = _mix(state + golden) ^ torch.tensor(part)
    assert request_key(seed, key) == int(_mix(state + golden)) == int(request_keys(seed, [key])[0])


def test_uniforms_look_independent_and_uniform() -> None:
    """4-sigma bounds for 400 requests of 100 positions, over prompts, samples, steps, seeds and positions alike."""
    n = 40_000
    for keys in (
        [(0, i, 0) for i in range(400)],
        [(0, 0, i) for i in range(400)],
        [(i, 3, 1) for i in range(400)],
    ):
        grid = torch.stack([uniforms(request_keys(1, keys), torch.full((400,), t)) for t in range(100)], 1).double()
        assert grid.min() >= 0
        assert grid.max() < 1
        assert abs(grid.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
        assert abs(grid.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
        centred = (grid - 0.5) * 12**0.5
        for neighbours in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
            assert abs(neighbours.mean()) < 4 / neighbours.numel() ** 0.5
        other_seed = torch.stack([uniforms(request_keys(2, keys), torch.full((400,), t)) for t in range(100)], 1).double()
        assert abs((centred * (other_seed - 0.5) * 12**0.5).mean()) < 4 / n**0.5
        assert len(grid.unique()) > 0.99 * n


@given(st.lists(st.tuples(*[st.integers(0, 2**31)] * 3), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_uniform_does_not_depend_on_the_batch(keys: list[tuple[int, int, int]], rng: object) -> None:
    positions = torch.arange(len(keys))
    together = uniforms(request_keys(5, keys), positions)
    order = list(range(len(keys)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shuffled = uniforms(request_keys(5, [keys[i] for i in order]), positions[order])
    assert torch.equal(shuffled, together[order])
    assert torch.equal(uniforms(request_keys(5, keys[:1]), positions[:1]), together[:1])
