"""Arguments of the form key=value: read as Hydra reads them where it can, and as text where it cannot."""

import contextlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.load import load_config
from lockstep.config.overrides import override_text, parse_override, parse_value
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[2]
BY_HYDRA = [json.loads(line) for line in (Path(__file__).parent / "overrides_by_hydra.jsonl").read_text().splitlines()]
"""Argument, key and value as Hydra 1.3 read them: those of the docs, the examples, the tests and verl's scripts, and random ones."""


def test_every_argument_is_read_as_hydra_reads_it():
    assert len(BY_HYDRA) > 500
    for text, key, value in BY_HYDRA:
        found = parse_override(text)
        # Compared as text: NaN is not equal to itself, and 1 is equal to 1.0 and to true.
        assert (found.key, repr(found.value)) == (key, repr(value)), text


def test_the_docs_have_no_argument_that_cannot_be_read():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.sh")]
    found = [word for page in pages for word in re.findall(r"(?<=[\s'\"])[+]?[a-z_]+(?:\.[a-z_]+)+=[^\s'\"`|]+", page.read_text())]
    assert len(found) > 100
    for word in found:
        if "{" not in word and "[" not in word:  # those have blanks, and are in the recorded ones
            parse_override(word.rstrip(";,.)"))


@pytest.mark.parametrize(
    "path",
    [
        "~/data/train.parquet", "../work/lr=1e-6,x.parquet", "data/*.parquet", "runs/a(1)/x.jsonl", "train-0000?-of-00008.parquet",
        "data/[ab]*.parquet", "it's.parquet", "a&b|c;d.parquet", "x{1,2}.parquet", "a b.parquet", "C:\\data\\x.parquet", "é.parquet",
        "#1.parquet", "=", "a==b", "&x", "*x", "!x", "@x", "%x", "1.2.3", "2024-01-01", "1:30", "yes", "off", "0x10", "007", "1e", "-", "",
    ],
)  # fmt: skip
def test_a_path_or_a_word_is_the_text_as_it_stands(path):
    found = parse_override(f"data.train_files={path}")
    assert (found.key, found.value) == ("data.train_files", path)
    if path:
        assert load_config([f"data.train_files={path}", "actor_rollout_ref.model.path=m"]).data.train_files


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_the_text_of_a_value_reads_back_as_the_value(value):
    assert repr(parse_override(f"a.b={override_text(value)}").value) == repr(value)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="[]{}'\",:\\$ a1=~(+.", max_size=14))
def test_any_text_is_a_value_or_a_configuration_error(text):
    for parse in (parse_override, parse_value):
        with contextlib.suppress(ConfigError):
            parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "data.seed", "", "=1", " =1", "a b=1", "'a'=1", "a.b=[1", "a.b={x: 1", "a.b='x", 'a.b="x', "a.b=[1] 2", "a.b={x}", "a.b=[a'b]",
        "a.b=" + "[" * 99 + "]" * 99,
    ],
)  # fmt: skip
def test_what_is_not_key_and_value_is_an_error_that_quotes_it(text):
    with pytest.raises(ConfigError) as error:
        parse_override(text)
    assert text in str(error.value)


def test_numbers_are_numbers():
    assert parse_value("1e-6") == 1e-6
    assert isinstance(parse_value("1E5"), float)
    assert math.isnan(parse_value("nan"))
    assert parse_value("-INF") == -math.inf
    assert parse_value("1_000") == 1000
    assert parse_value("[1, 1.0, true, null, 'null']") == [1, 1.0, True, None, "null"]


def test_keys_may_have_verls_signs():
    assert parse_override("+a.b=1") == parse_override("++a.b=1") == parse_override("a.b=1")
    deleted = parse_override("~a.b")
    assert (deleted.key, deleted.is_delete) == ("a.b", True)


@pytest.mark.parametrize("text", ["trainer.project_name=${a", "trainer.project_name=${}", "trainer.project_name=${no.such}"])
def test_an_interpolation_that_cannot_be_read_is_one_line(text):
    with pytest.raises(ConfigError) as error:
        load_config([text])
    assert "\n" not in str(error.value)


def test_a_configuration_is_read_without_hydra():
    code = "import sys; sys.modules['hydra'] = None; from lockstep.config import load_config; load_config(['data.seed=1'])"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
