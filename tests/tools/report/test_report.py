"""The data of a report: what is read, thinned, packed and embedded. The page itself is tested in a browser: make test-report."""

import gzip
import json
import re

import numpy as np
import pytest
from helpers.report_run import HOSTILE, make_run, write_batch

from lockstep.errors import DataError
from lockstep.observability.statistics import wilson_interval
from lockstep.tools.report import run_files, run_folder
from lockstep.tools.report.collector import Collector, PageLimits
from lockstep.tools.report.command import main, write_report
from lockstep.tools.report.html import SCRIPTS, STYLES, read_part
from lockstep.tools.report.run_files import SampleBatch, td_errors
from lockstep.tools.report.run_folder import read_settings


def unpacked(blocks, kind):
    """The payloads of a kind of block: JSON, or columns by name."""
    found = []
    for block in blocks:
        if block.kind != kind:
            continue
        data = gzip.decompress(block.data)
        if kind not in ("rows", "tokens"):
            found.append(json.loads(data))
            continue
        size = int.from_bytes(data[:4], "little")
        columns = {}
        for name, code, count, offset in json.loads(data[4 : 4 + size]):
            columns[name] = np.frombuffer(data, code, count, 4 + size + offset)
        found.append(columns)
    return found


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_every_kept_row_is_in_the_blocks_with_its_numbers(run):
    blocks = Collector([run]).collect()
    (rows,) = unpacked(blocks, "rows")
    assert len(rows["run"]) == 6 * 8 + 2 * 4
    texts = [row for block in unpacked(blocks, "texts") for row in block]
    assert len(texts) == len(rows["run"])
    episodes, tokens = unpacked(blocks, "tokens")  # the episodes of the first validation have a column more
    assert set(episodes) - set(tokens) == {"turn"}
    in_file = np.load(run / "samples/train_1.npz")
    first = int(np.flatnonzero((rows["step"] == 1) & (rows["validation"] == 0))[0])
    start = int(tokens["lengths"][: rows["tokens"][first] - len(episodes["lengths"])].sum())
    length = int(in_file["lengths"][0])
    assert (tokens["advantage"][start : start + length] == in_file["advantages"][:length]).all()
    assert rows["kl"][first] == pytest.approx(in_file["kl"][:length].astype(np.float32).mean(), rel=1e-3)
    assert rows["length"][first] == length
    assert np.isnan(rows["reward"][first + 7])  # a missing reward is no number
    assert rows["outcome"][first + 7] == 2
    assert rows["outcome"][first] == 1  # cut at the limit
    assert texts[first + 7][3] == "raised: ValueError: no answer"
    assert (rows["prompt"][first], rows["group"][first]) == (rows["prompt"][first + 1], rows["group"][first + 1])


def test_td_errors_are_the_definition():
    columns = {
        "reward": np.array([0, 0, 1, 0.5], np.float16),
        "value": np.array([0.25, 0.5, 0.75, 0.125], np.float16),
        "mask": np.array([1, 0, 1, 1], np.uint8),
    }
    batch = SampleBatch(1, False, [{}, {}], np.array([3, 1]), columns)
    # Two rows: three tokens, of which a tool wrote the second, and one.
    expected = [0.5 * 0.75 - 0.25, 0.0, 1 - 0.75, 0.5 - 0.125]
    assert td_errors(batch, gamma=0.5).tolist() == expected
    columns["turn"] = np.array([1, 1, 2, 1], np.float16)
    assert td_errors(batch, gamma=0.5, by_turn=True).tolist() == expected
    columns["turn"] = np.ones(4, np.float16)
    assert td_errors(batch, gamma=0.5, by_turn=True).tolist() == [0.75 - 0.25, *expected[1:]]


def test_validations_have_wilsons_interval_of_their_prompts(run):
    (metrics,) = unpacked(Collector([run]).collect(), "metrics")
    assert metrics["intervals"] == {
        "val-core/words/reward/mean@1": [[0, *wilson_interval(0.5, 2)], [6, *wilson_interval(1.5, 2)]],
    }
    assert metrics["columns"]["actor/grad_norm"][2] == "nan"


def test_an_interval_that_the_run_wrote_is_shown_as_it_is(run):
    name, beside = "val-core/words/reward/mean@1", "val-aux/words/reward/mean@1"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, name: 0.5, f"{beside}/low": 0.4, f"{beside}/high": 0.6}) + "\n")
    (metrics,) = unpacked(Collector([run]).collect(), "metrics")
    assert metrics["intervals"][name][-1] == [7, 0.4, 0.6]


def test_settings_say_what_differs_from_the_defaults(run):
    (settings,) = unpacked(Collector([run]).collect(), "settings")
    assert settings["recipe"] == "ppo"
    rows = {key: (value, default, differs) for key, value, default, differs, _ in settings["keys"]}
    assert rows["algorithm.gamma"] == ("0.5", "1.0", True)
    assert rows["algorithm.adv_estimator"] == ('"gae"', '"gae"', False)
    assert rows["algorithm.lam"] == ("1.0", "1.0", False)


@pytest.mark.parametrize(
    ("estimator", "loss", "name"),
    [
        ("gae", "vanilla", "ppo"),
        ("grpo", "vanilla", "grpo"),
        ("grpo", "gspo", "gspo"),
        ("rloo", "gpg", "rloo"),
        ("a/b.py:best", "vanilla", "best"),
    ],
)
def test_a_run_is_called_after_its_algorithm(tmp_path, estimator, loss, name):
    values = {"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": loss}}}}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    assert read_settings(tmp_path / "config.yaml")["recipe"] == name


def test_only_what_is_new_is_read_again(run):
    collector = Collector([run])
    collector.collect()
    assert collector.collect() == []
    write_batch(run, "train_7", np.random.default_rng(7), 8, 12, ())
    assert collector.collect() == []  # its step is not done
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "critic/score/mean"')
    assert collector.collect() == []  # nor is its line
    with (run / "metrics.jsonl").open("a") as file:
        file.write(": 0.5}\n")
    blocks = collector.collect()
    (rows,) = unpacked(blocks, "rows")
    assert set(rows["step"]) == {7}
    assert [block.first for block in blocks if block.kind == "texts"] == [56]
    assert unpacked(blocks, "metrics")[0]["steps"] == [7]
    assert not collector.was_rewritten()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text("".join(lines[:3]))
    (run / "new").rename(run / "metrics.jsonl")
    assert collector.was_rewritten()


def test_a_large_run_is_thinned_evenly_and_it_is_said(run):
    collector = Collector([run], PageLimits(samples=28, tokens=150, characters=4000))
    blocks = collector.collect()
    (rows,) = unpacked(blocks, "rows")
    assert [int((rows["step"] == step).sum()) for step in range(7)] == [2, 4, 4, 4, 4, 4, 6]
    shown = sum(int(block["lengths"].sum()) for block in unpacked(blocks, "tokens"))
    assert 0 < shown <= 8 * 12 + 150
    assert unpacked(blocks, "head")[0]["samples"] == {"shown": 28, "found": 56, "with_tokens": int((rows["tokens"] >= 0).sum())}


def test_rows_beyond_the_kept_ones_come_from_the_jsonl_files(run):
    folder = run / "rollouts"
    folder.mkdir()
    with (run / "config.yaml").open("a") as file:
        file.write("  rollout_data_dir: /moved/elsewhere/rollouts\n")
    lines = [{"step": 1, "input": "q", "output": f"r{i}", "gts": "a", "score": 0.25, "acc": True} for i in range(11)]
    (folder / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    blocks = Collector([run]).collect()
    (rows,) = unpacked(blocks, "rows")
    step = np.flatnonzero((rows["step"] == 1) & (rows["validation"] == 0))
    assert len(step) == 11
    assert rows["reward"][step[8:]].tolist() == [0.25] * 3
    assert rows["tokens"][step[8:]].tolist() == [-1] * 3


def test_a_number_that_is_none_in_a_kept_sample_is_text(run):
    file = run / "samples/train_2.npz"
    arrays = dict(np.load(file))
    kept = json.loads(arrays["rows"].tobytes())
    kept["rows"][0]["said"] = {"acc": float("nan"), "inner": [float("-inf")]}
    arrays["rows"] = np.frombuffer(json.dumps(kept).encode(), np.uint8)
    np.savez(file, **arrays)
    texts = [row for block in unpacked(Collector([run]).collect(), "texts") for row in block]
    assert {"acc": "nan", "inner": ["-inf"]} in [row[-1] for row in texts]


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_shown(run):
    (run / "samples/train_2.npz").write_bytes(b"PK\x03\x04 cut")
    (head,) = unpacked(Collector([run]).collect(), "head")
    assert head["samples"]["shown"] == 48
    assert "train_2.npz cannot be read" in head["runs"][0]["notes"][0]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("no JSON\n")
    (run / "config.yaml").write_text("data: [\n")
    said, *warnings = write_report([run], run / "report.html").splitlines()
    assert "48 samples" in said
    assert len(warnings) == 3
    assert "config.yaml" in warnings[0]
    assert "train_2.npz cannot be read" in warnings[1]
    assert warnings[2] == "warning: run: metrics.jsonl: 1 line cannot be read"


def test_numbers_that_are_not_finite_are_shown_as_the_run_itself_writes_them(run):
    """What other programs write among a run's lines: json's own NaN is no JSON, and the page's parser ends at it."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 91, "a/b": NaN, "c/d": -Infinity, "time": NaN}\n{"step": 92, "a/b": "nan"}\n[1]\n{"step": 93, "a/b"')
    (metrics,) = unpacked(Collector([run]).collect(), "metrics")
    assert metrics["steps"][-2:] == [91, 92]
    assert metrics["columns"]["a/b"][-2:] == ["nan", "nan"]
    assert metrics["columns"]["c/d"][-2] == "-inf"


def test_nothing_of_a_response_is_markup_in_the_file(tmp_path):
    run = make_run(tmp_path / "run", responses=HOSTILE)
    out = tmp_path / "report.html"
    write_report([run], out)
    page = out.read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="text/plain" class="block" data-kind="(\w+)" data-first="\d+">([^<]*)</script>\n', page)
    assert {kind for kind, _ in blocks} == {"head", "settings", "metrics", "rows", "texts", "tokens", "vocabulary"}
    assert all(re.fullmatch(r"[A-Za-z0-9+/=]*", data) for _, data in blocks)
    assert page.count("<script") == len(blocks) + 1
    assert "window.hit" not in page
    assert "default-src 'none'; script-src 'sha256-" in page
    rows = [row for block in unpacked(Collector([run]).collect(), "texts") for row in block]
    assert {row[1] for row in rows} == set(HOSTILE)  # as it was written, surrogates too


def test_the_page_never_parses_markup_and_needs_no_network():
    text = (
        "".join(read_part(f"{name}.js") for name in SCRIPTS)
        + "".join(read_part(f"{name}.css") for name in STYLES)
        + read_part("page.html")
    )
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser", "srcdoc"):
        assert word not in text, word
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name space, never fetched
    assert "@import" not in text
    assert "url(" not in text


def test_the_command_writes_one_file_of_two_runs_and_says_what_is_in_it(run, tmp_path, monkeypatch, capsys):
    other = make_run(tmp_path / "other", num_steps=2)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "other"]) == 0
    assert re.fullmatch(r"report.html: 2 runs, 80 samples, 0.\d MB; open it in a browser\n", capsys.readouterr().out)
    assert main([str(other)]) == 0
    assert (other / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], "is not the folder of a run: there is no metrics.jsonl in it; name one of: run"),
        (["run", "--out", "missing/report.html"], "cannot be written"),
    ],
)
def test_a_wrong_command_is_one_line_with_the_fix(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_fewer_samples_than_none_are_refused(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "--samples", "-1"])
    assert "--samples -1: at least 0" in capsys.readouterr().err


def test_runs_of_the_same_name_get_their_parents(tmp_path):
    runs = [make_run(tmp_path / parent / "ppo", num_steps=1) for parent in ("a", "b")]
    assert [run.name for run in Collector(runs).runs] == ["a/ppo", "b/ppo"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="a run writes it with its first step"):
        Collector([tmp_path])


def test_texts_that_hardly_compress_are_cut_until_the_file_is_small_enough(run, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.tools.report.command._MAX_BYTES", 20_000)
    asked = []

    class Watched(Collector):
        def __init__(self, runs, limits):
            asked.append(limits)
            super().__init__(runs, limits)

    monkeypatch.setattr("lockstep.tools.report.collector.Collector", Watched)
    write_report([run], tmp_path / "report.html")
    assert len(asked) > 1
    assert asked[-1].tokens < asked[0].tokens


def change_rows(file, change):
    """Write the .npz file again with other texts: `change(texts)` is what is written instead, as JSON text or a value."""
    arrays = dict(np.load(file))
    changed = change(json.loads(arrays["rows"].tobytes()))
    arrays["rows"] = np.frombuffer((changed if isinstance(changed, str) else json.dumps(changed)).encode(), np.uint8)
    np.savez(file, **arrays)


def with_row(texts, **changes):
    return texts | {
        "rows": [{key: value for key, value in (texts["rows"][0] | changes).items() if value != "GONE"}, *texts["rows"][1:]]
    }


MALFORMED = {
    "nested": lambda texts: "[" * 100_000,
    "nested in a row": lambda texts: json.dumps(with_row(texts, truth="X")).replace('"X"', "[" * 5_000 + "]" * 5_000),
    "no rows": lambda texts: {},
    "a list": lambda texts: [1],
    "rows of numbers": lambda texts: texts | {"rows": [1] * 8},
    "said no dict": lambda texts: with_row(texts, said="all"),
    "no said": lambda texts: with_row(texts, said="GONE"),
    "no prompt": lambda texts: with_row(texts, prompt="GONE"),
    "a number as response": lambda texts: with_row(texts, response=3),
    "a number as finish": lambda texts: with_row(texts, finish=[1]),
    "no reward": lambda texts: with_row(texts, reward="GONE"),
    "vocabulary of numbers": lambda texts: texts | {"vocabulary": {"1": 2}},
    "vocabulary no dict": lambda texts: texts | {"vocabulary": [1]},
    "no prompts counted": lambda texts: texts | {"sources": {"words": {"prompts": 0, "is_binary": True}}},
    "sources of numbers": lambda texts: texts | {"sources": {"words": 1}},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_malformed_texts_of_a_sample_file_are_named_and_the_rest_is_shown(run, change):
    change_rows(run / "samples/train_2.npz", change)
    said, *warnings = write_report([run], run / "report.html").splitlines()
    assert "48 samples" in said
    assert "train_2.npz cannot be read" in warnings[0]


ARRAYS = {
    "float tokens": {"tokens": np.zeros(80, np.float32)},
    "tokens in two dimensions": {"tokens": np.zeros((2, 40), np.int32)},
    "texts as tokens": {"tokens": np.array(["a"] * 80)},
    "negative lengths": {"lengths": np.array([-1, 81], np.int32)},
    "lengths that overflow": {"lengths": np.array([2**62, 2**62], np.int64)},
    "lengths of floats": {"lengths": np.array([8.5])},
    "complex kl": {"kl": np.zeros(80, np.complex64)},
    "no mask": {"mask": None},
}


@pytest.mark.parametrize("changes", ARRAYS.values(), ids=ARRAYS)
def test_malformed_arrays_of_a_sample_file_are_named_and_the_rest_is_shown(run, changes):
    file = run / "samples/train_2.npz"
    np.savez(file, **{name: array for name, array in (dict(np.load(file)) | changes).items() if array is not None})
    said, *warnings = write_report([run], run / "report.html").splitlines()
    assert "48 samples" in said
    assert "train_2.npz cannot be read" in warnings[0]


def test_a_file_that_inflates_is_not_read(run, monkeypatch):
    file = run / "samples/train_2.npz"
    arrays = dict(np.load(file))
    np.savez_compressed(file, **(arrays | {"rows": np.zeros(3_000_000, np.uint8)}))
    monkeypatch.setattr(run_files, "MAX_FILE_BYTES", 2_000_000)
    assert file.stat().st_size < 20_000
    _, warning = write_report([run], run / "report.html").splitlines()
    assert "train_2.npz cannot be read: its arrays are larger" in warning
    # Many files that are each small enough are bounded together.
    monkeypatch.setattr(run_files, "MAX_FILE_BYTES", 10_000_000)
    monkeypatch.setattr(run_folder, "_MAX_BYTES", 1_000_000)
    _, warning, *_ = write_report([run], run / "report.html").splitlines()
    assert "not shown" in warning


def test_metrics_and_settings_that_json_does_not_hold_are_shown_as_texts_or_left_out(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 91, "a/b": 1e400, "c/d": -1e999, "e/f": 1' + "0" * 400 + ', "val-core/words/reward/mean@1": 1e400}\n')
        file.write("[" * 100_000 + "\n" + '{"step": 92, "a": ' + '{"a":' * 900 + "1" + "}" * 901 + "\n")
        file.write('{"step": 1e3}\n{"step": true}\n{"step": -5}\n{"step": 99999999999}\n')
    (run / "config.yaml").write_text("a: .inf\nb: 2026-11-19\nalgorithm: {gamma: .nan}\ntrainer: {seed: 1" + "0" * 400 + "}\n")
    (metrics,) = unpacked(Collector([run]).collect(), "metrics")
    assert metrics["steps"][-1] == 91
    assert [metrics["columns"][name][-1] for name in ("a/b", "c/d", "e/f")] == ["inf", "-inf", "inf"]
    warnings = write_report([run], run / "report.html").splitlines()[1:]
    assert any("2 lines cannot be read" in warning for warning in warnings)


def test_tokens_that_the_policy_did_not_learn_from_have_no_ratio_and_no_probability(run):
    """A row whose reward is missing has a mask of 0: what is stored of it was never computed."""
    file = run / "samples/train_2.npz"
    arrays = dict(np.load(file))
    first = arrays["lengths"][0]
    arrays["mask"][:first] = 0
    np.savez(file, **arrays)
    batch = run_files.read_batch(2, False, [file], 1.0)
    for name in ("log_prob", "log_ratio", "sampler_log_ratio", "kl", "entropy"):
        assert np.isnan(batch.columns[name][:first]).all()
        assert np.isfinite(batch.columns[name][first:]).all()
