from pathlib import Path

import psutil

from lockstep.utils.memory import available_ram


def test_a_containers_limit_counts_when_it_is_the_smaller_one(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_ram(tmp_path) == 2_000_000
    (tmp_path / "memory.current").write_text("4000000\n")
    assert available_ram(tmp_path) == 0


def test_without_a_limit_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < available_ram(tmp_path) <= total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert 0 < available_ram(tmp_path) <= total
