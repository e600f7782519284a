import json
import re

import pytest
from transformers import Qwen2Config

from benchmarks.workload import SHAPES
from lockstep.config.load import load_config, to_yaml
from lockstep.planner.hardware import DEVICES, find_device
from lockstep.planner.prediction import Lengths
from lockstep.tools.plan.command import main
from lockstep.tools.plan.measured import one_line, predicted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(**SHAPES["0.5b"] | {"num_hidden_layers": 4}, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return str(folder)


def keys(model, *more):
    return ["data.train_files=x", f"actor_rollout_ref.model.path={model}", *more]


def test_a_plan_says_memory_time_cost_and_what_would_be_faster(model, capsys):
    assert (
        main(
            [
                "grpo",
                *keys(model, "data.train_batch_size=256", "actor_rollout_ref.rollout.max_num_seqs=16"),
                "--gpu",
                "h200",
                "--price",
                "3.6",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+) +([\d.]+) ", text, re.MULTILINE))
    assert {"gen", "ref", "update_actor", "save_checkpoint"} <= set(rows)
    step, cost = re.search(r"a step: ([\d.]+) s.*, ([\d.]+) at 3.6 per GPU hour", text).groups()
    assert float(cost) == pytest.approx(float(step) / 1000, abs=1e-4)
    assert "it fits:" in text
    assert re.search(r"max_num_seqs=\d+\n.*-> [\d.]+ s a step", text)


def test_the_parts_of_a_stage_are_its_peak(model, capsys):
    assert main([*keys(model), "--json", "--count", "8", "--gpu", "h100"]) == 0
    found = json.loads(capsys.readouterr().out)
    for stage, peak in found["peak_gib"].items():
        assert sum(found["memory_gib"][stage].values()) == pytest.approx(peak, abs=0.01), stage


def test_what_does_not_fit_names_a_key_and_what_would_fit(tmp_path, capsys):
    wide = {"num_hidden_layers": 8, "hidden_size": 8192, "intermediate_size": 28_672}  # few layers: they are built one by one
    Qwen2Config(**SHAPES["7b"] | wide, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    assert main(["ppo", *keys(tmp_path), "--gpu", "a100-80gb", "--count", "1"]) == 1
    text = capsys.readouterr().out
    assert "it does not fit: on 1 x a100-80gb" in text
    count = int(re.search(r"trainer.n_gpus_per_node=(\d+) trainer.nnodes=1\n +more GPUs", text)[1])
    assert main(["ppo", *keys(tmp_path), "--gpu", "a100-80gb", "--count", str(count), "--json"]) == 0


@pytest.mark.parametrize("more", [[], ["actor_rollout_ref.rollout.free_cache_engine=false"]])
def test_long_rows_fit_with_fewer_sequences_at_once(tmp_path, capsys, more):
    """Auto chooses fewer; a number of the user's own is refused, with those that fit."""
    config = SHAPES["0.5b"] | {"num_key_value_heads": 14, "max_position_embeddings": 2**18}  # a cache of 50 KB a token and layer
    Qwen2Config(**config, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    words = ["grpo", *keys(tmp_path, "data.max_response_length=60000", *more), "--gpu", "h100"]
    assert main([*words, "--json"]) == 0
    assert 1 < json.loads(capsys.readouterr().out)["chosen"]["actor_rollout_ref.rollout.max_num_seqs"] < 64
    assert main([*words, "actor_rollout_ref.rollout.max_num_seqs=128"]) == 1
    text = capsys.readouterr().out
    assert (
        "set actor_rollout_ref.rollout.max_num_seqs=auto, or below 64, so that fewer are generated at once, or lower data" in text
    )
    change = re.search(r"(actor_rollout_ref.rollout.max_num_seqs=\d+)\n +fewer sequences are generated at once", text)[1]
    assert main([*words, change, "--json"]) == 0


def test_a_row_whose_update_does_not_fit_is_divided_among_gpus(tmp_path, capsys):
    """More GPUs share the weights, but each has whole rows until they divide them."""
    Qwen2Config(**SHAPES["1.5b"] | {"max_position_embeddings": 2**20}, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    words = ["grpo", *keys(tmp_path, "data.max_response_length=400000", "data.train_batch_size=8"), "--gpu", "h100", "--count", "8"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert (
        "lower data.max_prompt_length or data.max_response_length, or raise "
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size, so that more GPUs divide each row" in text
    )
    changes = re.search(r"  (\S+ulysses_sequence_parallel_size=\d .*)\n +GPUs divide the tokens of a row", text)[1].split()
    assert main([*words, *changes, "--json"]) == 0
    size = int(changes[0].rpartition("=")[2])
    assert SHAPES["1.5b"]["num_attention_heads"] % size == 0


def test_one_row_that_is_too_long_is_refused_with_the_keys_of_its_length(tmp_path, capsys):
    shorter = "lower data.max_prompt_length or data.max_response_length"
    words = ["grpo", *keys(tmp_path, "data.max_response_length=240000")]
    for size, gpu, said in (
        (64, "rtx-4090", f"stage update_actor takes .*; {shorter}, or raise .*ulysses_sequence_parallel_size.*each row\n"),
        (256, "h100", f"stage gen takes .*; {shorter}: the cache must hold one row of 240512 tokens\n"),
    ):
        config = SHAPES["0.5b"] | {"num_key_value_heads": 14, "head_dim": size, "max_position_embeddings": 2**18}
        Qwen2Config(**config, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
        assert main([*words, "--gpu", gpu]) == 1
        assert re.search(said, capsys.readouterr().out)
    assert (
        main([*words, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16", "data.max_response_length=60000", "--gpu", "l40s"])
        == 1
    )
    assert "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu\n" in capsys.readouterr().out


def test_what_nothing_makes_fit_is_not_left_as_it_is(tmp_path, capsys):
    wide = {"num_hidden_layers": 1, "hidden_size": 131_072, "intermediate_size": 131_072, "num_attention_heads": 1024}
    Qwen2Config(**SHAPES["7b"] | wide, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    assert main(["ppo", *keys(tmp_path), "--gpu", "rtx-4090"]) == 1
    text = capsys.readouterr().out
    assert text.endswith(
        "no smaller micro-batch, fewer sequences at once, GPUs that divide rows, more GPUs or adapters make it fit\n"
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("L40S", "l40s"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_cuda_gives_it(name, found):
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gropo"], "'gropo' is neither key=value nor a training command"),
        (["--gpu", "h300"], "the embedded task's model is not planned"),
        (["data.trainfiles=x"], "the nearest valid key is 'data.train_files'"),
        (["distill", "data.train_files=x", "model.path=y", "teacher.path=z"], "does not know distill"),
        (["--run", "/nonexistent"], "is not the folder of a run"),
        (["grpo", "--run", "/nonexistent"], "beside it only --gpu is read"),
        (["--run", "/nonexistent", "--count", "2"], "beside it only --gpu is read"),
        (["MODEL", "--gpu", "h200", "--response-length", "513"], "no mean of lengths up to data.max_response_length=512"),
        (["MODEL", "--prompt-length", "0"], "no mean of lengths"),
        (["MODEL", "--count", "12"], "up to 8 GPUs, or machines of 8"),
        (["MODEL", "--price", "-3"], "--price -3 is no price"),
        (["MODEL", "--count", "8", "actor_rollout_ref.actor.fsdp_config.fsdp_size=3"], "fsdp_size"),
        (["grpo", "MODEL", "actor_rollout_ref.rollout.n=1"], "set actor_rollout_ref.rollout.n to 2 or more"),
        (["MODEL", "data.max_response_length=99999999"], "lower one of them"),
        (["sft", "STAGE", "data.max_length=99999999"], "lower data.max_length"),
        (["sft", "STAGE", "--count", "12"], "up to 8 GPUs, or machines of 8"),
        (["sft", "STAGE", "--count", "0"], "up to 8 GPUs, or machines of 8"),
        (["sft", "STAGE", "--prompt-length", "-5"], "--prompt-length -5 is no mean of lengths up to data.max_length"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, said, model, capsys):
    ways = {"MODEL": keys(model), "STAGE": ["data.train_files=x", f"model.path={model}"]}
    assert main([word for given in arguments for word in ways.get(given, [given])]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_float8_pages_are_refused_for_the_gpus_that_the_engine_refuses(model, capsys):
    for gpu, device in DEVICES.items():
        status = main([*keys(model, "actor_rollout_ref.rollout.kv_cache_dtype=fp8"), "--gpu", gpu, "--json"])
        assert status == (1 if gpu.startswith("a100") else 0), gpu
        error = capsys.readouterr().err
        if status:
            assert (
                "kv_cache_dtype=fp8 needs a GPU of compute capability 8.9 or newer, and this one has 8.0; set it to auto" in error
            )
        assert (device.capability >= (8, 9)) == (status == 0)


def test_a_run_is_compared_with_its_prediction(model, tmp_path, capsys):
    config = load_config(keys(model, "data.max_response_length=64", f"trainer.default_local_dir={tmp_path}"), algorithm="grpo")
    found = predicted(config, find_device("h200"), Lengths(100.0, 50.0))
    steps = [{"step": step, "prompt_length/mean": 100.0, "response_length/mean": 50.0, "timing_s/step": 1.0} for step in (1, 2, 3)]
    for step in steps[1:]:
        step |= {f"timing_s/{stage}": seconds * 2 for stage, seconds in found.seconds.items()}
        step["perf/max_memory_allocated_gb/gen"] = found.memory["gen"].total() / 2**30
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert main(["--run", str(tmp_path)]) == 0
    gen = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("gen"))
    assert gen.split()[3] == "+0%"
    assert gen.split()[-1] == "-50%"
    line = one_line(config, tmp_path / "metrics.jsonl", "NVIDIA H200")
    assert "measured (+0%); a step" in line
    assert line.endswith("measured (-50%)")
    assert "no prediction for this run" in one_line(config, tmp_path / "metrics.jsonl", "a toaster")
    on_cpu = [{name: value for name, value in step.items() if not name.startswith("perf/")} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in on_cpu))
    assert main(["--run", str(tmp_path)]) == 1
    assert "is a run on a CPU: what lockstep plan predicts is for GPUs" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(json.dumps(steps[0]) + "\n")
    assert one_line(config, tmp_path / "metrics.jsonl", "NVIDIA H200") is None


def test_what_learns_from_files_is_planned_too(model, capsys):
    steps = {}
    for command in ("sft", "reward-model", "dpo"):
        assert (
            main(
                [command, "data.train_files=x", f"model.path={model}", "--gpu", "h100", "--response-length", "400", "--price", "1"]
            )
            == 0
        )
        text = capsys.readouterr().out
        assert ("\nref " in text) == (command == "dpo")
        steps[command] = float(re.search(r"a step: ([\d.]+) s", text)[1])
    assert steps["dpo"] > steps["reward-model"] > 0  # a reference beside it, and an output layer
    assert main(["sft", "data.train_files=x", f"model.path={model}", "--gpu", "h100", "--response-length", "400", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(steps["sft"], abs=0.05)
    assert main(["sft", "data.train_files=x", f"model.path={model}", "--gpu", "rtx-4090", "engine.max_token_len_per_gpu=9999999",
                 "data.max_length=32768", "data.train_batch_size=4096"]) == 1  # fmt: skip
    assert "lower engine.max_token_len_per_gpu" in capsys.readouterr().err
