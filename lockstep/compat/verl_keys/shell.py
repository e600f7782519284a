"""What a shell script would start, found without starting anything."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lockstep.errors import ConfigError

_READ_TIMEOUT_S = 20.0
# What a script would start is printed when it fits the patterns, and fails otherwise, but for Ray's commands, which scripts wait for; what
# would end or leave the script does nothing.
_PRELUDE = """
command_not_found_handle() { case "$*" in PATTERNS) printf '\\2%s' "$@"; printf '\\1';; "ray "*) ;; *) return 1;; esac; } >&2
set() { :; }; exit() { :; }; source() { :; }; cd() { :; }; kill() { :; }; trap() { :; }; wait() { :; }; exec() { "$@"; }
basename() { local p="${1%/}"; printf '%s\\n' "${p##*/}"; }; dirname() { case "$1" in */*) printf '%s\\n' "${1%/*}";; *) echo .;; esac; }
date() { case "$1" in +*) printf "%(${1#+})T\\n" -1;; *) printf '%(%c)T\\n' -1;; esac; }
"""


def started_commands(path: Path, patterns: str) -> tuple[list[list[str]], str]:
    """The words of each command of a shell script that fits one of the shell's `patterns` (`*a*|*b*`), and what bash said beside them.

    Bash reads the script in restricted mode and finds no program: it sets variables, and starts and writes nothing. Variables of this
    process's environment count, as they would in a run. Raises ConfigError without bash, or for a script that does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("reading a shell script needs bash, which is not on the PATH; pass its key=value arguments instead")
    # Redirections are taken out: restricted bash refuses those to files, and what is started is said on stderr.
    text = re.sub(r"(?<=\s)>\([^()]*\)", "", path.read_text(errors="replace")).replace("|&", "|")
    text = re.sub(r"(?<=\s)(?:[0-9]?>>?|&>>?)\s*(?:&[0-9]|[^\s;&|)<]+)", "", text)
    try:
        done = subprocess.run(
            [bash, "--norc", "--noprofile", "-r", "-c", _PRELUDE.replace("PATTERNS", patterns) + text, str(path)],
            capture_output=True, timeout=_READ_TIMEOUT_S, env=os.environ | {"PATH": "/nonexistent"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{path} was not read in {_READ_TIMEOUT_S:.0f} s; pass its key=value arguments instead") from None
    *started, said = done.stderr.decode(errors="replace").split("\1")
    return [call.split("\2")[1:] for call in started], said.strip()
