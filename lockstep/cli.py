"""`lockstep <command>`: thin. A command's module is imported when it is called, so that help costs nothing."""

import importlib
import os
import sys
from collections.abc import Callable

COMMANDS = {
    "check": ("lockstep.tools.check", "check a loss or an advantage estimator of your own: does batching change it?"),
    "compare": ("lockstep.tools.compare", "what several algorithms would do with one recorded batch: gradients, clips, tokens"),
    "data": ("lockstep.tools.data_show", "data show: what each row of a file became, with the trained tokens marked"),
    "doctor": ("lockstep.tools.doctor.command", "is what a run needs here, and does it work? A self-test in ten seconds"),
    "explain": ("lockstep.tools.explain.command", "each value and where it comes from, what a step does, which model lives where"),
    "plan": ("lockstep.tools.plan.command", "memory, time and cost of a run before it starts, without a GPU"),
    "ppo": ("lockstep.trainer.main_ppo", "train with PPO or a relative of it; without arguments, on the embedded task"),
    "distill": ("lockstep.trainer.main_distill", "learn from a teacher, on given answers and on the student's own"),
    "sft": ("lockstep.trainer.main_sft", "supervised fine-tuning on conversations, completions or texts"),
    "reward-model": ("lockstep.trainer.main_reward_model", "train a reward model on pairs of a chosen and a rejected response"),
    "dpo": ("lockstep.trainer.main_dpo", "learn from preferences: DPO and its relatives, on pairs or on answers with a label"),
    "generate": ("lockstep.tools.generate", "what a model writes after a prompt, with log-probs on request"),
    "chat": ("lockstep.tools.chat", "talk to a model in the terminal"),
    "export": ("lockstep.tools.export", "a checkpoint as a Hugging Face folder in a type, an adapter merged or not"),
    "push": ("lockstep.tools.push", "a checkpoint to the Hugging Face hub"),
    "eval": ("lockstep.tools.evaluate.command", "a model, checkpoint, run or server on tasks or data files, with intervals"),
    "serve": ("lockstep.tools.serve", "answer HTTP requests as OpenAI's server does, with the trainer's own numerics"),
    "report": ("lockstep.tools.report", "report RUN ...: one HTML file about a run, with its samples token by token"),
    "rewards": ("lockstep.tools.reward_check.command", "rewards check: try the configured reward before training on it"),
    "verify-resume": (
        "lockstep.tools.verify_resume",
        "kill a short run of your configuration and compare its end with one never hit",
    ),
    "capsule": ("lockstep.tools.replay.make", "put a step of a run into one file: rows, configuration, versions, weights' name"),
    "replay": ("lockstep.tools.replay", "do the step of a capsule again, here, and name the first metric that differs"),
    "verl-keys": ("lockstep.compat.verl.command", "a verl script or YAML file as a Lockstep command, and what becomes of each key"),
    "watch": ("lockstep.tools.report.watch", "watch RUN ...: the same live, in a browser on this machine"),
    "preprocess": (
        "lockstep.data.preprocess.main",
        "make parquet files of public datasets: mathematics, code, preferences, conversations",
    ),
}
"""Command -> the module whose `main(arguments) -> exit status` it is, and what it does."""

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
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        from lockstep import __version__

        print(__version__)
        return 0
    spellings = {name.replace("_", "-"): name for name in (*COMMANDS, *ALGORITHMS)}
    name = spellings.get(arguments[0].replace("_", "-"))
    if name is None:
        print(_unknown(arguments[0], spellings), file=sys.stderr)
        return 2
    is_algorithm = name in ALGORITHMS
    module = COMMANDS["ppo" if is_algorithm else name][0]
    if module.startswith("lockstep.trainer.main_") and not {"-h", "--help"} & set(arguments):
        from lockstep import __version__

        # Before the imports, which take seconds on a busy machine: the reader knows at once that something happens.
        print(f"lockstep {__version__}: {name}", flush=True)
    command: Callable[..., int] = importlib.import_module(module).main
    return command(arguments[1:], algorithm=name) if is_algorithm else command(arguments[1:])


def _help() -> str:
    import textwrap

    training = {name for name, (module, _) in COMMANDS.items() if module.startswith("lockstep.trainer.main_")}
    algorithms = textwrap.fill(" ".join(ALGORITHMS), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    parts = [
        "usage: lockstep <command> [arguments]; lockstep <command> --help says more",
        "\ntrain:",
        *(f"  {name:15}{about}" for name, (_, about) in COMMANDS.items() if name in training),
        "\ntrain with the preset of an algorithm (ppo with other defaults):",
        algorithms,
        "\nbefore, during and after:",
        *(f"  {name:15}{about}" for name, (_, about) in COMMANDS.items() if name not in training),
    ]
    return "\n".join(parts)


def _unknown(word: str, spellings: dict[str, str]) -> str:
    import difflib

    near = difflib.get_close_matches(word.replace("_", "-"), spellings, n=1, cutoff=0.0)[0]
    return f"error: unknown command '{word}'; the nearest is '{spellings[near]}' (all of them: lockstep --help)"


if __name__ == "__main__":
    sys.exit(main())
