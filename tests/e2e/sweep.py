"""The sweep: random valid configurations, each trained twice with a difference that must not matter.

    PYTHONPATH=.:tests python tests/e2e/sweep.py --count 500 --out benchmarks/results/sweep.json

A case is a function of its number alone, so one that failed is run again with `--first NUMBER --count 1`. `test_sweep.py` runs the first
ones. The file has what is known after every case; `--go-on` takes up where it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.run import make_trainer, read_metrics, roles

from lockstep.algorithms.aggregation import LOSS_AGG_MODES
from lockstep.config import load_config
from lockstep.embedded import EmbeddedTask, prepare
from lockstep.errors import RewardError
from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
STEPS = 2
ESTIMATORS = (
    "gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "remax", "rloo", "tir_optimal_token_baseline",
)  # fmt: skip
LOSSES = ("cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo", "vanilla")
"""Named here, in this order: a case must not change when there is one more."""
ROUNDING = 1e-4
"""A gradient norm below it may be that of rounding alone."""
TOLERANCE = 1e-3
"""Where sums are taken in another order: of a gradient's norm, relative; of a loss or an entropy, absolute below 1 and relative above.

Not of weights: AdamW's first steps are the signs of the gradient, so an element whose gradient is rounding moves by the learning rate.
That is small here, so that the runs stay together.
"""
COMPARED = (
    "actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "actor/ppo_kl", "critic/grad_norm",
    "critic/vf_loss", "critic/advantages/mean", "critic/advantages/max", "critic/values/mean", "training/rollout_probs_diff_mean",
)  # fmt: skip
EQUAL = ("response_length/mean", "critic/score/mean", "training/num_gen_batches", "training/groups_with_signal", "actor/lr")
CHANGES = {
    "token budget": ([f"{ACTOR}.ppo_max_token_len_per_gpu=40", "critic.ppo_max_token_len_per_gpu=60"], False),
    "micro-batches": ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=3", "critic.ppo_micro_batch_size_per_gpu=2"], False),
    "max_num_seqs": ([f"{ROLLOUT}.max_num_seqs=3"], False),
    "max_num_batched_tokens": ([f"{ROLLOUT}.max_num_batched_tokens=24"], False),
    "recompute": ([f"{MODEL}.recompute=full", "critic.model.enable_gradient_checkpointing=false"], False),
    "recording": (["trainer.record_batch_dir={folder}/recorded", "trainer.record_batch_freq=1"], False),
    "saves": (["trainer.save_freq=1"], True),
    "validation": (["trainer.test_freq=1", "trainer.val_before_train=true"], True),
    "samples": (["trainer.rollout_data_dir={folder}/samples"], True),
    "offload": (["actor_rollout_ref.actor.fsdp_config={param_offload: true, optimizer_offload: true}"], True),
    "resume": (["trainer.save_freq=1"], True),
}
"""What must not matter -> the overrides that change it, and whether the results are then the same to the last bit."""


@dataclass(frozen=True)
class Case:
    """One pair of runs. The schedule of the learning rate does not depend on the number of steps: a resumed run has had fewer first."""

    number: int
    overrides: tuple[str, ...]
    change: str


def case(number: int) -> Case:
    """The case of this number."""
    draw = random.Random(f"sweep {number}")
    estimator = draw.choice(ESTIMATORS)
    loss = draw.choice(LOSSES)
    n, size = draw.choice([2, 2, 3]), draw.choice([2, 4])
    overrides = [
        f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n={n}", f"{ACTOR}.ppo_mini_batch_size={size}",
        f"{ACTOR}.ppo_epochs={draw.choice([1, 1, 2])}", f"{ACTOR}.shuffle={draw.choice(['true', 'false'])}",
        f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.policy_loss.clip_cov_ratio=0.2", f"{ACTOR}.policy_loss.kl_cov_ratio=0.2",
        f"{ACTOR}.loss_agg_mode={draw.choice(LOSS_AGG_MODES)}", f"{ACTOR}.entropy_coeff={draw.choice([0.0, 0.0, 0.01])}",
        f"{ACTOR}.clip_ratio_high={draw.choice([0.2, 0.28])}", f"{ACTOR}.optim.clip_grad={draw.choice([1.0, 0.1])}",
        f"{ACTOR}.optim.lr_warmup_steps={draw.choice([0, 3])}", f"trainer.seed={draw.randrange(100)}",
        f"{ROLLOUT}.temperature={draw.choice([0.7, 1.0, 1.3])}", f"{ROLLOUT}.top_k={draw.choice([-1, -1, 5])}",
        f"algorithm.norm_adv_by_std_in_grpo={draw.choice(['true', 'false'])}", f"algorithm.gamma={draw.choice([1.0, 0.99])}",
    ]  # fmt: skip
    if estimator == "gdpo":
        overrides.append("algorithm.gdpo_reward_keys=[first,second]")
    kl = draw.choice(["none", "loss", "reward"])
    if kl == "loss" or (kl == "reward" and estimator == "gdpo"):
        overrides += [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={draw.choice(['kl', 'abs', 'mse', 'low_var_kl', 'kl+'])}"]
    elif kl == "reward":
        overrides += ["algorithm.use_kl_in_reward=true", f"algorithm.kl_ctrl.type={draw.choice(['fixed', 'adaptive'])}"]
    overrides += draw.choice([
        [], [], ["algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 2.0}"],
        ["algorithm.rollout_correction={rollout_rs: seq_mean_k1, rollout_rs_threshold: 2.0}"],
        ["algorithm.filter_groups.enable=true"] if estimator != "remax" else [],
    ])  # fmt: skip
    if estimator == "gae":
        overrides.append(f"trainer.critic_warmup={draw.choice([0, 1])}")
    elif draw.random() < 0.2:
        overrides.append("reward.overlong_buffer={enable: true, len: 6}" if estimator != "gdpo" else "reward.timeout_s=20")
    return Case(number, tuple(overrides), list(CHANGES)[number % len(CHANGES)])


def reward(batch: Any, return_dict: bool = False) -> dict[str, Any]:
    """A number of the tokens alone, so that most responses to a prompt differ in it."""
    responses = batch.ragged("responses")
    first = [float(row.sum() % 7) / 7 for row in responses.rows()]
    second = [float(len(row)) for row in responses.rows()]
    tensor = torch.zeros(batch.batch["responses"].shape)
    for i, (row, score) in enumerate(zip(responses.rows(), first, strict=True)):
        if len(row):
            tensor[i, len(row) - 1] = score
    return {"reward_tensor": tensor, "reward_extra_info": {"first": first, "second": second}}


def run(task: EmbeddedTask, folder: Path, overrides: list[str], steps: int = STEPS) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The metrics of each step, and the actor's weights after the last."""
    config = load_config([
        f"data.train_files={task.train_file}", f"data.val_files={task.val_file}", "data.val_max_samples=4", "data.train_batch_size=4",
        "data.max_prompt_length=16", "data.max_response_length=12", f"{MODEL}.path={task.model}", f"{ACTOR}.optim.lr=1e-5",
        "critic.optim.lr=1e-5", f"trainer.default_local_dir={folder}", "trainer.device=cpu", "trainer.save_freq=0", "trainer.test_freq=0",
        "trainer.val_before_train=false", f"trainer.total_training_steps={steps}", "trainer.logger=[]",
        *(override.replace("{folder}", str(folder)) for override in overrides),
    ])  # fmt: skip
    names = ["ActorRollout", *(["Critic"] if config.use_critic else []), *(["RefPolicy"] if config.use_reference else [])]
    trainer: RayPPOTrainer = make_trainer(config, {"global_pool": [1]}, roles(*names), reward_fn=reward, val_reward_fn=reward)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer.init_workers()
            trainer.fit()
        (weights,) = trainer.actor_wg.export_weights()
        weights = {name: tensor.clone() for name, tensor in weights}
    finally:
        trainer.close()
    return [row for row in read_metrics(config) if "actor/lr" in row or "critic/lr" in row], weights


def difference(task: EmbeddedTask, one: Case) -> float:
    """How far the two runs of a case are apart: the largest difference of a weight where they must be the same to the last bit, else of
    what is `COMPARED` (the entropy, of the rows of an update, only where these are the same: a penalty that is rounding keeps a row in).
    0 where both stop for the same reason. Raises AssertionError when they differ in what is `EQUAL`.
    """
    changed, is_exact = CHANGES[one.change]
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows, weights = run(task, Path(folder, "plain"), list(one.overrides))
        except RewardError as error:  # no group has a signal: then the other run must find none either
            _check_fails(task, Path(folder, "other"), [*one.overrides, *changed], str(error))
            return 0.0
        if one.change == "resume":
            run(task, Path(folder, "other"), [*one.overrides, *changed], steps=1)
        other_rows, other = run(task, Path(folder, "other"), [*one.overrides, *changed])
    pairs = list(zip(rows, other_rows, strict=True))
    for row, again in pairs:
        for name in EQUAL:
            assert row.get(name) == again.get(name), f"{name} of step {row['step']}: {row.get(name)} and {again.get(name)}"
    if is_exact:
        return max((weights[name] - other[name]).abs().max().item() for name in weights)
    # A gradient of rounding alone (no advantage, and the reference is the policy) becomes a whole step in AdamW: no later number is alike.
    last = next((i for i, rows in enumerate(pairs) if all(row.get("actor/grad_norm", 1.0) < ROUNDING for row in rows)), len(pairs))
    return max(
        _apart(name, row[name], again[name])
        for row, again in pairs[: last + 1]
        for name in COMPARED
        if name in row
        and name in again
        and (name != "actor/entropy" or row.get("actor/skipped_rows") == again.get("actor/skipped_rows"))
    )


def _check_fails(task: EmbeddedTask, folder: Path, overrides: list[str], message: str) -> None:
    found = "nothing"
    try:
        run(task, folder, overrides)
    except RewardError as error:
        found = str(error)
    assert found == message, f"one run says {message!r}, the other {found!r}"


def _apart(name: str, one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), ROUNDING if name.endswith("grad_norm") else 1.0)


def failure(task: EmbeddedTask, one: Case) -> tuple[float, str]:
    """The difference of a case, and what is wrong with it ("" when nothing is)."""
    try:
        found = difference(task, one)
    except Exception as error:
        return math.nan, f"{type(error).__name__}: {str(error)[:300]}"
    is_exact = CHANGES[one.change][1]
    return found, "" if found <= (0.0 if is_exact else TOLERANCE) else f"they differ by {found:.3g}"


def sweep(task: EmbeddedTask, first: int, count: int) -> Iterator[tuple[Case, float, str]]:
    """Run the cases; yields each with its difference and what is wrong."""
    for number in range(first, first + count):
        one = case(number)
        yield one, *failure(task, one)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the result says how many cases ran")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--go-on", action="store_true", help="with the cases that --out does not have yet")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {"first": arguments.first, "count": 0, "seconds": 0, "largest_difference": {}, "failures": []}
    if arguments.go_on and arguments.out.exists():
        told |= json.loads(arguments.out.read_text())
        assert told["first"] == arguments.first, f"{arguments.out} begins with case {told['first']}"
    told |= {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "tolerance": TOLERANCE}
    began, before, largest = time.time(), told["seconds"], told["largest_difference"]
    with tempfile.TemporaryDirectory() as folder:
        task = prepare(Path(folder), seed=0)
        for one, found, wrong in sweep(task, arguments.first + told["count"], arguments.count - told["count"]):
            told["count"] += 1
            told["seconds"] = before + round(time.time() - began)
            largest[one.change] = max(largest.get(one.change, 0.0), found if math.isfinite(found) else 0.0)
            if wrong:
                told["failures"].append({"number": one.number, "change": one.change, "wrong": wrong, "overrides": one.overrides})
                print(f"{one.number} ({one.change}): {wrong}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(told, indent=1) + "\n")
            if time.time() - began > 60 * arguments.minutes:
                break
    print(json.dumps(told, indent=1))
    return 1 if told["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
