"""The live page's server."""

import json
import shutil
import threading
import urllib.error
import urllib.request

import pytest
from helpers.report_run import make_run

from lockstep.errors import DataError
from lockstep.tools.report.watch import LiveRuns, main, make_server


@pytest.fixture
def served(tmp_path):
    run = make_run(tmp_path / "run", num_steps=2)
    server = make_server([run])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield run, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def get(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
        return answer.read().decode()


def test_the_page_comes_without_data_and_the_blocks_as_they_grow(served):
    run, address = served
    page = get(f"{address}/")
    assert "connect-src 'self'" in page
    assert 'class="block"' not in page
    first = json.loads(get(f"{address}/blocks?since=0"))
    count = len(first["blocks"])
    assert [block["kind"] for block in first["blocks"]].count("rows") == 1
    assert json.loads(get(f"{address}/blocks?since={count}&epoch=0")) == {"epoch": 0, "blocks": []}
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 2000.0, "actor/entropy": 0.5}\n')
    new = json.loads(get(f"{address}/blocks?since={count}&epoch=0"))
    assert [block["kind"] for block in new["blocks"]] == ["metrics"]


def test_a_run_that_goes_back_to_a_checkpoint_begins_anew(served):
    run, address = served
    count = len(json.loads(get(f"{address}/blocks"))["blocks"])
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text("".join(lines[:2]))
    (run / "new").rename(run / "metrics.jsonl")
    again = json.loads(get(f"{address}/blocks?since={count}&epoch=0"))
    assert again["epoch"] == 1
    assert again["blocks"][0]["kind"] == "head"


@pytest.mark.parametrize(
    ("path", "headers", "status"), [("/etc/passwd", {}, 404), ("/blocks?since=x", {}, 400), ("/", {"Host": "evil.example"}, 403)]
)
def test_what_is_not_the_report_is_refused(served, path, headers, status):
    with pytest.raises(urllib.error.HTTPError) as error:
        get(served[1] + path, **headers)
    assert error.value.code == status


def test_a_folder_that_went_away_is_an_answer_not_a_crash(served):
    run, address = served
    shutil.rmtree(run)
    with pytest.raises(urllib.error.HTTPError) as error:
        get(f"{address}/blocks")
    assert error.value.code == 503


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere"], "nowhere is not a folder"), ([".", "--port", "99999"], "choose another")]
)
def test_a_wrong_command_is_one_line(arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_run_may_begin_later_than_its_watch(tmp_path):
    live = LiveRuns([tmp_path / "run"])
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match="a run writes it with its first step"):
        live.update()
    (tmp_path / "run").rmdir()
    make_run(tmp_path / "run", num_steps=1)
    assert live.update()[1][0].kind == "head"
