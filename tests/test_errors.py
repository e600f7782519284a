"""Errors: what a command prints of them, and what crosses a process boundary."""

import contextlib
import io
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.token_rows import TooLong
from lockstep.errors import ConfigError, DataError, RewardError, as_command
from lockstep.utils.terminal import printable

HOSTILE = st.lists(
    st.sampled_from(["\x1b]0;title\x07", "\x1b[2J", "\r", "\u202e", "\x9b31m", "é", "\n", "a"]) | st.text(max_size=3)
).map("".join)


@given(HOSTILE)
def test_an_error_that_quotes_a_model_or_a_file_sends_no_control_characters_to_the_terminal(text: str) -> None:
    @as_command
    def command(arguments: object) -> int:
        raise RewardError(text)

    with contextlib.redirect_stderr(io.StringIO()) as shown:
        assert command([]) == 1
    assert shown.getvalue() == f"error: {printable(text)}\n"


@pytest.mark.parametrize(
    "error",
    [ConfigError("data.seed=x", key="data.seed"), ConfigError("no key"), DataError("a", key="data.max_length"), TooLong("b", 7)],
)
def test_an_error_keeps_its_fields_in_another_process(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
