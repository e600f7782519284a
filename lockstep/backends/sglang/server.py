"""SGLang's server as a process of ours: start it, ask it, notice when it is gone."""

import http.client
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from lockstep.backends.process import ChildProcess
from lockstep.errors import WorkerError

_HOST = "127.0.0.1"
_POLL_S = 0.2


def server_command(arguments: Sequence[str]) -> list[str]:
    """The program that serves."""
    return [sys.executable, "-m", "sglang.launch_server", *arguments]


class SGLangServer:
    """A server with these arguments (beside address and port), from its start to `close`.

    Raises WorkerDied or WorkerTimeout when it is not healthy after `start_s`.
    """

    def __init__(self, arguments: Sequence[str], *, start_s: float, silence_s: float) -> None:
        with socket.socket() as free:
            free.bind((_HOST, 0))
            self._port = free.getsockname()[1]
        self._silence_s = silence_s
        environment = dict(os.environ)
        environment.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probs are wanted at the temperature
        self.process = ChildProcess("SGLang", server_command([*arguments, "--host", _HOST, "--port", str(self._port)]), environment)
        try:
            self._wait_until_healthy(start_s)
        except BaseException:
            self.close()
            raise

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a POST, from JSON where it is. Raises WorkerError with the server's text, WorkerDied, WorkerTimeout."""
        try:
            return self._request(path, json.dumps(body).encode(), self._silence_s)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:2000]
            raise WorkerError(self.process.label, f"POST {path} was answered with {error.code}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise self.process.late(f"POST {path}", self._silence_s) from error
            raise self.process.died(f"during POST {path}") from error

    def close(self) -> None:
        """End the server. May be called again."""
        self.process.close()

    def _wait_until_healthy(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while time.monotonic() < deadline:
            if self.process.has_ended:
                raise self.process.died("during its start")
            try:
                self._request("/health", None, 5.0)
                return
            except (OSError, http.client.HTTPException):
                time.sleep(_POLL_S)
        raise self.process.late("its start", start_s)

    def _request(self, path: str, data: bytes | None, timeout_s: float) -> Any:
        request = urllib.request.Request(f"http://{_HOST}:{self._port}{path}", data, {"Content-Type": "application/json"})
        # Not through a proxy that the environment names.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as response:
            text = response.read().decode()
        return json.loads(text) if text[:1] in ("{", "[") else text
