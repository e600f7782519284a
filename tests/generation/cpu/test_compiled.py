from pathlib import Path

import pytest

from lockstep.generation.cpu import compiled


def test_without_a_working_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = compiled.library.__wrapped__
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert make() is None
    monkeypatch.setattr(compiled.shutil, "which", lambda name: "/bin/false")
    assert make() is None
    assert not list((tmp_path / "lockstep" / "kernels").iterdir())
