"""Which files a dataset is in, and which split each of them belongs to.

A source is a folder (a copy of a hub repository, or of the original files), a file, or the id of a dataset on the hub. The split is in
the name of the file or of a folder above it: `main/train-00000-of-00001.parquet`, `val.jsonl`, `MATH/test/algebra/1.json`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.data.preprocess.reading import SUFFIXES
from lockstep.errors import DataError

HUB_DEADLINE_S = 10.0
"""How long the hub may take to answer."""

_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONVERTED = "refs/convert/parquet"
"""Where the hub keeps parquet copies of datasets that are a loading script."""


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
