import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from lockstep.utils.terminal import printable


def test_control_characters_are_escaped_and_text_is_not():
    text = "clear \x1b[2J\x1b]0;title\x07, back\b\r, c1 \x9b31m, turned \u202e, hidden \u200b\n\tplain é 中 🙂"
    shown = r"clear \x1b[2J\x1b]0;title\x07, back\x08\r, c1 \x9b31m, turned \u202e, hidden \u200b" + "\n\tplain é 中 🙂"
    assert printable(text) == shown
    assert printable("\x1b") == r"\x1b"


@given(st.text())
def test_nothing_that_moves_a_cursor_is_left(text):
    shown = printable(text)
    assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert printable(shown) == shown
