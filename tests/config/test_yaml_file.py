"""YAML files that a stranger hands over."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.config.load import load_config
from lockstep.config.yaml_file import read_yaml
from lockstep.errors import ConfigError

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    "text",
    [
        BOMB, "a: &a [*a]\n", "a: &a\n  b: *a\n", "[" * 100_000, "a: " + "{a: " * 5_000, "- a\n", "words\n", "a: !!python/object:os.x {}\n",
        "a: \xff\x00\n", "x" * 2_000_000, "a: " + "9" * 5_000, "a: 1\na: 2\n", "? [1, 2]\n: 3\n",
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_an_error_at_once(text, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode("latin-1"))
    began = time.process_time()
    with pytest.raises(ConfigError, match="a.yaml") as raised:
        load_config(config_file=file)
    assert time.process_time() - began < 5
    assert "\n" not in str(raised.value)


def test_an_alias_that_is_no_bomb_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {b: 1, c: [2]}\nd:\n  <<: *a\n  b: 3\ne: *a\nf: ${d.b}\n")
    found = OmegaConf.to_container(read_yaml(tmp_path / "a.yaml"))
    assert found == {"a": {"b": 1, "c": [2]}, "d": {"b": 3, "c": [2]}, "e": {"b": 1, "c": [2]}, "f": "${d.b}"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_characters="$")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner, max_size=3),
    max_leaves=20,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), VALUES, max_size=4))
def test_what_omegaconf_writes_is_read_back(tmp_path_factory, values):
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    assert OmegaConf.to_container(read_yaml(file)) == OmegaConf.to_container(OmegaConf.load(file))
