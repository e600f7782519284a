"""`lockstep <command>`: thin. A command's module is imported when it is called, so that help costs nothing."""

import importlib
import os
import sys
from collections.abc import Callable

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "train": {
        "ppo": ("lockstep.trainer.main_ppo", "PPO or a relative of it; without arguments, on the embedded task"),
        "sft": ("lockstep.trainer.recipes:SFT", "supervised fine-tuning on conversations, completions or texts"),
        "reward-model": ("lockstep.trainer.recipes:REWARD_MODEL", "a reward model from pairs of a chosen and a rejected response"),
        "dpo": ("lockstep.trainer.recipes:DPO", "DPO and its relatives, from pairs or from answers with a label"),
        "distill": ("lockstep.trainer.recipes:DISTILL", "learn from a teacher, on given answers and on the student's own"),
    },
    "prepare": {
        "doctor": ("lockstep.tools.doctor.command", "check the installation and the machine, with a self-test of ten seconds"),
        "preprocess": (
            "lockstep.data.preprocess.main",
            "make parquet files from public datasets: mathematics, preferences, conversations",
        ),
        "data": ("lockstep.tools.data_show", "`data show FILE`: show what each row became, with the trained tokens marked"),
        "rewards": ("lockstep.tools.reward_check.command", "`rewards check`: try the configured reward before you train on it"),
        "explain": ("lockstep.tools.explain.command", "describe a run: its values, its steps, its validations, where models live"),
        "plan": ("lockstep.tools.plan.command", "predict memory, time and cost of a run; needs no GPU"),
    },
    "look": {
        "watch": ("lockstep.tools.report.watch", "`watch RUN`: follow a run live, in a browser on this machine"),
        "report": (
            "lockstep.tools.report.command",
            "`report RUN`: write one HTML file about a run, with its samples token by token",
        ),
        "compare": ("lockstep.tools.compare.command", "compare what several algorithms would do with one recorded batch"),
    },
    "use": {
        "generate": ("lockstep.tools.generate", "print what a model writes after a prompt, with log-probs on request"),
        "chat": ("lockstep.tools.chat", "talk to a model in the terminal"),
        "eval": ("lockstep.tools.evaluate.command", "score a model, checkpoint, run or server on tasks or data files"),
        "serve": ("lockstep.tools.serve", "answer HTTP requests as OpenAI's server does, with the trainer's own numerics"),
        "export": ("lockstep.tools.export", "write a checkpoint as a Hugging Face folder, with an adapter merged or apart"),
        "push": ("lockstep.tools.push", "upload a checkpoint to the Hugging Face hub"),
    },
    "trust": {
        "check": ("lockstep.tools.check.command", "check a loss or estimator of your own: does batching change it?"),
        "verify-resume": ("lockstep.tools.verify_resume", "kill a short run and compare its end with one that was not killed"),
        "capsule": (
            "lockstep.tools.replay.capsule",
            "write one step of a run to a file: rows, configuration, versions, weights' name",
        ),
        "replay": ("lockstep.tools.replay.command", "repeat the step of a capsule here, and name the first metric that differs"),
    },
    "coming from verl": {
        "verl-keys": ("lockstep.compat.verl_keys.command", "turn a verl script or YAML file into a Lockstep command, key by key"),
    },
}
"""Group in the help -> command -> the module, or the object in a module, whose `main(arguments)` returns the exit status; and its help."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

ALGORITHMS = (
    "grpo", "dr_grpo", "grpo_passk", "dapo", "gspo", "gmpo", "sapo", "cispo", "dppo", "clip_cov", "kl_cov", "gpg", "opo", "otb", "gdpo",
    "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
)  # fmt: skip
"""Commands that are `ppo` with the preset of that algorithm: those of config/presets.py, whose import would cost a second."""


def main() -> int:
    """Run the command named first on the command line; returns the exit status."""
    try:
        return _main(sys.argv[1:])
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] in ("--version", "version"):
        from lockstep import __version__

        print(__version__)
        return 0
    spellings = {name.replace("_", "-"): name for name in (*COMMANDS, *ALGORITHMS)}
    name = spellings.get(arguments[0].replace("_", "-"))
    if name is None:
        print(_unknown(arguments[0], spellings), file=sys.stderr)
        return 2
    is_algorithm = name in ALGORITHMS
    module, _, program = COMMANDS["ppo" if is_algorithm else name][0].partition(":")
    if module.startswith("lockstep.trainer.") and not {"-h", "--help"} & set(arguments):
        from lockstep import __version__

        # Before the imports, which take seconds on a busy machine: the reader knows at once that something happens.
        print(f"lockstep {__version__}: {name}", flush=True)
    owner = importlib.import_module(module)
    command: Callable[..., int] = (getattr(owner, program) if program else owner).main
    return command(arguments[1:], algorithm=name) if is_algorithm else command(arguments[1:])


def _help() -> str:
    import textwrap

    parts = ["usage: lockstep <command> [arguments]; lockstep <command> --help says more"]
    for group, commands in GROUPS.items():
        parts.append(f"\n{group}:")
        parts += [f"  {name:15}{about}" for name, (_, about) in commands.items()]
        if group == "train":
            parts.append("  ppo with the preset of an algorithm:")
            indent = 17 * " "
            names = " ".join(ALGORITHMS)
            parts.append(textwrap.fill(names, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(parts)


def _unknown(word: str, spellings: dict[str, str]) -> str:
    import difflib

    near = difflib.get_close_matches(word.replace("_", "-"), spellings, n=1)
    nearest = f"; the nearest is '{spellings[near[0]]}'" if near else ""
    return f"error: unknown command '{word}'{nearest} (all of them: lockstep --help)"


if __name__ == "__main__":
    sys.exit(main())
