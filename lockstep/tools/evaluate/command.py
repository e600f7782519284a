"""`lockstep eval MODEL|CHECKPOINT|RUN|http://server (--task NAME | --data FILES) [key=value ...]`. See docs/eval.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from lockstep import __version__
from lockstep.checkpoint import folders
from lockstep.config import PPOConfig, load_config
from lockstep.config.data import EMBEDDED
from lockstep.config.load import read_overrides
from lockstep.config.sampling import SamplingConfig
from lockstep.errors import ConfigError, as_command
from lockstep.observability.safe_console import SafeConsole
from lockstep.observability.waiting import shown_work
from lockstep.tools.load_model import add_model_arguments, find_model, load_model_of, names_options

if TYPE_CHECKING:
    from lockstep.data.preprocess.main import Account
    from lockstep.tools.evaluate.answerers import Answerer, AnswerSampling
    from lockstep.tools.evaluate.questions import Question

TASK_NAMES = ("gsm8k", "math", "hellaswag", "humaneval", "mbpp")
_KEY = re.compile(r"[a-z_]+(\.\w+)+=")
_READ_OF_DATA = ("data.", "reward.", "trainer.seed.")
_READ_OF_RUN = ("actor_rollout_ref.rollout.val_kwargs.", "actor_rollout_ref.rollout.stop.", "trainer.seed.")
_READ_OF_TASK = ("data.train_files.", "reward.sandbox.", "reward.timeout_s.", "reward.num_workers.", "reward.max_memory_mb.")
"""The keys that change what `--data`, a run beside it, and `--task` give, each with a point behind it."""
_WIDTH = 140
"""Columns of the table where there is no terminal."""


@dataclasses.dataclass(frozen=True, slots=True)
class EvalPlan:
    """All that is known before a model is loaded."""

    questions: list[Question]
    template: dict[str, Any]
    drawing: AnswerSampling
    judging: dict[str, Any]
    """The arguments of RewardManager."""
    judges: list[Any]
    """Who judges each question; empty where the answer is a choice."""
    shown: list[str] | None
    """The scores to sum up; None: as the reward says."""
    train_files: Any
    """Where to look for the questions; None: nowhere."""
    account: Account | None
    """A task's rows, and those that cannot be used."""


@as_command
@names_options
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = read_arguments(arguments)
    from lockstep.tools.evaluate.results import print_table

    console = SafeConsole(width=None if sys.stdout.isatty() else _WIDTH, markup=False, highlight=False, emoji=False)
    results = evaluate(options, console)
    print_table(results, console)
    console.print(f"results and samples: {results['folder']}", soft_wrap=True)
    return 0


def evaluate(options: argparse.Namespace, console: SafeConsole | None = None) -> dict[str, Any]:
    """Evaluate as the options of the command say; returns what results.json has, and writes it and samples.jsonl.

    Raises LockstepError for a model, data or a reward that cannot be used, all but the model before it is loaded.
    """
    from lockstep.tools.evaluate.questions import digest
    from lockstep.tools.evaluate.results import (
        check_against,
        compare_with,
        question_entries,
        read_results,
        source_rows,
        summarise,
        write_samples,
    )
    from lockstep.tools.evaluate.scoring import ask_and_judge, choose

    is_server = options.model.startswith(("http://", "https://"))
    earlier = read_results(options.against) if options.against else None
    server = _server(options) if is_server else None
    with shown_work("reading the questions"):
        plan = _plan(options, server)
    drawing = dataclasses.asdict(plan.drawing)
    differs = check_against(earlier, plan.questions, plan.judges, plan.template, drawing) if earlier is not None else []
    folder = _folder(options)
    answerer = server or _local(options, plan)
    started = time.monotonic()
    try:
        has_bar = console is not None and console.is_terminal
        with (
            nullcontext() if has_bar else shown_work(f"answering {len(plan.questions)} questions"),
            Progress(console=console, transient=True, disable=not has_bar) as progress,
        ):
            bar = progress.add_task("answering", total=len(plan.questions) * plan.drawing.n)
            if plan.questions[0].choices:
                samples = choose(answerer, plan.questions)
            else:
                samples = ask_and_judge(answerer, plan.questions, plan.drawing, plan.judging, lambda: progress.advance(bar))
    finally:
        answerer.close()
    seconds = time.monotonic() - started
    write_samples(folder / "samples.jsonl", plan.questions, samples)
    found = summarise(plan.questions, samples, plan.shown)
    results: dict[str, Any] = {
        "lockstep": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "folder": str(folder),
        "model": answerer.about(),
        "template": plan.template,
        "sampling": drawing,
        "judges": {digest(judge): judge for judge in plan.judges},
        "seconds": round(seconds, 3),
        "num_tokens": sum(sample.num_tokens or 0 for sample in samples),
        "results": found,
    }
    if plan.account is not None:
        results["source_rows"] = source_rows(plan.account)
    if plan.train_files is not None:
        results["contamination"] = _contamination(plan, samples, found)
    if earlier is not None:
        differences = compare_with(plan.questions, samples, found, earlier)
        results["against"] = {"file": str(options.against), "differences": differences, "differs": differs}
        results["against"]["same_template"] = earlier.get("template", {}).get("hash") == plan.template.get("hash")
    results["questions"] = question_entries(plan.questions, samples, plan.judges)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def _plan(options: argparse.Namespace, server: Any) -> EvalPlan:
    """Read questions, rewards and sampling, and check them."""
    from lockstep.rewards.manager import RewardManager
    from lockstep.tools.evaluate.questions import data_questions
    from lockstep.tools.evaluate.results import judges_of
    from lockstep.tools.evaluate.scoring import Texts
    from lockstep.tools.evaluate.tasks import TASKS, load_task
    from lockstep.trainer.run.setup import reward_arguments
    from lockstep.utils.tokenizer import hf_tokenizer

    config, is_run = _config(options)
    tokenizer = None if server else hf_tokenizer(find_model(options.model, options.adapter).path, options.trust_remote_code)
    files = options.data or (config.data.val_files if is_run and not options.task else None)
    if files is not None and options.task is not None:
        raise ConfigError(f"--data and --task {options.task} are two things to ask; name one of them")
    if files is None and options.task is None:
        raise ConfigError("name what to ask: --task NAME, or --data FILES; only a PPO run has files of its own (data.val_files)")
    _refuse_unread(options, is_run)
    judging = reward_arguments(config.reward)
    stop: tuple[str, ...] = ()
    max_tokens: int = config.data.max_response_length
    shown = account = None
    if options.task:
        form = options.format or ("chat" if tokenizer is None or tokenizer.chat_template else "plain")
        questions, template, account = load_task(options.task, options.source, form, options.shots, options.limit)
        task = TASKS[options.task]
        stop = tuple(template["stop"])
        max_tokens = task.max_tokens
        judging |= {"compute_score": task.grade, "weights": None, "functions": None}
        shown = ["strict", "flexible"] if task.grade else ["acc", "acc_norm"]
    else:
        questions, template = data_questions(config, files, tokenizer, options.limit)
    drawing = _drawing(options, config, is_run, stop, max_tokens)
    judges: list[Any] = []
    if not questions[0].choices:
        manager = RewardManager(tokenizer=Texts(0), num_examine=0, **judging)  # type: ignore[arg-type]
        manager.check({question.tag for question in questions}, validation=True)
        judges = judges_of(questions, manager, _sandbox_settings(config))
        manager.close()
    trained_on = config.data.train_files
    return EvalPlan(questions, template, drawing, judging, judges, shown, None if trained_on == EMBEDDED else trained_on, account)


def _sandbox_settings(config: PPOConfig) -> dict[str, Any]:
    """What decides whether a program passes, besides itself."""
    sandbox = config.reward.sandbox
    return {"wall_s": sandbox.wall_s, "memory_limit_mb": sandbox.memory_limit_mb}


def _drawing(
    options: argparse.Namespace, config: PPOConfig, is_run: bool, stop: tuple[str, ...], max_tokens: int
) -> AnswerSampling:
    """As a run validates, or greedily; the command's own options first."""
    from lockstep.tools.evaluate.answerers import AnswerSampling

    values: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop}
    if is_run:
        names = [field.name for field in dataclasses.fields(SamplingConfig)]
        rollout = config.actor_rollout_ref.rollout
        values |= {name: getattr(rollout.val_kwargs, name) for name in names} | {"seed": config.trainer.seed}
        values["stop"] = stop or tuple(rollout.stop)
    given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(AnswerSampling)}
    return AnswerSampling(**values | {name: value for name, value in given.items() if value is not None})


def _config(options: argparse.Namespace) -> tuple[PPOConfig, bool]:
    """The configuration that rewards and data are read with: a PPO run's own, under what the command line says; whether it is a run's."""
    from omegaconf import OmegaConf

    path = Path(options.model).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        file = folder / "config.yaml"
        if file.is_file() and folders.found(folder) and "actor_rollout_ref" in OmegaConf.load(file):
            return load_config(options.overrides, file), True
    # The model is not the configuration's to name; without one, the configuration would mean the embedded task.
    return load_config(["actor_rollout_ref.model.path=none", *options.overrides]), False


def _refuse_unread(options: argparse.Namespace, is_run: bool) -> None:
    """Raise ConfigError for an option or a key of the command line that would be ignored."""
    for name in ("source", "shots", "format"):
        if not options.task and getattr(options, name) is not None:
            raise ConfigError(f"--{name} is about a task; leave it out, or name the --task")
    if options.adapter is not None and options.model.startswith(("http://", "https://")):
        raise ConfigError("--adapter goes into a model that is loaded here; a server is asked as it is")
    read = (_READ_OF_TASK if options.task else _READ_OF_DATA) + (_READ_OF_RUN if is_run else ())
    for key in read_overrides(options.overrides):
        if not f"{key}.".startswith(read):
            what = f"--task {options.task}, which has its own prompts and judge" if options.task else "what is asked here"
            raise ConfigError(
                f"{key} changes nothing of {what}; leave it out (sampling: --temperature, --max-tokens and others of lockstep eval --help)"
            )


def _server(options: argparse.Namespace) -> Any:
    from lockstep.tools.evaluate.answerers import ServerModel

    return ServerModel(options.model, options.served_model, options.concurrency, options.timeout)


def _local(options: argparse.Namespace, plan: EvalPlan) -> Answerer:
    from lockstep.tools.evaluate.answerers import LocalModel

    loaded = load_model_of(options)
    kwargs = plan.template.get("template_kwargs") or {}
    return LocalModel(options.model, loaded.engine, loaded.tokenizer, loaded.stop_token_ids, kwargs, loaded.source.step)


def _folder(options: argparse.Namespace) -> Path:
    """A new folder for the results."""
    name = options.model.rstrip("/").split("://")[-1].replace("/", "-")[-60:].strip("-.")
    what = options.task or "data"
    folder: Path = options.out or Path("evals") / f"{name}-{what}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / "results.json").exists():
        raise ConfigError(f"--out {folder} has results already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be made: {error}") from error
    return folder


def _contamination(plan: EvalPlan, samples: Any, found: dict[str, Any]) -> dict[str, Any]:
    from lockstep.tools.evaluate.questions import NUM_WORDS, find_contaminated, num_too_short, training_texts
    from lockstep.tools.evaluate.results import mean_scores

    hit = find_contaminated(plan.questions, training_texts(plan.train_files))
    return {
        "train_files": plan.train_files if isinstance(plan.train_files, str) else list(plan.train_files),
        "num_words": NUM_WORDS,
        "num_questions": len(plan.questions),
        "num_contaminated": len(hit),
        "num_too_short": num_too_short(plan.questions),
        "questions": [plan.questions[i].hash for i in sorted(hit)],
        "without": mean_scores(plan.questions, samples, found, hit) if hit else {},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep eval",
        description="Ask a model, judge its answers, say how sure the numbers are.",
        epilog="The keys are those of lockstep ppo: reward.* chooses the judge of --data, data.train_files is searched for the questions.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, as for lockstep ppo")
    what = parser.add_argument_group("what is asked")
    what.add_argument("--task", choices=TASK_NAMES, help="one of the tasks that ship")
    what.add_argument(
        "--source", nargs="+", metavar="PATH", help="the task's own files, as for lockstep preprocess (default: the hub)"
    )
    what.add_argument(
        "--data", nargs="+", metavar="FILE", help="files of prompts, as for lockstep ppo (default for a run: data.val_files)"
    )
    what.add_argument("--limit", type=_count, metavar="N", help="the first N questions only")
    what.add_argument("--shots", type=int, metavar="N", help="examples before each question of a task")
    what.add_argument(
        "--format", choices=("chat", "plain"), help="how a task is asked (default: chat where the model has a template)"
    )
    how = parser.add_argument_group("how answers are drawn (default: as the run validates, else the likeliest tokens)")
    how.add_argument("--n", type=int, help="answers to each question")
    how.add_argument("--temperature", type=float)
    how.add_argument("--top-p", type=float)
    how.add_argument("--top-k", type=int)
    how.add_argument("--min-p", type=float)
    how.add_argument("--max-tokens", type=int, help="the longest answer")
    how.add_argument("--seed", type=int)
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier results.json: differences question by question")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results.json and samples.jsonl go (default: evals/...)")
    server = parser.add_argument_group("for a server")
    server.add_argument("--served-model", metavar="NAME", help="which of the server's models")
    server.add_argument("--concurrency", type=_count, default=64, metavar="N", help="requests at once (default 64)")
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait for an answer (default 600)")
    return parser


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `key=value` after the files of --data or --source is a key as well."""
    options = _parser().parse_intermixed_args(list(arguments))
    for name in ("data", "source"):
        words = getattr(options, name) or []
        keys = [word for word in words if _KEY.match(word)]
        options.overrides += keys
        setattr(options, name, [word for word in words if word not in keys] or None)
    return options


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
