"""lm-evaluation-harness on `lockstep serve` against lm-evaluation-harness on transformers (`hf`), in float32: the same answers.

    PYTHONPATH=. .venv-eval/bin/python tests/eval/parity.py --hellaswag 200 --gsm8k 100 --out benchmarks/results/serve_lm_eval.json

The tasks are lm-eval's own HellaSwag and GSM8K, over the shortest rows of local files instead of the hub's. Compared are the
log-likelihood of every ending, whether it is the greedy one, and every generated text. --keep FILE keeps what `hf` said, which takes most
of the time, for another run. --oracle asks `hf` once more, in float64: how far either side is from what float32 rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
BOUND = 1e-4
"""How far two log-likelihoods may differ."""

Samples = dict[str, list[Any]]
"""Task -> what the model said to each request, in the order of the rows: [log-likelihood, is greedy] of each ending, or a text."""


def write_tasks(folder: Path, options: argparse.Namespace) -> None:
    """lm-eval's own tasks with local files: of the rows that are asked, the shortest, since transformers is slow on a CPU."""
    import lm_eval

    tasks = Path(lm_eval.__file__).parent / "tasks"
    generation = {"until": ["Question:", "<|im_end|>"], "do_sample": False, "max_gen_toks": options.max_tokens}
    for name, asked, count, more in (
        ("hellaswag", "val", options.hellaswag, {}),
        ("gsm8k", "test", options.gsm8k, {"num_fewshot": options.shots, "generation_kwargs": generation}),
    ):
        rows = sorted((DATA / name / f"{asked}.jsonl").read_text().splitlines(), key=len)[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        files = {
            "train": str(DATA / name / "train.jsonl"),
            "validation" if asked == "val" else asked: str(folder / f"{name}.jsonl"),
        }
        task = {
            "include": str(tasks / name / f"{name}.yaml"), "task": f"local_{name}", "dataset_path": "json", "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
        }  # fmt: skip
        (folder / f"local_{name}.yaml").write_text(yaml.safe_dump(task | more))


def evaluate(
    model: str, model_args: dict[str, Any], batch_size: int, options: argparse.Namespace, folder: Path
) -> tuple[Samples, dict[str, Any]]:
    """What a model of lm-eval's says to the tasks, and its scores."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    samples: Samples = {}
    scores: dict[str, Any] = {}
    for task, count in (("local_hellaswag", options.hellaswag), ("local_gsm8k", options.gsm8k)):
        if not count:
            continue
        started = time.monotonic()
        found = simple_evaluate(
            model=model, model_args=model_args, tasks=[task], limit=count,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            batch_size=batch_size, device="cpu", bootstrap_iters=0, log_samples=True,
        )  # fmt: skip
        rows = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        rows = list({row["doc_id"]: row for row in rows}.values())  # one for each filter
        samples[task] = [_said(response) for row in rows for response in row["resps"]]
        scores[task] = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        scores[task]["seconds"] = round(time.monotonic() - started, 1)
    return samples, scores


def _said(response: list[Any]) -> Any:
    first = response[0]
    return first if isinstance(first, str) else [float(first[0]), bool(first[1])]


@contextmanager
def served(model: str, *arguments: str) -> Iterator[str]:
    """Inside, `lockstep serve` answers at the address."""
    command = [sys.executable, "-m", "lockstep.cli", "serve", model, "--port", "0", "--device", "cpu", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("serving ")), None)
        assert line is not None, "the server did not start"
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def hf_folder() -> str:
    """The model as transformers reads it."""
    sys.path.insert(0, str(ROOT))
    from lockstep.models.source import model_folder

    return model_folder("smollm2-135m")


def compare(ours: Samples, theirs: Samples) -> dict[str, Any]:
    """How far the two are apart."""
    result: dict[str, Any] = {}
    for task, said in ours.items():
        pairs = list(zip(said, theirs[task], strict=True))
        if isinstance(said[0], str):
            different = [{"place": place, "serve": own, "hf": other} for place, (own, other) in enumerate(pairs) if own != other]
            result[task] = {"texts": len(pairs), "different": different}
        else:
            result[task] = {
                "log_likelihoods": len(pairs),
                "largest_difference": max(abs(own[0] - other[0]) for own, other in pairs),
                "greedy_differs": sum(own[1] != other[1] for own, other in pairs),
            }
    return result


def is_equal(result: dict[str, Any]) -> bool:
    """Whether every text is the same, and every log-likelihood to BOUND."""
    return all(
        not task["different"] if "texts" in task else task["largest_difference"] <= BOUND and not task["greedy_differs"]
        for task in result.values()
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides, and the comparison."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, options)
        if options.keep is not None and options.keep.is_file():
            theirs, their_scores = json.loads(options.keep.read_text())
        else:
            theirs, their_scores = evaluate_hf("float32", options, folder)
            if options.keep is not None:
                options.keep.write_text(json.dumps([theirs, their_scores]))
        if options.only_hf:
            return {}
        with served("smollm2-135m", "--dtype", "float32", "--num-tokens", "16384") as address:
            arguments = {
                "model": "smollm2-135m", "base_url": f"{address}/v1/completions", "num_concurrent": 8, "max_length": 8192,
                "tokenizer_backend": "remote", "timeout": 600,
            }  # fmt: skip
            ours, our_scores = evaluate("local-completions", arguments, 1, options, folder)
        exact = evaluate_hf("float64", options, folder)[0] if options.oracle else None
    differences = compare(ours, theirs)
    result = {"equal": is_equal(differences), "bound": BOUND, "differences": differences, "serve": our_scores, "hf": their_scores}
    if exact is not None:
        result["differences_to_float64"] = {"serve": compare(ours, exact), "hf": compare(theirs, exact)}
    return result


def evaluate_hf(dtype: str, options: argparse.Namespace, folder: Path) -> tuple[Samples, dict[str, Any]]:
    """What transformers says. One request at a time: padding changes what float32 rounds, by as much as two programs differ."""
    return evaluate("hf", {"pretrained": hf_folder(), "dtype": dtype}, options.batch_size, options, folder)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hellaswag", type=int, default=200, help="rows, of four endings each; 0: none")
    parser.add_argument("--gsm8k", type=int, default=100, help="rows; 0: none")
    parser.add_argument("--shots", type=int, default=1, help="solved examples before each question of GSM8K")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer to a question of GSM8K")
    parser.add_argument("--keep", type=Path, help="where hf's answers are kept, or found")
    parser.add_argument("--batch-size", type=int, default=1, help="of hf; more of them are padded")
    parser.add_argument("--oracle", action="store_true", help="ask hf in float64 too")
    parser.add_argument("--only-hf", action="store_true", help="compute those, and nothing else")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    """Compare, print, and say by the exit status whether they are equal."""
    options = parse(sys.argv[1:])
    result = run(options)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if options.only_hf or result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
