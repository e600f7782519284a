from lockstep.config.load import valid_keys
from lockstep.config.reference import keys, markdown


def test_every_key_has_a_meaning_and_is_listed_everywhere():
    listed = list(keys())
    assert [key for key, _, _ in listed] == list(valid_keys())
    assert [key for key, _, meaning in listed if len(meaning) < 6] == []
    page = markdown()
    assert [key for key, default, meaning in listed if f"| `{key}` | `{default}` | {meaning} |" not in page] == []


def test_a_meaning_with_a_column_sign_would_break_the_table():
    assert [key for key, _, meaning in keys() if "|" in meaning or "\n" in meaning] == []
