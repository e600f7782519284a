"""Whatever is done to a file of a checkpoint is found, and the file is named."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.manifest import MANIFEST, check_manifest, entry_of, write_manifest
from lockstep.errors import DataError

FILES = {
    "trainer_state.json": b"{}",
    "actor/model.safetensors": bytes(range(256)) * 3,
    "actor/optimizer/exp_avg.safetensors": b"m" * 500,
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, {})
    return tmp_path


def test_a_folder_as_it_was_written_passes_with_notes_that_a_user_left(folder):
    (folder / "NOTES.md").write_text("the good one")
    check_manifest(folder)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_damage_names_the_file(folder, name):
    file, content = folder / name, FILES[name]
    for damaged, words in (
        (content[:-1], f"has {len(content) - 1} bytes, but was written with {len(content)}"),
        (content + b"x", "bytes"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{file} .*{words}"):
            check_manifest(folder)
    file.unlink()
    with pytest.raises(DataError, match=f"{file} is missing"):
        check_manifest(folder)


def test_any_flipped_bit_is_found(folder):
    @given(st.sampled_from(sorted(FILES)), st.data())
    def flip(name, data):
        file, content = folder / name, bytearray(FILES[name])
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        with pytest.raises(DataError, match=f"{file} is damaged: its SHA-256"):
            check_manifest(folder)
        file.write_bytes(FILES[name])

    flip()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": 3}', b'{"files": {"a": {"size": 1}}}', b"\xff\xfe"])
def test_a_manifest_that_cannot_be_read_is_named(folder, content):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match=f"{folder / MANIFEST} is damaged"):
        check_manifest(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(DataError, match=f"{folder} has no {MANIFEST}"):
        check_manifest(folder)


def test_a_file_that_could_take_the_place_of_another_is_refused(folder):
    (folder / "actor/model.safetensors.index.json").write_text("{}")
    with pytest.raises(DataError, match=r"model\.safetensors\.index\.json was added"):
        check_manifest(folder)


def test_known_entries_are_not_computed_again(folder):
    entry = entry_of(folder / "actor/model.safetensors")
    assert entry == {"size": 768, "sha256": entry["sha256"]}
    os.chmod(folder / "actor/model.safetensors", 0)
    write_manifest(folder, {"actor/model.safetensors": {"size": 768, "sha256": "given"}})
    assert json.loads((folder / MANIFEST).read_text())["files"]["actor/model.safetensors"]["sha256"] == "given"
