"""GSM8K's 1,319 questions, answered and scored: seconds after the model is loaded, as `lockstep eval` has them.

PYTHONPATH=. python benchmarks/eval.py --model Qwen2.5-1.5B-Instruct --source gsm8k --name 1.5b       # H200: at most 30 s
PYTHONPATH=. python benchmarks/eval.py --model smollm2-135m --source gsm8k --limit 8 --max-tokens 32  # a laptop
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--source", required=True, help="GSM8K's own files")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--name", help="write benchmarks/results/eval_NAME_DATE.json")
    options = parser.parse_args()

    import torch

    from lockstep.tools.evaluate.command import evaluate, read_arguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = [options.model, "--task", "gsm8k", "--source", options.source, "--max-tokens", str(options.max_tokens)]
        arguments += ["--out", folder, *(["--limit", str(options.limit)] if options.limit else [])]
        results = evaluate(read_arguments(arguments))
    on_gpu = torch.cuda.is_available()
    part = results["results"]["gsm8k"]
    summary = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} x {os.cpu_count()}",
        "model": Path(options.model).name,
        "questions": part["num_questions"],
        "max_tokens": options.max_tokens,
        "seconds": results["seconds"],
        "tokens": results["num_tokens"],
        "tokens_per_s": round(results["num_tokens"] / results["seconds"]),
        "strict": part["scores"]["strict"]["mean@1"],
        "flexible": part["scores"]["flexible"]["mean@1"],
        "cut_by_length": part["cut_by_length"]["value"],
    }
    print(json.dumps(summary, indent=1))
    if options.name:
        (RESULTS / f"eval_{options.name}_{summary['date']}.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
