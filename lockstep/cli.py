"""`lockstep <command>`: thin. A command's module is imported when it is called, so that help costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "check": ("lockstep.tools.check", "check a loss or an advantage estimator of your own: does batching change it?"),
    "compare": ("lockstep.tools.compare", "what several algorithms would do with one recorded batch: gradients, clips, tokens"),
    "data": ("lockstep.tools.data_show", "data show: what each row of a file became, with the trained tokens marked"),
    "ppo": ("lockstep.trainer.main_ppo", "train with PPO or a relative of it; without arguments, on the embedded task"),
    "distill": ("lockstep.trainer.main_distill", "learn from a teacher, on given answers and on the student's own"),
    "sft": ("lockstep.trainer.main_sft", "supervised fine-tuning on conversations, completions or texts"),
    "reward-model": ("lockstep.trainer.main_reward_model", "train a reward model on pairs of a chosen and a rejected response"),
    "dpo": ("lockstep.trainer.main_dpo", "learn from preferences: DPO and its relatives, on pairs or on answers with a label"),
    "rewards": ("lockstep.tools.reward_check.command", "rewards check: try the configured reward before training on it"),
    "verify-resume": (
        "lockstep.tools.verify_resume",
        "kill a short run of your configuration and compare its end with one never hit",
    ),
    "capsule": ("lockstep.tools.replay.make", "put a step of a run into one file: rows, configuration, versions, weights' name"),
    "replay": ("lockstep.tools.replay", "do the step of a capsule again, here, and name the first metric that differs"),
    "verl-keys": ("lockstep.compat.verl.command", "a verl script or YAML file as a Lockstep command, and what becomes of each key"),
    "preprocess": (
        "lockstep.data.preprocess.main",
        "make parquet files of public datasets: mathematics, code, preferences, conversations",
    ),
}
"""Command -> the module whose `main(arguments) -> exit status` it is, and what it does."""


def main() -> int:
    """Run the command named first on the command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: lockstep <command> [arguments]\n")
        print("\n".join(f"  {name:14}{about}" for name, (_, about) in COMMANDS.items()))
        return 0
    if arguments[0] == "--version":
        from lockstep import __version__

        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        print(f"error: unknown command '{arguments[0]}'; choose one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[arguments[0]][0]).main
    return command(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
