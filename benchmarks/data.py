"""Opening a parquet file of a million prompts, and tokenising prompts.

    python benchmarks/data.py --gsm8k ../shared/data/gsm8k/train.jsonl

The rows are those of `lockstep preprocess gsm8k`, repeated with a number in front of the question so that no two are alike. The file is
written twice, in row groups of 10,000 rows (as the preprocessor does) and in one (as pyarrow does unless it is told). Each is opened in a
process of its own. The tokenizer is a byte-level BPE of 16,384 tokens, trained here on the text of GSM8K, with the pre-tokenizer and chat
template of the Qwen 2.5 family.

Opening and tokenising are repeated, and the best and the median are given: on a machine that does other work as well, the best says more
about the code, the median about the day.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lockstep.config.data import DataConfig
from lockstep.data.encoder import PromptEncoder
from lockstep.data.preprocess.gsm8k import RECIPE
from lockstep.data.rl_dataset import RLHFDataset

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_TOKENISED = 20_000
STEP = 1024
"""Prompts per call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=Path("../shared/data/gsm8k/train.jsonl"), help="the original train.jsonl")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data.json"))
    parser.add_argument("--open", nargs=3, metavar=("FILE", "TOKENIZER", "LIMIT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(measure_open(arguments.open[0], arguments.open[1], int(arguments.open[2]))))
        return

    questions = [json.loads(line) for line in arguments.gsm8k.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer([row["question"] + "\n" + row["answer"] for row in questions])
        tokenizer.save_pretrained(f"{folder}/tokenizer")
        table = make_rows(questions, arguments.rows)
        layouts = {"row groups of 10,000": 10_000, "one row group": arguments.rows}
        for layout, row_group_size in layouts.items():
            pq.write_table(table, f"{folder}/{layout}.parquet", row_group_size=row_group_size)
        del table
        print("made the files", file=sys.stderr, flush=True)
        tokenised = measure_tokenising(tokenizer, questions, arguments.repeats)
        opened = {}
        for layout in layouts:
            for limit in (1024, 512):
                file = f"{folder}/{layout}.parquet"
                command = [sys.executable, __file__, "--open", file, f"{folder}/tokenizer", str(limit)]
                outputs = [
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(arguments.repeats)
                ]
                runs = [json.loads(output.splitlines()[-1]) for output in outputs]
                opened[f"{layout}, max_prompt_length={limit}"] = {
                    key: {"best": min(run[key] for run in runs), "median": statistics.median(run[key] for run in runs)}
                    for key in runs[0]
                }
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python benchmarks/data.py",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "rows": arguments.rows,
        "open": opened,
        "prompts_per_second": tokenised,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print_tables(result)


def make_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`."""
    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def make_rows(questions: list[dict[str, str]], num_rows: int) -> pa.Table:
    """`num_rows` rows as the preprocessor makes them, no two alike."""
    tables = []
    for start in range(0, num_rows, 50_000):
        rows = [numbered(questions, index) for index in range(start, min(num_rows, start + 50_000))]
        tables.append(pa.Table.from_pylist(rows, RECIPE.schema))
    return pa.concat_tables(tables)


def numbered(questions: list[dict[str, str]], index: int) -> dict[str, Any]:
    row = questions[index % len(questions)]
    example = RECIPE.convert(row | {"question": f"Question {index}. {row['question']}"}, RECIPE.instruction)
    return {
        "data_source": RECIPE.hub_id,
        "prompt": example.prompt,
        "ability": RECIPE.ability,
        **example.columns,
        "extra_info": {"split": "train", "index": index, **example.extra_info},
    }


def measure_open(file: str, tokenizer_folder: str, limit: int) -> dict[str, float]:
    """Open the file, then read shuffled batches of 512 rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    config = DataConfig(max_prompt_length=limit, seed=0)
    with tempfile.NamedTemporaryFile(suffix=".jsonl", mode="w") as small:  # imports and first calls are not the file's cost
        small.write('{"prompt": "one"}')
        small.flush()
        RLHFDataset(small.name, tokenizer, config)[0]
    before = memory()
    start, start_cpu = time.perf_counter(), time.process_time()
    dataset = RLHFDataset(file, tokenizer, config)
    open_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    opened = memory()
    order = random.Random(0).sample(range(len(dataset)), 512 * 20)
    batches = [order[i : i + 512] for i in range(0, len(order), 512)]
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        dataset.__getitems__(batch)
        seconds.append(time.perf_counter() - start)
    after = memory()
    return {
        "open_s": open_s,
        "open_cpu_s": cpu_s,
        "open_rss_mb": opened["VmRSS"] - before["VmRSS"],
        "first_512_shuffled_rows_s": seconds[0],
        "next_512_shuffled_rows_s": statistics.median(seconds[1:]),
        "own_memory_after_20_batches_mb": after["RssAnon"] - before["RssAnon"],
        "mapped_after_20_batches_mb": after["RssFile"] - before["RssFile"],
    }


def memory() -> dict[str, float]:
    """This process's memory in MB, by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) / 1000 for line in lines if line.startswith(("VmRSS", "RssAnon", "RssFile"))}


def measure_tokenising(tokenizer: Any, questions: list[dict[str, str]], repeats: int) -> dict[str, dict[str, float]]:
    """Prompts per second, through the chat template, `STEP` at a time."""
    prompts = [numbered(questions, index)["prompt"] for index in range(NUM_TOKENISED)]
    short = [[{"role": "user", "content": f"What is {index} + {index + 7}?"}] for index in range(NUM_TOKENISED)]
    encoder = PromptEncoder(tokenizer, {})

    def encode(all_prompts: list[Any]) -> None:
        for start in range(0, NUM_TOKENISED, STEP):
            part = all_prompts[start : start + STEP]
            encoder.encode(part, range(start, start + len(part)))

    return {
        "GSM8K, 1024 at a time": rate(lambda: encode(prompts), repeats),
        "one short sum, 1024 at a time": rate(lambda: encode(short), repeats),
    }


def rate(run: Callable[[], None], repeats: int) -> dict[str, float]:
    """Prompts a second, best and median, and prompts a second of processor time (of all threads together), best."""
    seconds, processor_seconds = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start)
        processor_seconds.append(time.process_time() - start_cpu)
    return {
        "best": round(NUM_TOKENISED / min(seconds)),
        "median": round(NUM_TOKENISED / statistics.median(seconds)),
        "best_per_processor_second": round(NUM_TOKENISED / min(processor_seconds)),
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def print_tables(result: dict[str, Any]) -> None:
    for case, measured in result["open"].items():
        print(f"\n{result['rows']} rows, {case}")
        for key, value in measured.items():
            print(f"  {key:34} best {value['best']:10.2f}   median {value['median']:10.2f}")
    print("\nprompts per second")
    for case, value in result["prompts_per_second"].items():
        per_cpu = value["best_per_processor_second"]
        print(f"  {case:44} best {value['best']:8.0f}   median {value['median']:8.0f}   a processor second {per_cpu:8.0f}")
    print(f"\n{result['hardware']}")


if __name__ == "__main__":
    main()
