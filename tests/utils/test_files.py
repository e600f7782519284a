from __future__ import annotations

import pickle
import re

import pytest

from lockstep.errors import DataError
from lockstep.utils.files import load_object, load_reference


def test_an_object_is_loaded_from_a_file_and_can_be_pickled(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(x):\n    return x + 1\n")
    function = load_object(str(path), "compute_score")
    assert function(1) == 2
    assert pickle.loads(pickle.dumps(function)) is function


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"name = {folder!r}\n")
    assert [load_object(str(tmp_path / folder / "reward.py"), "name") for folder in ("a", "b", "a")] == ["a", "b", "a"]


def test_an_object_is_loaded_from_a_module():
    assert load_object("lockstep.errors", "DataError") is DataError


def test_a_missing_file_module_or_name_is_named(tmp_path):
    (tmp_path / "reward.py").write_text("def score():\n    pass\n")
    with pytest.raises(DataError, match=r"absent\.py does not exist"):
        load_object(str(tmp_path / "absent.py"), "score")
    with pytest.raises(DataError, match=r"reward\.py has no 'compute_score'; it defines \['score'\]"):
        load_object(str(tmp_path / "reward.py"), "compute_score")
    for name in ("no_such_package", "lockstep.no_such_module"):
        with pytest.raises(DataError, match=f"no module '{name}'"):
            load_object(name, "score")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import a_package_that_is_not_there\n", "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("\ndef score(:\n", "SyntaxError: invalid syntax: def score(:"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_says_where_in_one_line(tmp_path, monkeypatch, text, reason):
    path = tmp_path / "broken_reward.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    lines = {"M": [1], "S": [2], "Z": [5, 2]}[reason[0]]
    places = " > ".join(f"{path}, line {line}" for line in lines)
    for name in (str(path), "broken_reward"):
        with pytest.raises(DataError, match=re.escape(f"failed: {reason} ({places})")) as caught:
            load_object(name, "score")
        assert "\n" not in str(caught.value)


def test_a_file_of_a_package_is_named_as_a_module(tmp_path, monkeypatch):
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    (package / "parts.py").write_text("answer = 42\n")
    (package / "words.py").write_text("from .parts import answer\n")
    with pytest.raises(DataError, match=r"relative import .*; name it as a module of its package \(package\.words\)"):
        load_object(str(package / "words.py"), "answer")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object("a_package_of_mine.words", "answer") == 42


def test_a_reference_names_a_file_and_an_object_and_other_text_is_none(tmp_path):
    file = tmp_path / "some:thing.py"
    file.write_text("answer = 42\n")
    assert load_reference(f"{file}:answer") == 42
    assert load_reference("vanilla") is None
    assert load_reference("a:b") is None
    with pytest.raises(DataError, match="has no 'question'"):
        load_reference(f"{file}:question")
