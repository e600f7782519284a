"""`make report-images RUNS='ppo_run grpo_run' TEXT=gsm8k_run`: the pictures of docs/report.md, as WebP under 150 kB each."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from lockstep.tools.report import write_report

MAX_BYTES = 150_000


def save(page: Page, file: Path) -> None:
    """A picture of what is in sight, at the best quality that keeps within MAX_BYTES."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for quality in range(92, 30, -6):
        picture.save(file, "WEBP", quality=quality, method=6)
        if file.stat().st_size <= MAX_BYTES:
            print(f"{file}: {file.stat().st_size} bytes")
            return
    raise SystemExit(f"{file} is over {MAX_BYTES} bytes at any quality")


def choose_sample(page: Page) -> None:
    """A wrong answer of the first run's middle, with its tokens."""
    page.click("#tab-samples")
    page.wait_for_selector(".scroller .row")
    row = page.evaluate(
        """() => { const r = store.rows; const middle = store.runs[0].steps[Math.floor(store.runs[0].steps.length * 0.3)];
                   return [...r.step.keys()].find(i => r.run[i] === 0 && r.step[i] >= middle && r.reward[i] === 0 && r.tokens[i] >= 0); }"""
    )
    page.evaluate("row => choose(row)", row)
    page.wait_for_selector(".strips")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)


def text_picture(browser: Browser, folder: Path, run: Path) -> None:
    """A long response of a real model."""
    with tempfile.TemporaryDirectory() as temporary:
        write_report([run], Path(temporary) / "report.html")
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1.5)
        page.goto(f"{(Path(temporary) / 'report.html').as_uri()}#samples/3")
        page.wait_for_selector(".strips")
        page.locator("h3", has_text="Response").scroll_into_view_if_needed()
        page.evaluate("() => detail.strips.move(17)")
        page.evaluate("() => { document.querySelector('.response').scrollIntoView(); }")
        save(page, folder / "report_text.webp")


def main(folder: Path, runs: list[Path], text_run: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        report = Path(temporary) / "report.html"
        write_report(runs, report)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, width, height, scheme in (("", 1280, 800, "light"), ("_dark", 1280, 800, "dark"), ("_narrow", 400, 780, "light")):
            scale = 2 if name == "_narrow" else 1.5
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, device_scale_factor=scale, color_scheme=scheme)
            page.goto(report.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            if not name:
                save(page, folder / "report_overview.webp")
            choose_sample(page)
            save(page, folder / (f"report{name}.webp" if name else "report_tokens.webp"))
        text_picture(browser, folder, text_run)
        browser.close()


if __name__ == "__main__":
    folder, text_run, *runs = map(Path, sys.argv[1:])
    main(folder, runs, text_run)
