"""The page in a real browser."""

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.report_run import HOSTILE, make_run

from lockstep.tools.report import write_report
from lockstep.tools.report.watch import make_server

DASH = "\u2013"


def probe(name):
    return (Path(__file__).parent / f"{name}.js").read_text()


def column(page, name):
    """The shown numbers of a column of the list, from the top."""
    return page.eval_on_selector_all(f".scroller .row .cell.{name}", "cells => cells.map(cell => cell.textContent)")


def numbers(texts):
    return [float("nan") if text == DASH else float(text) for text in texts]


def samples(page):
    page.click("#tab-samples")
    page.wait_for_selector(".scroller .row")
    return page


def count(page):
    return int(page.inner_text("#sample-count").split(" of ")[0].replace(",", ""))


def test_curves_intervals_and_headline(report, open_page):
    page = open_page(report)
    assert page.title() == "run - Lockstep report"
    chart = page.locator('figure[data-metric="val-core/words/reward/mean@1"]')
    assert chart.locator("path.interval").count() == 2
    assert "first 0.25, last 0.75" in chart.locator("svg").get_attribute("aria-label")
    assert "0.25 → 0.75 [" in page.inner_text(".card")
    assert "1 alarm: entropy_collapse" in page.inner_text(".alarm-summary")
    assert "(1 not finite)" in page.inner_text('figure[data-metric="actor/grad_norm"]')
    page.fill("#metric-search", "entropy")
    assert page.locator("figure.chart:visible").count() == 1
    page.hover('figure[data-metric="actor/entropy"] svg')
    assert page.inner_text('figure[data-metric="actor/entropy"] .chart-value').startswith("step ")


def test_every_column_sorts_both_ways_with_missing_numbers_last(report, open_page):
    page = samples(open_page(report))
    for name in ("reward", "length", "kl"):
        for is_descending in (True, False):
            page.click(f'[data-sort="{name}"]')
            assert page.get_attribute(f".head .cell.{name}", "aria-sort") == ("descending" if is_descending else "ascending")
            order = page.evaluate("() => Array.from(view.order)")
            values = page.evaluate("name => Array.from(store.rows[name], v => Number.isNaN(v) ? null : v)", name)
            shown = [values[row] for row in order]
            known = [value for value in shown if value is not None]
            assert known == sorted(known, reverse=is_descending)
            assert None not in shown[: len(known)]
            assert numbers(column(page, name))[:5] == pytest.approx(known[:5], rel=1e-2, abs=1e-3)


def test_filters_by_reward_length_kl_step_outcome_split_and_text(report, open_page):
    page = samples(open_page(report))
    assert count(page) == 20 * 16 + 8
    page.fill('[data-limit="reward-0"]', "0.5")
    assert count(page) == 20 * 7 + 4  # of 16 samples 8 are right, of which one has no reward
    page.fill('[data-limit="length-1"]', "9")
    assert set(column(page, "length")) <= {"8", "9"}
    page.fill('[data-limit="reward-0"]', "")
    page.fill('[data-limit="length-1"]', "")
    page.fill('[data-limit="step-0"]', "20")
    page.select_option('select[aria-label="Split"]', "training")
    assert count(page) == 16
    page.fill('[data-limit="step-0"]', "")
    page.select_option('select[aria-label="Split"]', "validation")
    assert count(page) == 8
    page.select_option('select[aria-label="Split"]', "all")
    page.select_option('select[aria-label="Outcome"]', "missing")
    assert count(page) == 20
    assert set(column(page, "reward")) == {DASH}
    page.click(".scroller .row")
    assert "ValueError: no answer" in page.inner_text("#detail .failure")
    page.select_option('select[aria-label="Outcome"]', "all")
    page.fill('[data-limit="kl-0"]', "0")
    assert count(page) == page.evaluate("() => store.rows.kl.filter(v => v >= 0).length")
    page.fill('[data-limit="kl-0"]', "")
    page.fill("#sample-search", "HELD-OUT 2")
    page.wait_for_function("() => view.order.length === 2")


def test_strips_are_the_files_numbers_and_follow_the_cursor(report, open_page):
    page = samples(open_page(report))
    page.fill('[data-limit="step-1"]', "1")
    page.select_option('select[aria-label="Split"]', "training")
    page.click('.scroller .row[data-row="4"]')
    page.wait_for_selector(".strips")
    labels = page.eval_on_selector_all(".strip-labels div", "nodes => nodes.map(node => node.textContent)")
    assert labels == [
        "probability",
        "ratio",
        "ratio to sampler",
        "advantage",
        "value",
        "TD error",
        "return",
        "reward",
        "KL",
        "entropy",
        "mask",
    ]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    tokens = page.evaluate(
        """async () => Object.fromEntries(
            Object.entries(await tokensOf(4)).filter(([name]) => name !== "length").map(([name, values]) => [name, Array.from(values)]))"""
    )
    shown = dict(
        re.findall(
            r"(probability|ratio|advantage|value|TD error|return|reward|KL|entropy|mask) (-?[\d.e-]+)", page.inner_text(".readout")
        )
    )
    for name, values in {"advantage": "advantage", "value": "value", "TD error": "td_error", "KL": "kl", "mask": "mask"}.items():
        assert float(shown[name]) == pytest.approx(tokens[values][1], rel=1e-3), name
    gamma = 0.5
    assert float(shown["TD error"]) == pytest.approx(
        tokens["reward"][1] + gamma * tokens["value"][2] - tokens["value"][1], abs=5e-3
    )
    slider = page.locator(".strip-canvas")
    assert slider.get_attribute("aria-valuenow") == "1"
    assert "advantage" in slider.get_attribute("aria-valuetext")
    page.click('.tokens span[data-token="5"]')
    assert slider.get_attribute("aria-valuenow") == "5"
    box = page.locator(".strip-canvas canvas").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 5)
    assert slider.get_attribute("aria-valuenow") == "0"
    before = page.evaluate("() => getComputedStyle(document.querySelector('.tokens span')).backgroundColor")
    page.select_option('select[aria-label="Colour the tokens by"]', "mask")
    assert page.evaluate("() => getComputedStyle(document.querySelector('.tokens span')).backgroundColor") != before


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>system<|end_header_id|>\n\nx<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>",
        "<user>How many?<assistant>",
        "How many?",
    ],
)
def test_the_list_shows_what_tells_prompts_apart(report, open_page, prompt):
    assert open_page(report).evaluate("prompt => question(prompt)", prompt).startswith("How many?")


def test_an_episode_is_shown_turn_by_turn(report, open_page):
    page = samples(open_page(report))
    page.fill('[data-limit="step-1"]', "0")
    page.click('.scroller .row[data-row="0"]')
    page.wait_for_selector(".turn")
    assert page.eval_on_selector_all(".turn", "nodes => nodes.map(node => node.textContent)") == ["turn 1", "environment", "turn 2"]
    assert page.locator(".tokens pre >> nth=1").locator("span.not-own").count() == 2
    page.click('.tokens span[data-token="3"]')
    assert re.search(r"probability \u2013", page.inner_text(".readout"))  # it has none


def test_siblings_are_side_by_side(report, open_page):
    page = samples(open_page(report))
    page.click(".scroller .row")
    page.wait_for_selector(".sibling")
    assert page.locator(".sibling").count() == 2
    page.select_option('select[aria-label="Split"]', "validation")
    page.click(".scroller .row")
    page.select_option('select[aria-label="Samples of this prompt from"]', "anywhere")
    heads = page.eval_on_selector_all(".sibling-head", "nodes => nodes.map(node => node.textContent)")
    assert len(heads) == 2
    assert "step 0 val" in heads[0]
    assert "step 20 val" in heads[1]


def test_the_keyboard_does_all_of_it(report, open_page):
    page = open_page(report)
    page.keyboard.press("2")
    page.wait_for_selector(".scroller .row")  # the first sample is chosen
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    order = page.evaluate("() => Array.from(view.order.slice(0, 3))")
    assert page.evaluate("() => list.selected") == order[1]
    assert page.get_attribute('.scroller .row[aria-selected="true"]', "data-row") == str(order[1])
    assert page.url.endswith(f"#samples/{order[1]}")
    page.keyboard.press("]")
    assert page.evaluate("() => list.selected") == order[0]
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "sample-search"
    page.keyboard.type("jk")  # in a field these are letters
    assert page.evaluate("() => list.selected") == order[0]
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    page.keyboard.press("4")
    assert page.is_visible("#settings")
    page.focus("#tab-settings")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#alarms")


def test_every_control_has_a_name(two_runs, open_page):
    page = open_page(two_runs)
    for tab in ("overview", "samples", "stages", "settings"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(50)
        if tab == "samples":
            page.click(".scroller .row")
            page.wait_for_selector(".sibling")
    nameless = page.evaluate(probe("nameless"))
    assert nameless == []


def test_stages_memory_settings_and_alarms(report, open_page):
    page = open_page(report)
    page.click("#tab-stages")
    table = page.inner_text(".run-stages table.plain")
    assert "gen" in table
    assert "update_actor" in table
    assert "23.0 GB" in page.inner_text("table.memory")  # the peak of all steps
    page.click("#tab-settings")
    assert "algorithm.gamma" in page.inner_text("table.settings")
    assert "algorithm.lam" not in page.inner_text("table.settings")
    page.check("#settings-all")
    assert "algorithm.lam" in page.inner_text("table.settings")
    page.click("#tab-alarms")
    assert "fell <b>fast</b>" in page.inner_text("#alarms")
    page.click("#alarms summary")
    assert '"response": "<i>r</i>"' in page.inner_text("#alarms")


def test_runs_side_by_side_and_switched_off(two_runs, open_page):
    page = open_page(two_runs)
    chart = page.locator('figure[data-metric="critic/score/mean"] path.line')
    assert chart.count() == 2
    page.click("#tab-settings")
    row = page.locator("table.settings tr.apart", has_text="algorithm.gamma")
    assert row.locator("td").all_inner_texts() == ["0.5", "0.9", "1.0"]
    samples(page)
    both = count(page)
    page.click(".run-switch >> nth=1")
    assert 0 < count(page) < both
    page.click("#tab-overview")
    assert chart.count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(report, open_page, scheme):
    page = samples(open_page(report, color_scheme=scheme))
    page.click(".scroller .row")
    page.wait_for_selector(".tokens span")
    low = page.evaluate(probe("low_contrast"))
    assert low == []
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 380) == (scheme == "light")


def test_a_narrow_screen_shows_list_and_sample_in_turn(report, open_page):
    page = samples(open_page(report, viewport={"width": 390, "height": 780}))
    assert page.is_hidden("#detail")
    page.click(".scroller .row")
    page.wait_for_selector(".strips")
    assert page.is_hidden(".table")
    page.click("#detail-back")
    assert page.is_visible(".table")
    for tab in ("overview", "samples", "stages", "settings", "alarms"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(100)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, tab


def test_nothing_of_a_response_runs_and_all_of_it_is_shown(hostile, open_page):
    page = samples(open_page(hostile))
    page.evaluate("() => { window.hit = 0; }")
    shown = set()
    for _ in range(16):
        page.keyboard.press("j")
        page.wait_for_timeout(60)
        shown.add(page.evaluate("async () => (await textsOf(list.selected)).response"))
        assert page.locator("#detail img, #detail script, .table script, .table img").count() == 0
    wanted = {json.loads(json.dumps(text)) for text in HOSTILE if "lone" not in text}
    assert wanted <= shown
    page.fill("#sample-search", "</script>")
    page.wait_for_function("() => view.order.length > 0 && view.order.length < store.rows.count")
    page.fill("#sample-search", "null")
    page.wait_for_timeout(400)
    page.wait_for_selector(".excerpt-response:has-text('⟨U+202E⟩')")
    assert "␀" in page.inner_text(".excerpt-response >> nth=0")
    for tab in ("overview", "stages", "settings", "alarms"):
        page.click(f"#tab-{tab}")
    assert page.evaluate("() => window.hit") == 0
    assert page.inner_text("#title") == "<img src=x onerror=hit()>"


def test_the_policy_refuses_a_script_that_is_not_the_pages(report, chromium):
    page = chromium.new_page()
    page.goto(report.as_uri())
    page.evaluate(
        """() => {
            window.hit = 0;
            addEventListener("securitypolicyviolation", () => { window.refused = true; });
            const node = document.createElement("button");
            node.setAttribute("onclick", "window.hit = 1");
            document.body.append(node);
            node.click();
        }"""
    )
    page.wait_for_function("() => window.refused")
    assert page.evaluate("() => window.hit") == 0
    page.close()


def test_watch_shows_a_step_when_it_is_done(tmp_path, open_page):
    run = make_run(tmp_path / "run", num_steps=2)
    server = make_server([run])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = open_page(f"http://127.0.0.1:{server.server_address[1]}/")
        assert page.inner_text(".card dd >> nth=0") == "2"
        page.fill("#metric-search", "score")
        samples(page)
        page.click(".scroller .row")
        before = page.evaluate("() => list.selected")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "time": 1010.0, "critic/score/mean": 0.9}\n')
        page.wait_for_function("() => store.runs[0].steps.length === 4", timeout=60_000)
        assert page.evaluate("() => list.selected") == before
        page.click("#tab-overview")
        assert page.inner_text(".card dd >> nth=0") == "3"
        assert page.inner_text("#status") == "live"
        assert page.input_value("#metric-search") == "score"
        assert "last 0.9" in page.get_attribute('figure[data-metric="critic/score/mean"] svg', "aria-label")
    finally:
        server.shutdown()
        server.server_close()


def test_small_numbers_are_whole_and_the_first_sample_is_shown_at_once(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    for file in (run / "samples").glob("*.npz"):
        arrays = dict(np.load(file))
        arrays["kl"][:] = np.float16(-4.77e-7)
        np.savez(file, **arrays)
    write_report([run], run / "report.html")
    page = open_page(run / "report.html")
    page.click("#tab-samples")
    page.wait_for_selector("#detail .facts")
    page.wait_for_selector(".scroller .cell.kl:has-text('e-7')")
    cut = page.evaluate("[...document.querySelectorAll('.scroller .cell.kl')].filter((c) => c.scrollWidth > c.clientWidth).length")
    assert cut == 0


def test_a_validation_of_a_part_of_the_rows_is_not_joined_to_the_others(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["val-aux/share_of_rows"] = 0.5
    lines[3]["val-core/words/reward/mean@1"] = 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "alarms.jsonl").write_text(
        json.dumps({"step": 1, "name": "flat", "text": "t", "key": "the reward (try `lockstep rewards check`)"}) + "\n"
    )
    write_report([run], run / "report.html")
    page = open_page(run / "report.html")
    chart = "[data-metric='val-core/words/reward/mean@1']"
    page.wait_for_selector(f"{chart} circle")
    assert page.locator(f"{chart} circle.partial").count() == 1
    assert page.get_attribute(f"{chart} path.line", "d").count("M") == 2
    assert "0.5 → 0.75" in page.inner_text(".card")  # 0.25 was of other rows
    page.click("#tab-alarms")
    assert page.inner_text("#alarms code") == "lockstep rewards check"
    assert "`" not in page.inner_text("#alarms")


def test_the_rows_of_the_first_validation_are_a_series_of_their_own(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["val-aux/share_of_rows"] = 0.5
    name = "val-core/words/reward/mean@1"
    lines[3] |= {name: 0.5, f"val-first/{name}": 0.3}
    lines[6][f"val-first/{name}"] = 0.35
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([run], run / "report.html")
    page = open_page(run / "report.html")
    page.wait_for_selector(f"[data-metric='{name}'] circle")
    assert page.locator(f"[data-metric='{name}'] circle").count() == 2 + 3
    assert page.locator(f"[data-metric='{name}'] circle.partial").count() == 3
    label = page.get_attribute(f"[data-metric='{name}'] svg", "aria-label")
    assert "run: first 0.5, last 0.75" in label
    assert "rows of the first validation: first 0.25, last 0.35" in label
    assert "0.25 → 0.35" in page.inner_text(".card")
    assert page.locator("[data-metric^='val-first']").count() == 0
