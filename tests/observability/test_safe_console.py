"""Tables and texts that quote files, models and rewards."""

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from lockstep.observability.display import LiveDisplay, PlainDisplay
from lockstep.observability.safe_console import SafeConsole

HOSTILE = st.lists(st.sampled_from(["\x1b]0;title\x07", "\x1b[2J", "\r", "\u202e", "\x9b31m", "\x00", "é", "a"])).map("".join)


def is_clean(shown: str) -> bool:
    return not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@given(HOSTILE)
def test_no_text_in_a_table_or_a_view_controls_the_terminal(text: str) -> None:
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=200, force_terminal=False)
    table = Table(text, title=text)
    table.add_row(text)
    console.print(table, text, Text(text), markup=False)
    validation = {f"val-core/{text}/reward/mean@1": 0.5, "critic/score/mean": 0.1}
    for display in (PlainDisplay(stream), LiveDisplay(console)):
        display.message(text)
        display.step(1, validation)
        console.print(display._render() if isinstance(display, LiveDisplay) else "")
    assert is_clean(stream.getvalue())
    assert stream.getvalue().count("validation at step 1: val-core/") == 2
    styled = io.StringIO()
    SafeConsole(file=styled, force_terminal=True, color_system="standard").print(Text("a", style="red"))
    assert "\x1b[31m" in styled.getvalue(), "Rich's own codes stay"
