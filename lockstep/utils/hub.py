"""Whether the Hugging Face hub can be asked: its client tries again and again for half a minute before it says that it cannot."""

import socket
import threading
from urllib.parse import urlparse
from urllib.request import getproxies

from lockstep.errors import DataError

_REACH_S = 5.0


def check_hub(repo: str, *files: str) -> None:
    """Raise DataError for a hub id that is not in the cache while the hub is switched off (HF_HUB_OFFLINE) or cannot be reached.

    It is there when one of `files`, or config.json, is.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if any(isinstance(try_to_load_from_cache(repo, file), str) for file in ("config.json", *files)):
            return
    except HFValidationError as error:
        raise DataError(f"{repo} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B: {str(error).splitlines()[0]}") from error
    host = constants.ENDPOINT
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(host)
    if reason is not None:
        raise DataError(
            f"{repo} is not a folder and not in the Hugging Face cache, and {host} cannot be asked for it ({reason}); pass the path of a "
            "folder with config.json and the weights, or download it where there is a network"
        )


def _unreachable(address: str) -> str | None:
    """Why nobody answers there; None where somebody does, or where a proxy would have to be asked."""
    url = urlparse(address)
    if url.hostname is None or url.scheme in getproxies():
        return None
    found: list[str | None] = []

    def reach() -> None:
        try:
            socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=_REACH_S).close()
            found.append(None)
        except OSError as error:
            found.append(error.strerror or str(error))

    # On a thread: looking a name up has no limit of time of its own.
    asking = threading.Thread(target=reach, daemon=True)
    asking.start()
    asking.join(2 * _REACH_S)
    return found[0] if found else f"no answer within {2 * _REACH_S:g} s"
