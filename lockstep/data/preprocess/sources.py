"""Which files a dataset is in, which split each of them belongs to, and the rows of a file.

A source is a folder (a copy of a hub repository, or of the original files), a file, or the id of a dataset on the hub. The split is in
the name of the file or of a folder above it: `main/train-00000-of-00001.parquet`, `val.jsonl`, `MATH/test/algebra/1.json`.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.errors import DataError

HUB_DEADLINE_S = 10.0
"""How long the hub may take to answer."""

_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONVERTED = "refs/convert/parquet"
"""Where the hub keeps parquet copies of datasets that are a loading script."""

SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class SourceFile:
    """A file that may be read: its name within the source, and what gives its path (for the hub: after a download)."""

    name: PurePosixPath
    fetch: Callable[[], Path]


@dataclass(frozen=True)
class SourceFiles:
    """The files of a dataset by split ("train", "validation", "test"), each in the order of names, and the names of those not used."""

    splits: dict[str, list[SourceFile]]
    unused: list[str]
    is_named: bool = True
    """Whether names say the splits; False for a single file without one, which is then for training."""


def find_files(sources: Sequence[str], secondary: str) -> SourceFiles:
    """Sort the files of all sources by split. Files whose name has `secondary` (a pattern) in it are used only when there are no others.

    Raises DataError for a source that does not exist or cannot be reached, and when there is no file with a split.
    """
    files = [file for source in sources for file in _files_of(source)]
    primary = [file for file in files if not re.search(secondary, str(file.name)) and _split_of(file.name)]
    used = primary or [file for file in files if _split_of(file.name)]
    if not used and len(files) == 1:
        return SourceFiles({"train": files}, [], is_named=False)
    splits: dict[str, list[SourceFile]] = {}
    for file in used:
        splits.setdefault(str(_split_of(file.name)), []).append(file)
    if not splits:
        raise DataError(
            f"no data files in {', '.join(sources)}: expected names with train, test or validation in them that end in one of "
            f"{', '.join(SUFFIXES)}; found {[str(file.name) for file in files[:5]]}"
        )
    return SourceFiles(splits, [str(file.name) for file in files if file not in used])


def _split_of(name: PurePosixPath) -> str | None:
    """By a word of the file's name, or else by the nearest folder that is called like a split."""
    for word in re.split(r"[^a-z]+", name.name.lower()):
        if word in _SPLITS:
            return _SPLITS[word]
    return next((_SPLITS[folder] for folder in reversed(name.parts[:-1]) if folder in _SPLITS), None)


def _files_of(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_file():
        return [SourceFile(PurePosixPath(path.name), lambda: path)]
    if path.is_dir():
        # The folder's own name counts: it may be `train`, or a subject.
        name = path.resolve().name
        here = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
        names = [PurePosixPath(name) / p.relative_to(path).as_posix() for p in here]
        visible = [(n, p) for n, p in zip(names, here, strict=True) if not any(part.startswith(".") for part in n.parts[1:])]
        return [SourceFile(n, lambda p=p: p) for n, p in visible]  # type: ignore[misc]
    if not _HUB_ID.fullmatch(source):
        raise DataError(f"{source} does not exist; --source is a folder, a file, or the id of a dataset on the hub (owner/name)")
    return _hub_files(source)


def _hub_files(repo: str) -> list[SourceFile]:
    import huggingface_hub

    try:
        revision = None
        names = _hub_names(huggingface_hub, repo, None)
        if not any(name.endswith((".parquet", ".jsonl", ".jsonl.gz")) for name in names):
            revision = _CONVERTED
            names = _hub_names(huggingface_hub, repo, _CONVERTED)
    except Exception as error:  # the library's errors, its HTTP library's, and OSError have no class in common
        raise _no_hub(repo, error) from error

    def download(name: str) -> Path:
        try:
            return Path(
                huggingface_hub.hf_hub_download(repo, name, repo_type="dataset", revision=revision, etag_timeout=HUB_DEADLINE_S)
            )
        except Exception as error:
            raise _no_hub(f"{repo}: {name}", error) from error

    return [SourceFile(PurePosixPath(name), lambda name=name: download(name)) for name in names]  # type: ignore[misc]


def _hub_names(hub: Any, repo: str, revision: str | None) -> list[str]:
    info = hub.HfApi().dataset_info(repo, revision=revision, timeout=HUB_DEADLINE_S)
    return sorted(file.rfilename for file in info.siblings or [] if file.rfilename.endswith(SUFFIXES))


def _no_hub(what: str, error: Exception) -> DataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    repo = what.split(":")[0]
    return DataError(
        f"there is no folder or file {repo}, and the hub does not give {what}: {reason}\n"
        "Without a connection, copy the dataset from a machine that has one "
        f"(hf download {repo} --repo-type dataset --local-dir FOLDER) and pass --source FOLDER"
    )


def read_rows(path: Path) -> Iterator[dict[str, Any] | UnusableRow]:
    """Every row of the file, in order."""
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: a data file ends in one of {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield from _json_lines(file) if ".jsonl" in path.name else _json_rows(file.read())
    except (pa.ArrowException, OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any] | UnusableRow]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:
                for position in range(len(batch)):
                    try:
                        yield batch.slice(position, 1).to_pylist()[0]
                    except UnicodeDecodeError:
                        yield UnusableRow("not valid UTF-8")


def _json_rows(content: bytes) -> Iterator[dict[str, Any] | UnusableRow]:
    """A list of objects, one object, or one object per line."""
    try:
        whole = json.loads(content)
    except ValueError:
        if content.lstrip().startswith(b"["):
            raise
        yield from _json_lines(content.split(b"\n"))
        return
    for row in whole if isinstance(whole, list) else [whole]:
        yield row if isinstance(row, dict) else UnusableRow("not a JSON object")


def _json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | UnusableRow]:
    for line in lines:
        if line.strip():
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError:
                yield UnusableRow("not valid UTF-8")
            except ValueError:
                yield UnusableRow("not JSON")
            else:
                yield row if isinstance(row, dict) else UnusableRow("not a JSON object")
