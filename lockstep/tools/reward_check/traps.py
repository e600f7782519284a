"""Programs that try to leave the sandbox, and traps that show that one did.

Each program probes for one thing that lies outside. Only when it finds it, it gives the right answer: then the score says that it was
outside. A file and a connection are seen from here as well, whatever the score is.
"""

import base64
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from lockstep.tools.reward_check.fuzz import Earns, Response

_VARIABLE = "LOCKSTEP_REWARD_CHECK_TRAP"

_PROGRAM = """\
import os
def _found():
{probe}
try:
    _was_found = _found()
except Exception:
    _was_found = False
if not _was_found:
    raise SystemExit(1)
import base64
exec(compile(base64.b64decode("{prize}").decode(), "program.py", "exec"), globals())
"""

_PROBES = {
    "reads /etc/passwd": """\
    import hashlib
    return hashlib.sha256(open("/etc/passwd", "rb").read()).hexdigest() == "{passwd}"
""",
    "reads the environment": """\
    import hashlib
    if "{secret}" in os.environ.values():
        return True
    for name in os.listdir("/proc"):
        try:
            environment = open("/proc/" + name + "/environ", "rb").read()
        except OSError:
            continue
        if hashlib.sha256(environment).hexdigest() == "{environment}":
            return True
    return False
""",
    "opens a socket": """\
    import socket
    socket.create_connection(("127.0.0.1", {port}), 2).close()
    return True
""",
    "writes outside": """\
    open({file!r}, "w").close()
    return True
""",
    # Children that hold the pipes keep a careless judge waiting for the end of the output.
    "leaves children behind": """\
    import time
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
    os._exit(0)
""",
    "exits with success": """\
    os._exit(0)
""",
}
"""What a program tries -> the body of a function that returns whether it worked."""


class Traps:
    """Inside `with`: a secret in the environment, a listening socket and a folder, for programs to reach."""

    def __enter__(self) -> Self:
        self._secret = secrets.token_hex(16)
        os.environ[_VARIABLE] = self._secret
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-trap-"))
        self._folder.chmod(0o777)  # a program may run as another user
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[_VARIABLE]
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def responses(self, prize: str | None, runs_programs: bool) -> Iterator[Response]:
        """One response for each thing to try. `prize` is the program that runs when it worked; without one, the score cannot tell."""
        known = {
            "passwd": _hash_of("/etc/passwd"),
            "environment": _hash_of("/proc/self/environ"),
            "secret": self._secret,
            "port": self._socket.getsockname()[1],
            "file": str(self._folder / "written"),
        }
        encoded = base64.b64encode((prize or "").encode("utf-8", "replace")).decode()
        for name, probe in _PROBES.items():
            program = _PROGRAM.format(probe=probe.format(**known).rstrip(), prize=encoded)
            yield Response(f"program that {name}", f"```python\n{program}```", Earns.NO_ESCAPE if runs_programs else Earns.NOTHING)

    def sprung(self) -> list[str]:
        """What a program has done outside."""
        found = []
        if (self._folder / "written").exists():
            found.append("a program in a response wrote a file outside the sandbox")
        with suppress(BlockingIOError):
            self._socket.accept()[0].close()
            found.append("a program in a response opened a connection to this machine")
        return found


def _hash_of(path: str) -> str:
    """What a program that reads this file can prove; nothing fits where there is no such file."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
