"""Chromium, and reports to open in it. Run by `make test-report`, in an environment of its own."""

import shutil
from pathlib import Path

import pytest
from helpers.report_run import HOSTILE, make_run

from lockstep.tools.report import write_report

try:
    from playwright.sync_api import sync_playwright
except ModuleNotFoundError:
    collect_ignore_glob = ["test_*.py"]  # make test has no browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"


@pytest.fixture(scope="session")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """`open_page(file or address, **options of a context)`: a page that is ready. Every error in it fails the test."""
    contexts, errors = [], []

    def open_(address, **options):
        context = chromium.new_context(**({"viewport": {"width": 1400, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on(
            "request", lambda request: None if request.url.startswith(("file:", "http://127.0.0.1")) else errors.append(request.url)
        )
        page.goto(address if isinstance(address, str) else Path(address).as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """A report of one run."""
    folder = tmp_path_factory.mktemp("report")
    write_report([make_run(folder / "run", num_steps=20, rows=16)], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    runs = [make_run(folder / "first", num_steps=20), make_run(folder / "second", num_steps=12, seed=1)]
    (runs[1] / "config.yaml").write_text("algorithm:\n  gamma: 0.9\n  adv_estimator: grpo\n")
    write_report(runs, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    write_report([make_run(folder / "<img src=x onerror=hit()>", responses=HOSTILE)], folder / "report.html")
    return folder / "report.html"
