"""What README and docs say is checked like code."""

import importlib
import re
import runpy
import shlex
import shutil
from argparse import ArgumentParser
from functools import cache, partialmethod
from pathlib import Path
from unittest.mock import patch

import pytest

from lockstep import cli
from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.policy_losses import BATCH_INPUTS, POLICY_LOSSES
from lockstep.algorithms.preference_losses import PREFERENCE_LOSSES
from lockstep.compat.verl_keys.keys import judge
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.keys import check_key, valid_keys
from lockstep.config.load import read_layers
from lockstep.config.reference import ROOTS
from lockstep.data.preprocess.main import _parser as preprocess_parser
from lockstep.data.preprocess.main import main as preprocess
from lockstep.rewards.outcome import FAILURE_KINDS
from lockstep.tools.check.command import check_advantage, check_loss, check_preference
from lockstep.tools.evaluate.command import _parser as eval_parser
from lockstep.trainer.ppo.checks import ESTIMATOR_INPUTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_in_commands_are_valid(page):
    for block in blocks(page, "sh"):
        for key in re.findall(r"(?<=\s)([a-z_]+(?:\.[a-zA-Z_]+)+)=", block):
            check_key(key)


def check_in_some_recipe(key):
    """A page of one recipe also names keys of others."""
    if not any(key in keys for keys in all_keys()):
        check_key(key)  # one below a free-form key, or an error with the nearest key


@cache
def all_keys():
    return [set(valid_keys(root)) for root in ROOTS.values()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_of_recipes_have_valid_keys(page):
    for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
        command = line.split()[1] if line.startswith("lockstep ") else None
        for key in re.findall(r"(?<=[\s\"])([a-z_]+(?:\.[a-zA-Z_]+)+)=", line) if command in ROOTS else ():
            check_key(key, ROOTS[command])


def test_the_keys_named_in_the_text_are_valid():
    sections = "data|actor_rollout_ref|critic|reward|reward_model|algorithm|trainer|ray_kwargs|loss|reference|optim"
    texts = [page.read_text() for page in PAGES if page.name != "from_verl.md"]
    keys = {key for text in texts for key in re.findall(rf"`((?:{sections})\.[a-zA-Z_.]+)[`=]", text)}
    assert len(keys) > 100
    for key in sorted(keys - {"trainer.worker_groups"}):  # an attribute of a trainer
        check_in_some_recipe(key)


def test_every_key_that_the_page_for_verls_users_names_has_a_verdict():
    text = (ROOT / "docs/from_verl.md").read_text()
    keys = set(
        re.findall(r"(?:`|\s)((?:data|actor_rollout_ref|critic|reward|reward_model|algorithm|trainer)\.[a-zA-Z_.]+)[`=]", text)
    )
    assert len(keys) > 25
    assert [key for key in keys if judge(key, None).kind == "unknown"] == []


def test_every_metric_has_its_row_in_the_docs():
    text = (ROOT / "docs/metrics.md").read_text().replace("/*`", "`")
    heads = "actor|critic|training|perf|timing_s|timing_per_token_ms|global_seqlen|response|reward|val-aux"
    sources = [path for room in ("trainer", "workers") for path in (ROOT / "lockstep" / room).rglob("*.py")]
    names = {name for path in sources for name in re.findall(rf'"((?:{heads})/[a-z_/]*[a-z_])(?="|/?\{{)', path.read_text())}
    assert len(names) > 40
    assert [name for name in sorted(names) if f"`{name}" not in text] == []


def test_every_reason_for_a_missing_reward_is_in_the_docs():
    (row,) = (line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if "`reward/missing/{kind}`" in line)
    assert re.findall(r"why: ([a-z, ]+[a-z])", row) == [", ".join(FAILURE_KINDS)]


def test_make_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(blocks(ROOT / "README.md", "sh")), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tutorials_program_runs(embedded_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(embedded_task.train_file, "train.parquet")
    shutil.copytree(embedded_task.model, "model")
    program, loop, worker = blocks(ROOT / "docs/tutorial.md", "python")
    # The embedded model holds 64 tokens; everything else is as written.
    program = program.replace('"trainer.total', '"data.max_prompt_length=16", "data.max_response_length=12", "trainer.total')
    names: dict = {}
    exec(program, names)
    names["trainer"].close()
    assert names["result"].steps == 1
    make, _, rest = program.partition("trainer.init_workers()")
    assert "fit()" in rest
    keys = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo"]
    keys.append("actor_rollout_ref.actor.entropy_coeff=0.01")  # where no group has a signal, it alone moves the weights
    sizes = ", ".join(f'"{key}"' for key in keys)
    own: dict = {}
    exec(make.replace('"trainer.total', f'{sizes}, "trainer.total'), own)
    exec(loop, own)
    assert own["step"] == 2
    assert own["learned"]["actor/grad_norm"] > 0
    exec(worker, names)
    assert names["Echo"]().where() == 0


def test_the_notebook_runs_cell_by_cell(embedded_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute = runpy.run_path(str(ROOT / "examples/notebooks/execute.py"))
    cells = execute["code_cells"](ROOT / "examples/notebooks/train_and_plot.ipynb")
    data = f'"data.train_files={embedded_task.train_file}", "data.val_files={embedded_task.val_file}", "data.train_batch_size=8"'
    sizes = '"data.max_prompt_length=16", "data.max_response_length=12", "data.val_max_samples=16", "actor_rollout_ref.rollout.n=2"'
    small = f'{data}, {sizes}, "actor_rollout_ref.model.path={embedded_task.model}", "trainer.total_training_steps=2"'
    assert '"trainer.total_training_steps=40"' in cells[0]
    cells[0] = cells[0].replace('"trainer.total_training_steps=40"', small)  # everything else is as written
    names: dict = {}
    printed, shown = zip(*(execute["run_cell"](cell, names) for cell in cells), strict=True)
    assert "done: 2 steps" in printed[1]
    assert shown[3]._repr_svg_().count("<path") == 5
    assert re.search(r"advantages [+-]\d", printed[4])
    assert "report.html: 1 run" in printed[5]


def test_the_readmes_reward_is_a_reward(tmp_path):
    names: dict = {}
    exec(blocks(ROOT / "README.md", "python")[0], names)
    assert names["compute_score"]("any", " 42 ", "42", None) == 1.0
    assert names["compute_score"]("any", "41", "42", None) == 0.0


def commands():
    """Every command of ours in the shell blocks of the pages: the words after `lockstep` or `python -m`."""
    for page in PAGES:
        text = "\n".join(blocks(page, "sh") + blocks(page, "bash")).replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line.partition(" | ")[0].partition(" && ")[0].partition(" > ")[0], comments=True)
            if words[:1] == ["lockstep"]:
                yield pytest.param(words[1:], id=f"{page.name}: {' '.join(words[1:])}"[:90])
            elif words[:2] == ["python", "-m"] and words[2].startswith(("lockstep.", "benchmarks.")):
                yield pytest.param(words[2:], id=f"{page.name}: {' '.join(words[2:])}"[:90])


class Read(BaseException):
    """A command line could be read."""


@pytest.mark.parametrize("words", commands())
def test_every_command_of_the_pages_can_be_read(words, monkeypatch):
    """Keys with their values as the training command reads them, options as argparse does; nothing is run."""
    name, *arguments = (word for word in words if word != "...")
    name = "ppo" if name == "lockstep.trainer.main_ppo" else name.replace("_", "-")
    if name in cli.COMMANDS:
        module = cli.COMMANDS[name][0]
    else:
        module = words[0] if "." in words[0] else "lockstep.trainer.main_ppo"
    if module.startswith("lockstep.trainer."):
        monkeypatch.chdir(ROOT)  # for files of examples
        file = arguments[arguments.index("--config") + 1] if "--config" in arguments else None
        keys = [word for word in arguments if "=" in word]
        assert [word for word in arguments if word not in keys] in (
            [],
            ["--config", file],
            ["--from-verl"],
        ) or "--help" in arguments
        root = ROOTS.get(name, ROOTS["ppo"])
        if "--from-verl" in arguments:
            assert [word for word in keys if judge(word.partition("=")[0], word.partition("=")[2]).kind == "unknown"] == []
        else:
            read_layers(root, keys, file, words[0].replace("-", "_") if words[0].replace("-", "_") in cli.ALGORITHMS else "ppo")
    elif name in ("doctor", "verl-keys"):
        assert name == "verl-keys" or not arguments
    elif name == "check":
        assert arguments[0] in ("loss", "advantage", "preference")
    else:
        if words[0] in ("benchmarks.decode_step", "benchmarks.attention"):
            pytest.importorskip("triton")
        # verify-resume leaves the keys to the training command.
        for method in ("parse_known_args",) if name == "verify-resume" else ("parse_args", "parse_intermixed_args"):
            monkeypatch.setattr(ArgumentParser, method, partialmethod(read, getattr(ArgumentParser, method)))
        monkeypatch.setattr("sys.argv", [name, *arguments])
        main = importlib.import_module(module).main
        with pytest.raises(Read):
            main() if module.startswith("benchmarks.") else main(arguments)


def read(parser, parse, *arguments):
    """Parse, and end there."""
    parse(parser, *arguments)
    raise Read


def test_the_options_of_eval_are_in_its_page():
    text = (ROOT / "docs/eval.md").read_text()
    names = [name for action in eval_parser()._actions for name in action.option_strings if name.startswith("--")]
    assert [name for name in names if name != "--help" and f"`{name}" not in text] == []


@patch.dict(POLICY_LOSSES)
def test_the_losses_and_the_estimator_of_the_docs_have_every_property(tmp_path):
    file = tmp_path / "my_file.py"
    file.write_text("\n".join(blocks(ROOT / "docs/algorithms/extending.md", "python")))
    assert check_loss(f"{file}:soft_clip", {"sharpness": 3.0}, max_examples=10)
    assert check_loss(f"{file}:centred", {}, max_examples=10)
    assert check_loss(f"{file}:by_response", {}, max_examples=10)
    assert check_advantage(f"{file}:reward_to_go", {}, max_examples=10)
    pairs = tmp_path / "my_pairs.py"
    pairs.write_text("\n".join(blocks(ROOT / "docs/algorithms/preference.md", "python")))
    assert check_preference(f"{pairs}:offset", {"scale": 2.0}, max_examples=10)


def test_what_estimators_and_losses_may_read_is_in_the_docs():
    estimators, losses = re.findall(r"It can ask for:\n\n((?:\|.*\n)+)", (ROOT / "docs/algorithms/extending.md").read_text())

    def names(table):
        return {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}

    numbers = set(ActorConfig().loss_parameters)
    assert names(estimators) == ESTIMATOR_INPUTS | {"rollout_is_weights"}
    assert names(losses) == set(BATCH_INPUTS) | numbers


def test_every_estimator_and_loss_has_its_row_in_the_docs():
    text = "\n".join(page.read_text() for page in PAGES if page.parent.name == "algorithms")
    names = (*ADV_ESTIMATORS, *POLICY_LOSSES, *PREFERENCE_LOSSES)
    missing = [name for name in names if f"`{name}`" not in text and f"={name}`" not in text]
    assert missing == []


def test_the_preprocessing_commands_work_as_written_and_print_what_the_page_says(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/data.md"
    from_hub, *local = re.findall(r"```sh\n(lockstep preprocess.*?)```", page.read_text(), re.DOTALL)
    for command in from_hub.splitlines():
        preprocess_parser().parse_args(command.split()[2:])
    samples = ROOT.parent / "shared/data"
    if not samples.is_dir():
        pytest.skip("the shared data folder is not here")
    monkeypatch.chdir(tmp_path)
    for name in ("grade_school_math", "hh"):
        Path(name).mkdir()
    Path("grade_school_math/data").symlink_to(samples / "gsm8k")
    for split in ("train", "test"):
        Path(f"hh/{split}.jsonl").symlink_to(samples / f"hh_rlhf/full_hh_style_{split}.jsonl")
    for command, output in zip(local, blocks(page, "text"), strict=True):
        assert preprocess(command.split()[2:]) == 0
        assert capsys.readouterr().out == output
