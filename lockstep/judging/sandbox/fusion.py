"""Run programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion) through its HTTP interface.

POST {url}/run_code with {"code", "language", "stdin", "run_timeout", "compile_timeout", "memory_limit_MB"} answers

```text
{"status": "Success" | "Failed" | "SandboxError", "message", "compile_result", "run_result": {
    "status": "Finished" | "TimeLimitExceeded" | "Error", "return_code", "stdout", "stderr", "execution_time"}}
```

How well programs are isolated is the server's affair. A request is repeated when the server cannot be reached, is busy (429), fails (5xx),
reports a SandboxError or answers with something that is not the above; after the last attempt that is an exception.
"""

import http.client
import json
import random
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, ResourceError
from lockstep.judging.sandbox.base import ProgramLimits, Result, Sandbox, exit_status, judge_program

_LARGEST_ANSWER = 1 << 26


class FusionSandbox(Sandbox):
    """Programs on a SandboxFusion server.

    Args:
        url: Address of the server, such as http://10.0.0.5:8080; a trailing /run_code is accepted.
        max_concurrent: Requests open at a time.
        limits: wall_s and memory_mb are passed on and output_bytes cuts the answer; the server decides on the rest.
        num_attempts: How often a request is made before it is given up.
        backoff_s: Pause after the first failed attempt; doubles with each, with some chance in it.
        answer_s: Time for a request beyond the program's own: the way there, and the server's queue.
        queue_s: Longest wait for a place.
    """

    def __init__(
        self,
        url: str,
        max_concurrent: int = 64,
        limits: ProgramLimits | None = None,
        num_attempts: int = 4,
        backoff_s: float = 0.5,
        answer_s: float = 30.0,
        queue_s: float = 300.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"reward.sandbox.url must be the address of a SandboxFusion server (http://host:port), not {url!r}")
        super().__init__(max_concurrent, limits or ProgramLimits(), queue_s)
        self._is_https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.url = url
        self._num_attempts = num_attempts
        self._backoff_s = backoff_s
        self._answer_s = answer_s
        self._stop = threading.Event()
        self._connections: set[socket.socket] = set()

    def _execute(self, program: str | None, stdin: str, wall_s: float) -> Result:
        body = {
            "code": judge_program() if program is None else program,
            "language": "python",
            "stdin": stdin,
            "run_timeout": wall_s,
            "compile_timeout": wall_s,
            "memory_limit_MB": self.limits.memory_mb,
        }
        request = json.dumps(body).encode()
        problem = ""
        for attempt in range(self._num_attempts):
            pause_s = self._backoff_s * 2 ** (attempt - 1) * random.uniform(0.75, 1.25) if attempt else 0.0
            if self._stop.wait(pause_s):
                raise ResourceError("the sandbox was closed while a program ran")
            try:
                return self._read(self._post(request, wall_s + self._answer_s), wall_s)
            except _TryAgain as failure:
                problem = str(failure)
        raise ResourceError(
            f"the SandboxFusion server {self.url} did not run a program in {self._num_attempts} attempts; the last: {problem}"
        )

    def _end_all(self) -> None:
        self._stop.set()
        for connection in self._connections.copy():
            _cut(connection)

    def _post(self, request: bytes, timeout_s: float) -> bytes:
        """The body of the answer. Raises _TryAgain when another attempt may help, ResourceError when none can."""
        connect = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=timeout_s)
        try:
            connection.connect()
            opened = connection.sock  # the connection forgets it when the server hangs up
            # A socket's own time-out begins anew with every byte that arrives; this one does not.
            alarm = threading.Timer(timeout_s, _cut, [opened])
            alarm.daemon = True
            alarm.start()
            self._connections.add(opened)
            try:
                connection.request("POST", self._path, request, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                body = answer.read(_LARGEST_ANSWER)
            finally:
                alarm.cancel()
                self._connections.discard(opened)
        except (OSError, http.client.HTTPException) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status == 200:
            return body
        told = f"HTTP {answer.status}: {body[:500].decode(errors='replace')}"
        if answer.status == 429 or answer.status >= 500:
            raise _TryAgain(told)
        raise ResourceError(f"the SandboxFusion server {self.url} refused a program: {told}")

    def _read(self, body: bytes, wall_s: float) -> Result:
        try:
            answer = json.loads(body)
            ran: dict[str, Any] = answer["run_result"] or answer["compile_result"] or {}
            if answer["status"] == "SandboxError" or ran["status"] not in ("Finished", "TimeLimitExceeded"):
                raise _TryAgain(f"the server reports {answer['status']}: {str(answer.get('message'))[:500]}")
            stdout = ran["stdout"] or ""
            stderr = ran["stderr"] or ""
            code = ran["return_code"]
            seconds = ran["execution_time"]
            is_timeout = ran["status"] == "TimeLimitExceeded"
            if not is_timeout and not isinstance(code, int):
                raise TypeError(f"return_code is {code!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise _TryAgain(f"the answer cannot be read ({type(error).__name__}: {error}): {body[:200]!r}") from error
        code = None if is_timeout else 128 - code if code < 0 else code
        return Result(
            status="timeout" if code is None else exit_status(code, stderr),
            exit_code=code,
            stdout=self._text(stdout),
            stderr=self._text(stderr),
            seconds=float(seconds if seconds is not None else wall_s),
        )

    def _text(self, text: str) -> str:
        limit = self.limits.output_bytes
        return text if len(text) <= limit else f"{text[:limit]}\n[cut: output limit]"


class _TryAgain(Exception):
    """An attempt failed in a way that may pass."""


def _cut(connection: socket.socket) -> None:
    """Make whoever reads from the socket fail at once."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
