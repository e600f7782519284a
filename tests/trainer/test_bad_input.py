"""Every kind of bad input is one line that names what is wrong, with its exit status, before a model is loaded."""

import errno
import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForCausalLM, OlmoeConfig

from lockstep import cli
from lockstep.checkpoint.lock import FolderLock
from lockstep.embedded.task import make_tokenizer, model_config, write_prompts
from lockstep.observability import dashboards
from lockstep.trainer.run.launch import Workers

PPO = (
    "data.train_files={data}/train.parquet",
    "actor_rollout_ref.model.path={model}",
    "trainer.default_local_dir={folder}/run",
    "data.train_batch_size=4",
    "data.max_prompt_length=8",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
STAGE = ("model.path={model}", "trainer.default_local_dir={folder}/run", "data.max_length=32", "data.train_batch_size=2")
SFT, DPO, REWARD_MODEL = ((*STAGE, f"data.train_files={{data}}/{name}.jsonl") for name in ("conversations", "pairs", "pairs"))
ROW = {
    "data_source": "lockstep/reverse",
    "prompt": [{"role": "user", "content": "abc"}],
    "reward_model": {"style": "rule", "ground_truth": "cba"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model, and small files of prompts, conversations and pairs."""
    folder = tmp_path_factory.mktemp("good")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(model_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_prompts(folder, "train", ["abc", "dab", "cafe", "bead", "face", "fade", "jab", "big"])
    write_lines(folder / "conversations.jsonl", [{"messages": [message("user", "abc"), message("assistant", "cba")]}] * 4)
    write_lines(folder / "pairs.jsonl", [{"prompt": "abc", "chosen": "cba", "rejected": "abc"}] * 4)
    return folder


def message(role, content):
    return {"role": role, "content": content}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# -- what is made for a case: a function of its empty folder and the good files, which returns arguments -----------------------


def rows(*changed, name="data.train_files"):
    """Training rows, each a change of a good one (None takes a column away)."""

    def make(folder, good):
        made = [{key: value for key, value in (ROW | row).items() if value is not None} for row in changed]
        return [f"{name}={write_lines(folder / 'rows.jsonl', made)}"]

    return make


def text(name, content, argument):
    """A file with this content; `argument` names it as {file}."""

    def make(folder, good):
        file = folder / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return argument.format(file=file).split()

    return make


def model(change):
    """A copy of the model, changed."""

    def make(folder, good):
        shutil.copytree(good / "model", folder / "model")
        change(folder / "model")
        return [f"actor_rollout_ref.model.path={folder / 'model'}"]

    return make


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def name_two_shards(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}})
    )


def without_tokenizer(folder):
    for file in folder.glob("token*"):
        file.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def olmoe(key):
    """A family for which transformers has no head but the language model's."""

    def make(folder, good):
        shutil.copytree(good / "model", folder / "model")
        OlmoeConfig(num_experts=2, num_experts_per_tok=1).save_pretrained(folder / "model")
        return [f"{key}={folder / 'model'}"]

    return make


def judge(setting):
    """A reward model that is a language model."""
    return lambda folder, good: [f"reward_model.model.path={good / 'model'}", setting]


HELD = []


def used_folder(folder, good):
    HELD.append(FolderLock(folder / "run"))
    return []


REWARD = "reward.custom_reward_function.path={file}"
RANK, LAYERS = "actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.target_modules"
CASES = [
    # -- the command line
    ("an unknown command", "pop", [], 2, "ppo"),
    ("an unknown key", "ppo", ["data.train_bach_size=4"], 1, "data.train_batch_size"),
    ("no key=value", "ppo", ["train.parquet"], 1, "train.parquet"),
    ("an unknown option", "ppo", ["--verbose"], 1, "there is no option --verbose"),
    ("a seed that no generator takes", "ppo", ["trainer.seed=99999999999999999999"], 1, "trainer.seed"),
    ("a deleted key", "ppo", ["~trainer.seed"], 1, "trainer.seed"),
    ("several values", "ppo", ["trainer.seed=1,2"], 1, "trainer.seed=1,2"),
    ("a section as a value", "ppo", ["data=3"], 1, "data"),
    ("a word for a number", "ppo", ["data.train_batch_size=many"], 1, "data.train_batch_size"),
    ("no steps", "ppo", ["trainer.total_training_steps=-1"], 1, "trainer.total_training_steps"),
    ("a number for a file", "ppo", ["data.train_files=1"], 1, "data.train_files=1 is not a file"),
    ("a number for the file of validation", "ppo", ["data.val_files=0"], 1, "data.val_files=0 is not a file"),
    ("nothing in a list of files", "dpo", ["data.train_files=[null]"], 1, "data.train_files=[None] is not a file"),
    ("a number for prompts", "sft", ["sampled.files=[1]"], 1, "sampled.files=[1] is not a file"),
    ("a number that is none", "ppo", ["actor_rollout_ref.actor.entropy_coeff=nan"], 1, "actor_rollout_ref.actor.entropy_coeff=nan"),
    ("a temperature without end", "ppo", ["actor_rollout_ref.rollout.temperature=inf"], 1, "actor_rollout_ref.rollout.temperature=inf"),
    ("a rate without end", "sft", ["optim.lr=inf"], 1, "optim.lr=inf"),
    ("a weight that is none", "ppo", ["+reward.weights={gsm8k: {rule: nan}}"], 1, "reward.weights.gsm8k.rule=nan"),
    ("nothing to validate on, ppo", "ppo", ["trainer.val_only=true"], 1, "nothing to validate on; set data.val_files"),
    ("nothing to validate on, sft", "sft", ["trainer.val_only=true"], 1, "nothing to validate on; set data.val_files"),
    ("a validation of nothing, ppo", "ppo", ["trainer.test_freq=1"], 1, "trainer.test_freq=1, but there is nothing to validate on"),
    ("a validation of nothing, sft", "sft", ["trainer.test_freq=5"], 1, "trainer.test_freq=5, but there is nothing to validate on"),
    ("a validation of nothing, dpo", "dpo", ["trainer.test_freq=5"], 1, "trainer.test_freq=5, but there is nothing to validate on"),
    ("samples of no validation", "ppo", ["trainer.validation_data_dir=x"], 1, "validation_data_dir is set, but there is nothing to"),
    ("rows of no validation", "ppo", ["trainer.val_before_train_samples=8"], 1, "but there is nothing to validate on; set data.val_files"),
    ("the best of no validation", "dpo", ["trainer.best_metric=val/loss"], 1, "this run has none; set data.val_files"),
    ("a number for a switch", "ppo", ["trainer.val_before_train=-1"], 1, "trainer.val_before_train=-1 is neither true nor false"),
    ("one in YAML", "ppo", text("x.yaml", "data: {shuffle: 2}", "--config {file}"), 1, "data.shuffle=2 is neither"),
    ("no samples", "dpo", ["data.train_max_samples=0"], 1, "data.train_max_samples=0 leaves nothing; set it to -1 for all"),
    ("fewer samples than none", "ppo", ["data.val_max_samples=-7"], 1, "data.val_max_samples=-7 leaves nothing"),
    ("no prompts", "sft", ["sampled.max_samples=0"], 1, "sampled.max_samples=0 leaves nothing"),
    ("no rows", "ppo", ["data.train_batch_size=0"], 1, "data.train_batch_size"),
    ("no processes", "ppo", ["trainer.n_gpus_per_node=0"], 1, "trainer.n_gpus_per_node"),
    ("a device that is none", "ppo", ["trainer.device=tpu"], 1, "trainer.device"),
    ("an unknown policy for alarms", "ppo", ["trainer.on_alarm=cry"], 1, "trainer.on_alarm"),
    ("an unknown way to resume", "ppo", ["trainer.resume_mode=maybe"], 1, "trainer.resume_mode"),
    ("no checkpoint to resume from", "ppo", ["trainer.resume_mode=resume_path"], 1, "trainer.resume_from_path"),
    ("a checkpoint that nobody reads", "ppo", ["trainer.resume_from_path=x"], 1, "trainer.resume_mode"),
    ("a checkpoint that is not there", "ppo", ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/x"], 1, "/no/x"),
    ("--config without a file", "ppo", ["--config"], 1, "--config"),
    ("a file that is not there", "ppo", ["--config", "nothing.yaml"], 1, "nothing.yaml"),
    ("broken YAML", "ppo", text("x.yaml", "data: [", "--config {file}"), 1, "x.yaml"),
    ("YAML that is a list", "ppo", text("x.yaml", "- data", "--config {file}"), 1, "x.yaml"),
    ("an unknown key in YAML", "ppo", text("x.yaml", "data: {seeed: 1}", "--config {file}"), 1, "data.seed"),
    # -- algorithms and engines
    ("an unknown estimator", "ppo", ["algorithm.adv_estimator=grp0"], 1, "algorithm.adv_estimator: unknown advantage estimator 'grp0'"),
    ("an unknown loss", "ppo", ["actor_rollout_ref.actor.policy_loss.loss_mode=nope"], 1, "policy_loss.loss_mode: unknown policy loss"),
    ("groups of one", "ppo", ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1"], 1, "actor_rollout_ref.rollout.n"),
    ("an unknown kind of KL", "ppo", ["algorithm.kl_penalty=k9"], 1, "algorithm.kl_penalty"),
    ("an unknown aggregation", "ppo", ["actor_rollout_ref.actor.loss_agg_mode=mean"], 1, "loss_agg_mode"),
    ("an unknown rollout", "ppo", ["actor_rollout_ref.rollout.name=vlm"], 1, "actor_rollout_ref.rollout.name"),
    ("an unknown engine", "ppo", ["actor_rollout_ref.actor.strategy=fdsp"], 1, "actor_rollout_ref.actor.strategy"),
    ("a temperature below 0", "ppo", ["actor_rollout_ref.rollout.temperature=-1"], 1, "temperature"),
    ("top_p above 1", "ppo", ["actor_rollout_ref.rollout.top_p=2"], 1, "top_p"),
    ("a learning rate below 0", "ppo", ["actor_rollout_ref.actor.optim.lr=-1"], 1, "actor_rollout_ref.actor.optim.lr"),
    ("mini-batches larger than the batch", "ppo", ["actor_rollout_ref.actor.ppo_mini_batch_size=64"], 1, "ppo_mini_batch_size"),
    ("two processes in one", "ppo", ["trainer.worker_group=local", "trainer.n_gpus_per_node=2"], 1, "trainer.worker_group"),
    # -- trackers
    ("an unknown tracker", "ppo", ["trainer.logger=wandbb"], 1, "wandbb"),
    ("a tracker that is not installed", "ppo", ["trainer.logger=trackio"], 1, "pip install 'lockstep-rl[trackio]'"),
    ("a tracker of one's own that is not there", "ppo", ["trainer.logger=none.py:Mine"], 1, "none.py"),
    # -- the run's folder
    ("a folder that is a file", "ppo", text("file", "", "trainer.default_local_dir={file}"), 1, "trainer.default_local_dir"),
    ("a folder under a file", "ppo", text("file", "", "trainer.default_local_dir={file}/a/b"), 1, "is a file"),
    ("a folder that somebody uses", "ppo", used_folder, 1, "in use by another run"),
    # -- prompts
    ("no such file", "ppo", ["data.train_files=none.parquet"], 1, "none.parquet"),
    ("no such validation file", "ppo", ["data.val_files=none.parquet"], 1, "none.parquet"),
    ("a kind of file that is not read", "ppo", text("x.csv", "a,b", "data.train_files={file}"), 1, "x.csv"),
    ("a broken file", "ppo", text("x.parquet", "PAR1 not", "data.train_files={file}"), 1, "x.parquet"),
    ("an empty file", "ppo", text("x.jsonl", "", "data.train_files={file}"), 1, "x.jsonl"),
    ("a broken line", "ppo", text("x.jsonl", '{"prompt": "a"}\n{"prompt":', "data.train_files={file}"), 1, "x.jsonl"),
    ("no prompts", "ppo", rows(*[{"prompt": None}] * 4), 1, "data.prompt_key"),
    ("an empty prompt", "ppo", rows(*[{}] * 3, {"prompt": []}), 1, "row 3"),
    ("a prompt that is a number", "ppo", rows(*[{"prompt": 3}] * 4), 1, "row 0"),
    ("a message without a role", "ppo", rows(*[{"prompt": [{"content": "abc"}]}] * 4), 1, "role"),
    ("a prompt that is too long", "ppo", rows(*[{"prompt": [message("user", "abc" * 9)]}] * 4), 1, "data.max_prompt_length"),
    ("an unknown data_source", "ppo", rows(*[{"data_source": "gsm9k"}] * 4), 1, "gsm9k"),
    ("a reward_model that is text", "ppo", rows(*[{"reward_model": '{"ground_truth": "cba"}'}] * 4), 1, "reward_model must be a struct"),
    ("a column that a step writes", "ppo", rows(*[{"values": 1}] * 4), 1, "data.train_files: the columns values have names"),
    ("no data_source", "ppo", rows(*[{"data_source": None}] * 4), 1, "data_source"),
    ("no ground truth", "ppo", rows({}, {}, {}, {"reward_model": {"style": "rule"}}), 1, "reward_model.ground_truth"),
    ("fewer rows than a batch", "ppo", rows({}, {}), 1, "data.train_batch_size"),
    ("an unknown truncation", "ppo", ["data.truncation=up"], 1, "data.truncation"),
    # -- models
    ("no such folder", "ppo", ["actor_rollout_ref.model.path=./none"], 1, "./none"),
    ("an id that is none", "ppo", ["actor_rollout_ref.model.path=a/b/c"], 1, "a/b/c"),
    ("an id, and no hub", "ppo", ["actor_rollout_ref.model.path=nobody/nothing"], 1, "HF_HUB_OFFLINE"),
    ("no config.json", "ppo", model(lambda folder: (folder / "config.json").unlink()), 1, "config.json"),
    ("a broken config.json", "ppo", model(lambda folder: (folder / "config.json").write_text("{")), 1, "config.json"),
    ("weights cut short", "ppo", model(cut), 1, "model.safetensors is damaged"),
    ("weights that are none", "ppo", model(lambda folder: (folder / "model.safetensors").write_text("x" * 99)), 1, "model.safetensors"),
    ("a file of weights that is missing", "ppo", model(name_two_shards), 1, "other.safetensors"),
    ("no tokenizer", "ppo", model(without_tokenizer), 1, "tokenizer"),
    ("an override that the model lacks", "ppo", ["+actor_rollout_ref.model.override_config.hiden=1"], 1, "hiden"),
    ("longer rows than the model holds", "ppo", ["data.max_response_length=100"], 1, "data.max_response_length"),
    ("layers that are not there", "ppo", [RANK, f"{LAYERS}=[q_proj,q_prj]"], 1, f"{LAYERS}=['q_proj', 'q_prj'] names q_prj"),
    ("layers that have no adapter", "ppo", [RANK, f"{LAYERS}=[self_attn]"], 1, "layers.0.self_attn, which is not a linear layer"),
    ("the output layer", "sft", ["model.lora_rank=2", "model.target_modules=[lm_head]"], 1, "names lm_head, which is not"),
    ("one layer without a list", "ppo", [RANK, f"{LAYERS}=q_proj"], 1, f"{LAYERS}=q_proj must be all-linear or a list"),
    ("layers without brackets", "ppo", [RANK, f"{LAYERS}=q_proj,v_proj"], 1, f"{LAYERS}=q_proj,v_proj must be"),
    ("no layers", "ppo", [RANK, f"{LAYERS}=null"], 1, f"{LAYERS}=null must be"),
    ("layers by number", "ppo", [RANK, f"{LAYERS}=[0]"], 1, f"{LAYERS}=[0] must be"),
    ("layers, and no rank", "ppo", [f"{LAYERS}=[q_proj]"], 1, "set actor_rollout_ref.model.lora_rank"),
    ("layers of the critic", "ppo", ["critic.model.lora_rank=2", "critic.model.target_modules=[score]"], 1, "critic.model.target_modules"),
    ("a balanced load without experts", "ppo", ["critic.model.router_aux_loss_coef=0.1"], 1, "critic.model.router_aux_loss_coef=0.1, but"),
    ("a critic that cannot be", "ppo", olmoe("critic.model.path"), 1, "has none for its family; set critic.model.path"),
    ("a reward model that cannot be", "reward-model", olmoe("model.path"), 1, "model cannot have a score head"),
    # -- rewards
    ("no such reward file", "ppo", ["reward.custom_reward_function.path=none.py"], 1, "none.py"),
    ("a reward function in no file", "ppo", ["reward.custom_reward_function.name=mine"], 1, "but reward.custom_reward_function.path is"),
    ("no such reward function", "ppo", text("r.py", "def score(): pass", REWARD), 1, "compute_score"),
    ("a reward of other arguments", "ppo", text("r.py", "def compute_score(answer, truth): pass", REWARD), 1, "answer, truth"),
    ("a reward that is no function", "ppo", text("r.py", "compute_score = 3", REWARD), 1, "compute_score"),
    ("an unknown judge", "ppo", ["reward.weights={gsm8k: {modle: 1.0}}"], 1, "modle"),
    ("a rule without a function", "ppo", ["reward.rules={gsm8k: mine.py}"], 1, "reward.rules.gsm8k"),
    ("a reward model without a path", "ppo", ["reward_model.enable=true"], 1, "reward_model.model.path"),
    ("a reward model without a head", "ppo", judge("reward_model.enable=true"), 1, "has no score head; name a model that scores"),
    ("a reward model with adapters", "ppo", judge("reward_model.model.lora_rank=2"), 1, "reward_model.model.lora_rank is for a model"),
    # -- without Ray, as `offline` has it
    ("processes without Ray", "ppo", ["trainer.n_gpus_per_node=2"], 1, "trainer.n_gpus_per_node=2 needs the package 'ray'"),
    ("nodes without Ray, sft", "sft", ["trainer.nnodes=2"], 1, "pip install 'lockstep-rl[ray]'; or set it to 1, for a run in one process"),
    ("Ray without Ray", "dpo", ["trainer.worker_group=ray"], 1, "trainer.worker_group=ray needs the package 'ray', which is not installed"),
    ("a pool without Ray", "ppo", ["critic.enable_resource_pool=true"], 1, "enable_resource_pool=true (critic or reward_model) needs"),
    # -- other recipes
    ("sft: no such file", "sft", ["data.train_files=none.jsonl"], 1, "none.jsonl"),
    ("sft: no answer", "sft", text("x.jsonl", '{"prompt": "abc"}', "data.train_files={file}"), 1, "x.jsonl"),
    ("sft: longer rows than the model holds", "sft", ["data.max_length=9999"], 1, "data.max_length"),
    ("dpo: nothing rejected", "dpo", text("x.jsonl", '{"prompt": "a", "chosen": "b"}', "data.train_files={file}"), 1, "rejected"),
    ("dpo: an unknown loss", "dpo", ["loss.loss_mode=nope"], 1, "loss.loss_mode: unknown preference loss 'nope'"),
    ("dpo: a folder for no file", "dpo", ["reference.folder=x"], 1, "reference.mode=auto has none; set reference.mode=file"),
    ("dpo: a mode of no reference", "dpo", ["loss.loss_mode=cpo", "reference.mode=model"], 1, "reference.mode is set, but loss.loss_mode"),
    ("reward-model: nothing rejected", "reward-model", text("x.jsonl", '{"chosen": "b"}', "data.train_files={file}"), 1, "rejected"),
    ("distill: no teacher", "distill", ["teacher.path=./none", "distill.max_response_length=8"], 1, "./none"),
]  # fmt: skip
BASE = {"ppo": PPO, "sft": SFT, "dpo": DPO, "reward-model": REWARD_MODEL, "distill": SFT}


@pytest.fixture
def offline(monkeypatch):
    """No hub, no model, and no package that a developer may have installed."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(dashboards, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ray", None)

    def start(self, specs):
        raise AssertionError("models would be loaded now")

    monkeypatch.setattr(Workers, "_start", start)
    yield
    while HELD:
        HELD.pop().release()


@pytest.mark.parametrize(("command", "bad", "status", "named"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_is_one_line_that_names_it(command, bad, status, named, files, tmp_path, monkeypatch, capsys, offline):
    monkeypatch.chdir(tmp_path)
    own = bad(tmp_path, files) if callable(bad) else bad
    base = [text.format(data=files, model=files / "model", folder=tmp_path) for text in BASE.get(command, ())]
    monkeypatch.setattr("sys.argv", ["lockstep", command, *base, *own])
    assert cli.main() == status
    error = capsys.readouterr().err
    assert named in error, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, f"more than one line:\n{error}"


def test_good_input_goes_as_far_as_the_models(files, tmp_path, monkeypatch, offline):
    endless = {"ppo": ["actor_rollout_ref.actor.clip_ratio_high=inf", "actor_rollout_ref.rollout.exactness_bound=inf"]}
    for command in ("ppo", "sft", "dpo", "reward-model"):
        base = [text.format(data=files, model=files / "model", folder=tmp_path / command) for text in BASE[command]]
        base += endless.get(command, [])
        monkeypatch.setattr("sys.argv", ["lockstep", command, *base])
        with pytest.raises(AssertionError, match="models would be loaded now"):
            cli.main()


@pytest.mark.parametrize(
    ("function", "result", "told"),
    [
        ("os.access", False, "is read-only for this user; choose another with trainer.default_local_dir"),
        ("shutil.disk_usage", shutil._ntuple_diskusage(10, 10, 0), "no space left for the run's folder"),
    ],
)
def test_a_folder_that_cannot_be_written_is_known_at_once(function, result, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"lockstep.checkpoint.lock.{function}", lambda *arguments: result)
    monkeypatch.setattr("sys.argv", ["lockstep", "ppo", f"trainer.default_local_dir={tmp_path}/run"])
    assert cli.main() == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_on_the_way_is_one_line(tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "train.parquet"))

    monkeypatch.setattr("lockstep.embedded.prepare", full)
    monkeypatch.setattr("sys.argv", ["lockstep", "ppo", f"trainer.default_local_dir={tmp_path}/run"])
    assert cli.main() == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/run/train.parquet: No space left on device; free some space\n"
