"""verl's names and keys stay a small part: the bar of docs/from_verl.md."""

from pathlib import Path

import lockstep.compat.verl

FOLDER = Path(lockstep.compat.verl.__file__).parent
MAX_LINES = 1_200


def test_the_code_for_verls_users_is_small():
    lines = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert sum(lines.values()) <= MAX_LINES, lines
