"""How near `lockstep plan` comes to what was measured: every committed H200 result beside its prediction, as a table.

    python -m benchmarks.plan                  print it
    python -m benchmarks.plan --page docs/plan.md      write it into the page

Rows of FIT are those that the constants of lockstep/planner were fitted to. The others were not, but the form of the model was
chosen with all of them known: new shapes are the real test.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import LOADS, MIXTURES, SHAPES, model_config
from lockstep.config import as_config
from lockstep.config.engine import ModelConfig
from lockstep.config.sft import ExamplesConfig, SFTConfig
from lockstep.config.stage import LearnerConfig
from lockstep.models.load import Head
from lockstep.planner import decode
from lockstep.planner.hardware import find_device
from lockstep.planner.needs import reusing_models
from lockstep.planner.prediction import Lengths, predict, predict_stage
from lockstep.planner.time import Ranks, RowGroups, Shape, read_shape, update_s

RESULTS = Path(__file__).parent / "results"
H200 = find_device("h200")
STEPS = "decode_step_loads_first_2026-11-18"
"""Single decode steps of few rows."""
FEW_ROWS_SINCE = "2026-11-18"
"""Kernels for few rows have changed since older results, so that only loads without a tail of few rows are read from these."""
GATHERED = {("step_7b_lora_2026-11-18", "update_actor", "GiB")}
"""Measured while one rank still gathered weights that it kept in the type of the computation already: 14 GiB of these 63."""
FIT = {
    *((STEPS, step, "ms") for step in (
        "0.5b,32,512", "0.5b,32,16000,fp8", "0.5b,32,32000,fp8", "135m,32,300", "1.5b,16,3500", "1.5b,32,512", "1.5b,32,2400",
        "1.5b,48,1900", "1.5b,64,1700", "1.5b,96,1400", "1.5b,128,1200",
    )),
    ("step_1.5b_2026-11-15", "update_actor", "s"), ("step_1.5b_2026-11-15", "old_log_prob", "s"),
    ("step_1.5b_ppo_2026-11-15", "update_critic", "s"), ("rollout_1.5b_2026-11-15", "fixed", "s"),
    ("rollout_0.5b_2026-11-15", "fixed", "s"), ("launch_1.5b_2026-11-15", "update_actor", "GiB"),
    ("updates_1.5b_long_2026-11-18", "update of grpo 16000", "s"), ("updates_1.5b_long_2026-11-18", "update of grpo 32384", "s"),
}  # fmt: skip
_MOST_TOKENS = 65_536
"""Of a micro-batch whose size was chosen, where all of it fits."""
_BEGIN, _END = "<!-- python -m benchmarks.plan -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Case:
    """One number, predicted and measured."""

    file: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_fit(self) -> bool:
        return (self.file, self.what, self.unit) in FIT


def cases() -> list[Case]:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder, reusing_models():
        for name in (*SHAPES, *MIXTURES):
            kind = "Qwen2ForCausalLM" if name in SHAPES else "Qwen3MoeForCausalLM"
            model_config(name, architectures=[kind]).save_pretrained(Path(folder, name))
        found = [case for file in sorted(RESULTS.glob("*.json")) for case in _of_file(file, Path(folder))]
    return [case for case in found if case.measured and (case.file, case.what, case.unit) not in GATHERED]


def _of_file(file: Path, models: Path) -> Iterator[Case]:
    kind, result = file.stem.split("_")[0], json.loads(file.read_text())
    if kind in ("step", "launch"):
        yield from _steps(file.stem, result, models)
    elif (
        kind == "rollout"
        and result.get("hardware") == "NVIDIA H200"
        and not set(file.stem.split("_")) & {"generic", "invariant", "lora"}
    ):
        yield from _rollouts(file.stem, result, models)
    elif kind == "updates":
        yield from _updates(file.stem, result, models)
    elif file.stem == STEPS:
        yield from _decode_steps(file.stem, result, models)


def _steps(name: str, result: dict[str, Any], models: Path) -> Iterator[Case]:
    asked = result["arguments"]
    (algorithm, run), *_ = result["steps"].items() if "steps" in result else [(asked["algorithm"], result)]
    config = as_config(
        {
            "data": {"train_files": "rows", "train_batch_size": asked["prompts"], "max_prompt_length": asked["prompt"],
                     "max_response_length": asked["response"]},
            "actor_rollout_ref": {
                "model": {"path": str(models / asked["shape"]), "recompute": asked.get("recompute", "auto"),
                          "lora_rank": asked.get("lora", 0), "lora_alpha": max(1, asked.get("lora", 0))},
                "actor": {"ppo_max_token_len_per_gpu": asked["max_tokens"]},
                "rollout": {"n": asked["n"], "max_num_seqs": 1024},
            },
            "critic": {"ppo_max_token_len_per_gpu": asked["max_tokens"]},
            "algorithm": {"adv_estimator": "gae" if algorithm == "ppo" else "grpo"},
        }
    )  # fmt: skip
    lengths = Lengths(asked["prompt"], run["metrics"].get("response_length/mean", asked["response"]))
    found = predict(config, H200, lengths, passes=run["stage_s"])
    for stage in (*found.seconds, "step"):
        peak = run["metrics"].get(f"perf/max_memory_allocated_gb/{stage}")
        if peak:
            yield Case(name, stage, "GiB", found.memory[stage].total() / 2**30, peak)
        # How long a mixture takes is not predicted: its products are smaller than those of a dense model with as many weights.
        if asked["shape"] in SHAPES and run["stage_s"].get(stage, 0) > 0.1:
            yield Case(name, stage, "s", found.step_s if stage == "step" else found.seconds[stage], run["stage_s"][stage])


def _shape(models: Path, name: str) -> Shape:
    return read_shape(ModelConfig(path=str(models / name)), Head.LANGUAGE_MODEL)


def _rollouts(name: str, result: dict[str, Any], models: Path) -> Iterator[Case]:
    shape = _shape(models, result["arguments"]["shape"])
    kept = result["arguments"].get("kv_cache_dtype") or "auto"
    for row in result["rows"]:
        if not row["runs_s"]:  # the first run compiles and captures
            continue
        if row["load"] != "fixed" and result["date"] < FEW_ROWS_SINCE:
            continue
        load = LOADS[row["load"]]()
        work = decode.Generation([len(ids) for ids in load.prompts], load.lengths, 8, result["arguments"]["max_num_seqs"])
        yield Case(name, row["load"], "s", decode.generate_s(shape, work, H200, kept=kept), min(row["runs_s"]))


def _decode_steps(name: str, result: dict[str, Any], models: Path) -> Iterator[Case]:
    for step in result["steps"]:
        shape, rows, kept = _shape(models, step["shape"]), step["rows"], step["kv_cache_dtype"]
        seconds = decode.step_s(shape, rows, rows * step["context"] * shape.token_bytes(2, kept), H200, 2)
        what = f"{step['shape']},{rows},{step['context']}" + ("" if kept == "auto" else f",{kept}")
        yield Case(name, what, "ms", 1000 * seconds, step["ms"])


def _updates(name: str, result: dict[str, Any], models: Path) -> Iterator[Case]:
    asked = result["arguments"]
    shape = _shape(models, asked["shape"])
    counts, lengths = (value if isinstance(value, list) else [value] for value in (asked["rows"], asked["response"]))
    for what, run in result["updates"].items():
        recipe, *length = what.split()
        response = int(length[0]) if length else lengths[0]
        n = 1 if recipe == "sft" else 2 if recipe == "dpo" else asked.get("n", 2)  # those that share a prompt
        budget = asked["max_tokens"] if asked["max_tokens"] != "auto" else _MOST_TOKENS
        rows = RowGroups(counts[lengths.index(response)] / n, n, asked["prompt"], response, budget)
        seconds = update_s(shape, rows, H200, Ranks(1, 1, 1), run.get("recompute", "none"), 1, shape.parameters)
        yield Case(name, f"update of {what}", "s", seconds, run["update_s"])
    if "sft" not in result["updates"]:
        return
    config = SFTConfig(
        model=ModelConfig(path=str(models / asked["shape"])),
        data=ExamplesConfig(train_files="x", train_batch_size=counts[0], max_length=asked["prompt"] + lengths[0]),
        engine=LearnerConfig(max_token_len_per_gpu=asked["max_tokens"]),
    )
    found = predict_stage(config, H200, Lengths(asked["prompt"], lengths[0]))
    yield Case(name, "update of sft", "GiB", found.peak / 2**30, result["updates"]["sft"]["peak_gb"])


def table(found: Sequence[Case]) -> str:
    """As Markdown, what was not fitted first."""
    lines = ["| result | what | predicted | measured | error | |", "|---|---|---|---|---|---|"]
    for case in sorted(found, key=lambda case: (case.is_fit, case.unit, case.file)):
        fit, digits = "calibrated with" if case.is_fit else "", 2 if case.unit == "ms" else 1
        numbers = f"{case.predicted:.{digits}f} {case.unit} | {case.measured:.{digits}f} | {case.error:+.1%}"
        lines.append(f"| {case.file} | {case.what} | {numbers} | {fit} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args(arguments)
    text = table(cases())
    if options.page is None:
        print(text)
        return
    page = options.page.read_text()
    marked = re.compile(f"{re.escape(_BEGIN)}\n.*?{re.escape(_END)}", re.DOTALL)
    options.page.write_text(marked.sub(lambda _: f"{_BEGIN}\n{text}\n{_END}", page))


if __name__ == "__main__":
    main()
