from pathlib import Path

import psutil
import pytest
import torch

from lockstep.errors import ResourceError
from lockstep.utils.device import available_ram, free_device_memory, resolve_device


@pytest.mark.parametrize(
    ("name", "has_gpu", "expected"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")]
)
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, name, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device(name) == expected


def test_asking_for_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match=r"trainer\.device=cuda, but torch .* sees no GPU.*trainer\.device=cpu"):
        resolve_device("cuda")


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


@pytest.mark.parametrize(("fraction", "reserved", "expected"), [(1.0, 0, 70), (0.5, 0, 50), (0.5, 20, 30), (0.5, 60, 0)])
def test_a_limit_of_the_process_counts_when_it_is_the_smaller_one(
    monkeypatch: pytest.MonkeyPatch, fraction: float, reserved: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    assert free_device_memory(torch.device("cuda", 0)) == expected


def test_a_cpu_has_no_device_memory_of_its_own() -> None:
    assert free_device_memory(torch.device("cpu")) is None
