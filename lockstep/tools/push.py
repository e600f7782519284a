"""`lockstep push RUN|CHECKPOINT|FOLDER OWNER/NAME`: a model to the Hugging Face hub. See docs/export.md."""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, ResourceError, as_command
from lockstep.tools.export import add_export_arguments, export, find_parts

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_NEW = "exported"


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(list(arguments))
    if not _REPO.fullmatch(options.repo):
        raise ConfigError(f"{options.repo!r} is not a repository of the hub: expected OWNER/NAME")
    find_parts(options.source, options.merge)
    hub = _hub(options.repo, options.private)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / _NEW
        what = export(options.source, folder, options.dtype, options.merge)
        url = _tried(
            "the upload failed", hub.upload_folder, repo_id=options.repo, folder_path=folder, commit_message=options.message
        )
    print(f"{what} in {options.dtype}: {getattr(url, 'repo_url', None) or url}")
    return 0


def _hub(repo: str, private: bool) -> Any:
    """The hub, which knows the user and has the repository. Raises ConfigError without a token, ResourceError where it cannot be reached or
    refuses."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it")
    if not huggingface_hub.get_token():
        raise ConfigError("there is no token for the hub: set HF_TOKEN, or run hf auth login; it needs the right to write")
    api = huggingface_hub.HfApi()
    _tried("the hub cannot be reached, or does not know the token", api.whoami)
    _tried(f"the hub does not let you write {repo}", api.create_repo, repo, private=private, exist_ok=True)
    return api


def _tried(what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:  # the library's errors, its HTTP library's, and OSError have no class in common
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ResourceError(f"{what}: {reason}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep push", description="A model to the Hugging Face hub.", allow_abbrev=False)
    add_export_arguments(parser)
    parser.add_argument("repo", metavar="OWNER/NAME", help="the repository; it is made where there is none")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--message", default="Upload with lockstep push", help="the commit's message")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
