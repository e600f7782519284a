"""What a command prints of an error."""

import contextlib
import io

from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import RewardError, as_command
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
