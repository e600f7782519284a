"""Every benchmark runs: at a tiny size on a CPU, or its command line can be read where it needs a GPU."""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks import launch, workload
from lockstep.embedded.task import make_tokenizer, make_words, model_config, write_prompts

ROOT = Path(__file__).parents[1]
MODULES = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}

PARTS = {"forked", "kernels", "one_by_one", "workload"}
"""What other benchmarks import; these have no command line."""
GPU_ONLY = {"attention", "decode_step"}
SHAPE = "--shape tiny --device cpu"
STEP = "--prompts 2 --n 2 --prompt 8 --response 4"
TINY = {
    "agents": f"{SHAPE} --episodes 2 --check 1 --waiting 2 --repeats 1 --turns 2 --observation 8 --turn-tokens 2 --long-turn-tokens 2",
    "auto": "--shapes tiny --prompts 1 --device cpu --rounds 1 --results {out}",
    "auto_steps": "--source {gsm8k} --model {model} --device cpu --prompts 2 --n 2 --response 4 --steps 2 --lines auto --results {out}",
    "curves": "grpo --runs {out}/runs --picture {out}/curves.svg --keys {curve}",
    "data": "--gsm8k {gsm8k}/train.jsonl --rows 11000 --repeats 1 --out {out}/data.json",
    "engines": f"{SHAPE} {STEP} --strategy fsdp2 --updates 1",
    "eval": "--model {model} --source {gsm8k} --limit 2 --max-tokens 2 --name tiny",
    "intervals": "--simulations 4 --questions 8 --out {out}/intervals.json",
    "launch": f"{SHAPE} {STEP} --steps 1",
    "learn": "--source {gsm8k} --tiny --device cpu --steps 1 --rows 8 --sft-epochs 0 --prompts 2 --n 2 --response 4 "
    "--val-samples 2 --val-freq 1 --out {out}/runs --results {out}",
    "plan": "",
    "rollout": f"{SHAPE} --load fixed --prompts 1 --n 2 --response 4 --repeats 0 --out {{out}}",
    "rollout_cpu": "--model {model} --requests 2 --repeats 1 --engines native,transformers --out {out}/rollout_cpu.json",
    "rollout_cpu_parts": "--model {model} --requests 2",
    "router_replay": "--layers 1 --hidden 32 --experts 4 --top-k 2 --prompts 1 --n 2 --tokens 4",
    "sandbox": "--data {code} --tasks 2 --out {out}/sandbox.json",
    "saves": f"{SHAPE} --updates 1 --saves 2 --rows 1 --folder {{out}}",
    "serve": "--model {model} --requests 2 --clients 2 --repeats 1 --num-tokens 4096 --port 8471 --out {out}/serve.json",
    "step": f"{SHAPE} {STEP} --steps 1 --algorithm grpo",
    "stream": "--model {model} --device cpu --clients 2 --requests 2 --conversation 100 --repeats 1 --out {out}",
    "switches": f"{SHAPE} --updates 1",
    "terminal": "",
    "updates": f"{SHAPE} --rows 2 --prompt 8 --response 4 --updates 1 --recipes dpo",
}
"""Benchmark -> the arguments of a run of a few seconds."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model with a tokenizer whose vocabulary has every token of the loads, and files as those of GSM8K and HumanEval."""
    folder = tmp_path_factory.mktemp("benchmarks")
    options = launch._parser().parse_args(["--shape", "tiny", "--device", "cpu", "--prompts", "1", "--steps", "1"])
    launch._write_files(options, folder)
    torch.manual_seed(0)
    config = workload.model_config("tiny", max_position_embeddings=4096)
    config.vocab_size = 49_152
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "gsm8k").mkdir()
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1}"} for i in range(16)]
    for name in ("train", "test"):
        (folder / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "code").mkdir()
    task = {
        "task_id": "0", "prompt": "def one():\n", "canonical_solution": "    return 1\n", "code": "def one():\n    return 1\n",
        "test": "def check(f):\n    assert f() == 1\n", "entry_point": "one", "test_list": ["assert one() == 1"],
    }  # fmt: skip
    for name in ("humaneval", "mbpp"):
        (folder / "code" / f"{name}.jsonl").write_text(2 * (json.dumps(task) + "\n"))
    tokenizer = make_tokenizer()
    LlamaForCausalLM(model_config(tokenizer)).save_pretrained(folder / "words")
    tokenizer.save_pretrained(folder / "words")
    words = write_prompts(folder, "words", make_words(0)[:8])
    keys = {
        "actor_rollout_ref.model.path": folder / "words",
        "data.train_files": words,
        "data.val_files": words,
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "data.val_max_samples": 4,
        "actor_rollout_ref.rollout.n": 2,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        "trainer.total_training_steps": 1,
    }
    curve = " ".join(f"{key}={value}" for key, value in keys.items())
    return {name: str(folder / name) for name in ("model", "gsm8k", "code")} | {"curve": curve}


def test_every_benchmark_is_run() -> None:
    assert PARTS | GPU_ONLY | set(TINY) == MODULES


@pytest.mark.parametrize("name", sorted(GPU_ONLY))
def test_the_command_line_of_a_benchmark_for_gpus_can_be_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    module = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(GPU_ONLY))
def test_what_a_benchmark_for_gpus_imports_is_there(name: str) -> None:
    """Without Triton it cannot be imported here, so this reads the files."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep")]
    assert taken
    for node in taken:
        path = ROOT / str(node.module).replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.is_file(), node.module
        text = file.read_text()
        for item in node.names:
            assert re.search(rf"\b{item.name}\b", text) or (path / f"{item.name}.py").is_file(), f"{node.module}.{item.name}"


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_benchmark_runs_at_a_tiny_size(
    name: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    module: Any = importlib.import_module(f"benchmarks.{name}")
    results = tmp_path / "results"
    results.mkdir()
    if name == "data":
        monkeypatch.setattr(module, "NUM_TOKENISED", 2 * module.STEP)
    if hasattr(module, "RESULTS"):
        monkeypatch.setattr(module, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", [name, *TINY[name].format(out=results, **files).split()])
    monkeypatch.setattr(sys, "stdin", io.StringIO("lockstep 0.1: ppo\nstep 5/5  reward 0.5\n"))  # the terminal's benchmark reads it
    monkeypatch.chdir(ROOT)
    assert module.main() in (None, 0)
    assert capsys.readouterr().out or list(results.glob("*.json"))
