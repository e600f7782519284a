import torch
from helpers.rollouts import sampling
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workers.rollout.request import Request, Stopping


def bytes_of(ids: list[int]) -> str:
    """One byte a token, as the worst case of a byte-level tokenizer; byte 0 is a special token without text."""
    return bytes(token for token in ids if token).decode(errors="replace")


@given(
    text=st.text(alphabet="aé漢😀", max_size=30),
    stop=st.text(alphabet="aé漢😀", min_size=1, max_size=3),
    specials=st.lists(st.integers(0, 100), max_size=3),
)
def test_a_stop_string_is_found_at_the_first_token_that_completes_it(text: str, stop: str, specials: list[int]) -> None:
    """Whatever the bytes of a character are spread over; compared with decoding the whole response."""
    tokens = list(text.encode())
    for place in specials:
        tokens.insert(place % (len(tokens) + 1), 0)
    stopping = Stopping(10_000, frozenset(), (stop,), bytes_of)
    end = next((n for n in range(1, len(tokens) + 1) if stop in bytes_of(tokens[:n])), None)
    assert stopping.end(tokens) == (None if end is None else (end, "stop"))
    assert all((stopping.end(tokens, n - 1, n) is None) == (n != end) for n in range(1, (end or len(tokens)) + 1))


def test_a_requests_own_limits_come_before_the_calls_and_the_context_before_both() -> None:
    params = sampling(max_tokens=12, stop_token_ids=(1,), stop=("x",))
    prompt = torch.zeros(10, dtype=torch.int64)
    assert Stopping.of(Request(prompt, (0, 0, 0)), params, None, None) == Stopping(12, frozenset({1}), ("x",), None)
    own = Request(prompt, (0, 0, 0), max_tokens=30, stop_token_ids=(), stop=("y", "z"))
    assert Stopping.of(own, params, None, None) == Stopping(30, frozenset(), ("y", "z"), None)
    assert Stopping.of(own, params, 32, None).max_tokens == 22


@given(
    tokens=st.lists(st.integers(0, 9), max_size=12),
    start=st.integers(0, 12),
    more=st.integers(0, 12),
    limit=st.integers(1, 12),
    stops=st.frozensets(st.integers(0, 9), max_size=2),
)
def test_a_response_ends_with_its_first_stop_token_or_at_its_limit(
    tokens: list[int], start: int, more: int, limit: int, stops: frozenset[int]
) -> None:
    start = min(start, len(tokens), limit - 1)  # it went on before
    stop = min(start + more, len(tokens))
    ends = [(n, "stop" if tokens[n - 1] in stops else "length") for n in range(start + 1, stop + 1)]
    ends = [(n, reason) for n, reason in ends if reason == "stop" or n >= limit]
    assert Stopping(limit, stops, (), None).end(tokens, start, stop) == (ends[0] if ends else None)
