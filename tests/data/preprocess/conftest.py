from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lockstep.data.preprocess.main import main

Rows = list[dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Rows]]:
    """`run(dataset, *sources, options=())`: the rows of each file that the command writes; what it prints is in `run.out`."""

    def command(dataset: str, *sources: Path | str, options: tuple[str, ...] = ()) -> dict[str, Rows]:
        out = tmp_path / "out"
        status = main([dataset, "--source", *map(str, sources), "--out", str(out), *options])
        command.out, command.err = capsys.readouterr()  # type: ignore[attr-defined]
        assert status == 0, command.err  # type: ignore[attr-defined]
        return {path.name: pq.read_table(path).to_pylist() for path in sorted(out.iterdir())}

    return command


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refuse(dataset, *sources)`: the error of a command that fails, and leaves nothing behind."""

    def command(dataset: str, *sources: Path | str, options: tuple[str, ...] = ()) -> str:
        out = tmp_path / "out"
        assert main([dataset, "--source", *map(str, sources), "--out", str(out), *options]) == 1
        assert not out.exists() or not list(out.iterdir())
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        return printed.err

    return command
