"""`lockstep compare BATCH`: one recorded batch, several algorithms, and what each would do with it."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lockstep.errors import ConfigError, DataError, as_command
from lockstep.observability.waiting import shown_work

_RECORD = (
    "trainer.total_training_steps=1",
    "trainer.critic_warmup=0",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.experiment_name=record_batch",
    "trainer.resume_mode=disable",
    "critic.enable=true",
)
"""What --record runs by default: one step, with a critic so that the batch has its values."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Compare, or record; return 0 if at least two algorithms could be compared, 1 if the command cannot be run."""
    overrides = [text for text in arguments if re.match(r"\+*[a-z_]+\.[\w.]+=", text)]
    given = _parser().parse_args([text for text in arguments if text not in overrides])
    if given.record is not None:
        _record(given.record, overrides)
    elif given.batch is not None:
        _compare(given, overrides)
    else:
        raise ConfigError("name a recorded batch, or make one with --record DIR (lockstep compare --help)")
    return 0


def _compare(given: argparse.Namespace, overrides: Sequence[str]) -> None:
    with shown_work("comparing"):
        from lockstep.config.load import read_overrides
        from lockstep.tools.compare.algorithms import ALGORITHMS, read_algorithms
        from lockstep.tools.compare.measure import compare
        from lockstep.tools.compare.report import draw_comparison, print_comparison
        from lockstep.trainer.ppo.recording import load_recording

        algorithms = read_algorithms(given.algorithms or list(ALGORITHMS))
        changes = read_overrides(overrides)
        recording = load_recording(given.batch)
        out = given.out or recording.folder
        comparison = compare(
            recording,
            algorithms,
            changes=changes,
            model=given.model,
            drift=given.drift,
            num_tokens=given.tokens,
        )
    print_comparison(comparison, sys.stdout)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.json").write_text(comparison.to_json())
        (out / "compare.svg").write_text(draw_comparison(comparison))
    except OSError as error:
        raise DataError(f"the results cannot be written to {out}: {error}; name another folder with --out") from error
    print(f"numbers: {out / 'compare.json'}   picture: {out / 'compare.svg'}")


def _record(directory: Path, overrides: Sequence[str]) -> None:
    from lockstep.config import load_config
    from lockstep.trainer.main_ppo import run

    run(load_config([*_RECORD, f"trainer.record_batch_dir='{directory}'", *overrides]))
    print(f"compare with: lockstep compare {directory}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lockstep compare",
        description="One recorded batch, several algorithms: gradient norms, cosines, clip fractions, and the tokens each pushes most.",
        epilog="key=value changes the configuration of every algorithm (with --record: of the run). An algorithm is a name (ppo, grpo, "
        "dapo, ...), an advantage estimator, LOSS+ESTIMATOR, file.py:function, or file.yaml with keys of the configuration; "
        "loss_kwargs={name: number} behind it are the arguments of its loss. The batch "
        "is unpickled: read only folders you trust.",
    )
    parser.add_argument("batch", type=Path, nargs="?", help="the folder of a recorded batch")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="what to compare; without it, every named algorithm")
    parser.add_argument(
        "--model", type=Path, help="the policy to update; without it, the one that wrote the batch (every ratio is 1)"
    )
    parser.add_argument(
        "--drift", type=_positive, metavar="LR", help="first move the policy by one optimizer step of the first algorithm"
    )
    parser.add_argument(
        "--tokens", type=_count, default=10, metavar="N", help="most pushed tokens to keep, up and down (default 10)"
    )
    parser.add_argument("--out", type=Path, help="where compare.json and compare.svg go; without it, beside the batch")
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="train one step and record its batch in DIR instead of comparing"
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a learning rate; expected a number above 0, such as 1e-4")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a count; expected a whole number of at least 0")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Errors as every other command prints them."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (lockstep compare --help)")
