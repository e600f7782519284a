"""`lockstep <command>`: thin. A command's module is imported when it is called."""

from __future__ import annotations

import sys

COMMANDS = {"ppo": "train with PPO or a relative of it; without arguments, on the embedded task"}


def main() -> int:
    """Run the command named first on the command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: lockstep <command> [key=value ...]\n")
        print("\n".join(f"  {name:10}{about}" for name, about in COMMANDS.items()))
        return 0
    if arguments[0] == "ppo":
        from lockstep.trainer.main_ppo import main as ppo

        return ppo(arguments[1:])
    if arguments[0] == "--version":
        from lockstep import __version__

        print(__version__)
        return 0
    print(f"error: unknown command '{arguments[0]}'; choose one of: {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
