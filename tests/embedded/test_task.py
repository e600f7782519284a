import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.embedded import prepare
from lockstep.embedded.task import DATA_SOURCE, LETTERS, make_tokenizer, make_words
from lockstep.rewards.graders import default_compute_score

TARGET = 0.02


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("task"), seed=3, target_accuracy=TARGET)


@pytest.fixture(scope="module")
def files(task):
    return {split: pq.read_table(path).to_pylist() for split, path in (("train", task.train_file), ("val", task.val_file))}


def test_the_tokenizer_has_one_token_a_letter_and_reads_back_what_it_wrote():
    tokenizer = make_tokenizer()
    assert len(tokenizer) == len(LETTERS) + 4
    word = LETTERS + LETTERS[::-1]
    ids = tokenizer(word)["input_ids"]
    assert len(ids) == len(word)
    assert tokenizer.decode(ids) == word
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == word


def test_the_chat_template_marks_who_speaks_and_whose_turn_it_is():
    tokenizer = make_tokenizer()
    message = [{"role": "user", "content": "abc"}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "a", "b", "c", "<assistant>"]


def test_every_word_is_different_so_that_training_and_validation_share_none(files):
    words = [row["prompt"][0]["content"] for split in ("train", "val") for row in files[split]]
    assert len(words) == len(set(words)) == len(files["train"]) + len(files["val"])
    assert {len(files["train"]), len(files["val"])} == {2048, 256}
    assert all(3 <= len(word) <= 6 and set(word) <= set(LETTERS) for word in words)


def test_the_rows_are_what_a_user_would_bring_and_the_answer_is_worth_a_full_score(files):
    row = files["val"][0]
    word = row["prompt"][0]["content"]
    assert row["prompt"] == [{"role": "user", "content": word}]
    assert (row["data_source"], row["extra_info"]) == (DATA_SOURCE, {"split": "val", "index": 0})
    truth = row["reward_model"]["ground_truth"]
    assert truth == word[::-1]
    scores = [
        default_compute_score(data_source=DATA_SOURCE, solution_str=text, ground_truth=truth, extra_info=None)
        for text in (truth, truth + "a")
    ]
    assert [s["score"] if isinstance(s, dict) else s for s in scores] == [1.0, 0.0]


def test_the_model_folder_loads_and_the_right_answers_have_the_reported_probability(task, files):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model).eval()
    probability = 0.0
    for row in files["val"]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer(row["reward_model"]["ground_truth"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        probability += log_probs.gather(1, torch.tensor(answer)[:, None]).sum().exp().item()
    assert probability / len(files["val"]) == pytest.approx(task.warmup_accuracy, rel=1e-4)


def test_the_warm_up_leaves_room_to_learn(task):
    assert TARGET <= task.warmup_accuracy < 0.6
    assert task.warmup_steps % 10 == 0


def test_the_same_seed_makes_the_same_files_whatever_the_threads_and_leaves_the_callers_state_alone(task, tmp_path):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        again = prepare(tmp_path, seed=3, target_accuracy=TARGET)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (again.warmup_steps, again.warmup_accuracy) == (task.warmup_steps, task.warmup_accuracy)
    for name in ("model/model.safetensors", "model/tokenizer.json", "train.parquet", "val.parquet"):
        assert (tmp_path / name).read_bytes() == (task.model.parent / name).read_bytes(), name


def test_another_seed_makes_other_words():
    assert make_words(3) == make_words(3)
    assert make_words(3) != make_words(4)
