"""Recipes and launch files are read as the programs read them; nothing is trained."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from transformers import Qwen2Config

from benchmarks.workload import SHAPES
from lockstep.config.keys import check_key
from lockstep.config.load import load_config, load_recipe
from lockstep.config.ppo import describe
from lockstep.config.presets import ALGORITHMS
from lockstep.config.reference import ROOTS
from lockstep.data.preprocess.main import _parser as preprocess_parser
from lockstep.tools.plan.command import main as plan

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples/launch"


def commands(text):
    """The lockstep commands in the shell blocks of a page, as words."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("lockstep ")]


@pytest.mark.parametrize("words", commands((ROOT / "docs/recipes.md").read_text()), ids=lambda words: " ".join(words)[:60])
def test_a_recipe_is_a_configuration_that_can_work(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *arguments = words
    file = arguments[1] if arguments[0] == "--config" else None
    keys = arguments[2:] if file else arguments
    if command in ALGORITHMS:
        config = load_config(keys, file, command)
        assert str(config.data.train_batch_size) in describe(config, 10_000, 100, "cuda")
    elif command in ROOTS:
        load_recipe(ROOTS[command], keys, file)
    elif command == "preprocess":
        preprocess_parser().parse_args(arguments)
    elif command == "rewards":
        load_config(arguments[1:])
    else:
        assert command == "report"


def for_gpus():
    """Words of `lockstep plan` for each command that is for GPUs, in the recipes and the launch files, and the size of its model."""
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["entrypoint"].split()[1:]
    for words in (*commands((ROOT / "docs/recipes.md").read_text()), job):
        size = re.search(r"model\.path=\S*Qwen2\.5-(?:Coder-)?([\d.]+)B", " ".join(words))
        if size and words[0] in (*ALGORITHMS, *ROOTS):
            yield pytest.param(words, f"{size[1]}b", id=" ".join(words)[:60])


@pytest.mark.parametrize(("words", "size"), for_gpus())
def test_what_is_for_gpus_fits_on_them(words, size, tmp_path, monkeypatch, capsys):
    """Models of the same shape stand for those of the hub. A reward model is a model of the first recipe's size."""
    monkeypatch.chdir(ROOT)
    Qwen2Config(**SHAPES[size], architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    arguments = [re.sub(r"model\.path=.*", f"model.path={tmp_path}", word) for word in words]
    status = plan([*arguments, "--gpu", "h200", *(["--json"] if words[0] in ALGORITHMS else [])])
    said = capsys.readouterr()
    assert status == 0, said.out + said.err


def test_the_slurm_script_is_shell_and_its_keys_are_valid():
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=True)
    keys = re.findall(r"\s((?:trainer|ray_kwargs)\.[\w.]+)=", (LAUNCH / "slurm.sbatch").read_text())
    assert len(keys) == 3
    for key in keys:
        check_key(key)


def test_the_kuberay_job_is_a_configuration_for_the_gpus_it_asks_for():
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    program, command, *keys = job["spec"]["entrypoint"].split()
    assert (program, command) == ("lockstep", "ppo")
    trainer = load_config(keys).trainer
    cluster = job["spec"]["rayClusterSpec"]
    nodes = [cluster["headGroupSpec"], *(group for group in cluster["workerGroupSpecs"] for _ in range(group["replicas"]))]
    gpus = [node["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for node in nodes]
    assert gpus == [trainer.n_gpus_per_node] * trainer.nnodes


def test_the_image_copies_files_that_exist_and_installs_extras_that_exist():
    text = (LAUNCH / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert all(re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for extra in extras.split(","))


def test_every_page_of_the_sites_navigation_exists():
    navigation = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    assert len(navigation) > 30
    assert [page for page in navigation if page != "index.md" and not (ROOT / "docs" / page).is_file()] == []
