"""`python -m lockstep`: the command `lockstep`, of this Python."""

import sys

from lockstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
