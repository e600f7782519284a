import io
import math
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from lockstep.observability import display as display_module
from lockstep.observability import waiting
from lockstep.observability.display import LiveDisplay, PlainDisplay, make_display, shown_numbers, sparkline, with_interval
from lockstep.observability.spans import progress
from lockstep.observability.waiting import Lines

METRICS = {
    "critic/score/mean": 0.4123,
    "actor/ppo_kl": 0.5,
    "actor/kl_loss": 0.25,
    "actor/reward_kl_penalty": 0.00118,
    "actor/entropy": 1.234,
    "actor/lr": 1e-6,
    "response_length/mean": 7.43,
    "timing_s/gen": 1.21,
    "timing_s/reward": 0.01,
    "timing_s/update_actor": 1.3,
    "timing_s/step": 4.06,
}
CELLS = "reward 0.412  ref kl 0.0012  policy kl 0.5000  entropy 1.23  length 7.4  4.1 s"
LINE = f"step 12/12  {CELLS}  (gen 1.2 reward 0.0 update_actor 1.3)"

RUN = """
from lockstep.observability.display import make_display
with make_display() as display:
    display.start(total_steps=2, title="tiny run")
    for step in (1, 2):
        display.step(step, {"critic/score/mean": step / 4, "timing_s/step": 0.5})
    display.message("saved")
print("end")
"""

strange = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, -0.0])


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def plain(total_steps: int = 12) -> tuple[PlainDisplay, io.StringIO]:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.start(total_steps)
    return display, stream


# -- plain lines -----------------------------------------------------------------------------------------------------


def test_a_plain_step_is_exactly_one_flushed_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        display = PlainDisplay(stream)
        display.start(12)
        display.step(12, METRICS)
        assert (tmp_path / "log").read_text() == LINE + "\n"


@pytest.mark.parametrize(
    ("present", "shown"),
    [
        ({"actor/reward_kl_penalty": 0.00118, "actor/kl_loss": 0.25, "actor/ppo_kl": 0.5}, "  ref kl 0.0012  policy kl 0.5000"),
        ({"actor/kl_loss": 0.25, "actor/ppo_kl": 0.0}, "  ref kl 0.2500"),
        ({"actor/ppo_kl": 0.5}, "  policy kl 0.5000"),
        ({"actor/reward_kl_penalty": 1e-9, "actor/ppo_kl": -1e-9}, ""),
        ({}, ""),
    ],
)
def test_kl_says_to_what_and_is_no_column_of_zeros(present: dict[str, float], shown: str) -> None:
    display, stream = plain(total_steps=1)
    display.step(1, present)
    assert stream.getvalue() == f"step 1/1{shown}\n"


def test_episodes_have_their_turns_calls_and_waits_in_the_line() -> None:
    display, stream = plain()
    told = {
        "agent/turns": 2.25,
        "agent/calls": 1.2,
        "agent/faults": 0.0,
        "agent/missing": 3.0,
        "agent/environment_s": 0.5,
        "agent/wait_s": 1.0,
    }
    display.step(12, {"critic/score/mean": 0.5, "timing_s/step": 4.0} | told)
    line = stream.getvalue().splitlines()[-1]
    assert line == "step 12/12  reward 0.500  turns 2.2  calls 1.2  environment_s 0.5  wait_s 1.0  missing 3  4.0 s"


def test_waits_are_shown_again_by_a_display_that_begins_again_and_on_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose workers were lost had no line about a wait from then on."""
    now, stream, speaking = [1000.0], io.StringIO(), Lines()
    speaking._process = os.getpid()  # only this test speaks, no thread does
    monkeypatch.setattr(waiting, "LINES", speaking)
    monkeypatch.setattr(display_module, "LINES", speaking)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])

    def lines() -> int:
        before = stream.getvalue().count("a long wait")
        now[0] += 11
        with progress("a long wait"):
            speaking.say()
        return stream.getvalue().count("a long wait") - before

    display = make_display(stream)
    assert lines() == 1, "models are loaded"
    display.start(3)
    assert lines() == 1
    display.close()
    assert lines() == 0
    with display.waits():
        assert lines() == 1, "new workers are started"
        display.start(3)
        assert lines() == 1
        display.close()
    display.start(3)
    assert lines() == 1
    display.close()


def test_strange_numbers_are_shown_short() -> None:
    display, stream = plain(total_steps=1)
    numbers = {"critic/score/mean": math.nan, "actor/ppo_kl": -math.inf, "actor/entropy": 1e300}
    display.step(1, numbers | {"response_length/mean": -0.001, "timing_s/step": 3})
    assert stream.getvalue() == "step 1/1  reward nan  policy kl -inf  entropy 1.00e+300  length 0.0  3.0 s\n"


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("val-core/x/acc/mean@1", "val-aux/x/acc/mean@1/low", "val-aux/x/acc/mean@1/high"),
        ("val/accuracy", "val/accuracy_low", "val/accuracy_high"),
        ("val/accuracy/hard", "val/accuracy_low/hard", "val/accuracy_high/hard"),
    ],
)
def test_an_interval_stands_behind_its_number_and_not_on_lines_of_its_own(name: str, low: str, high: str) -> None:
    metrics = {name: 0.391, low: 0.333, high: 0.452, "val/loss": 1.0}
    assert with_interval(metrics, name, ".3f") == "0.391 [0.333, 0.452]"
    assert shown_numbers(metrics, ("val-core/", "val/")) == [name, "val/loss"]


def test_validation_has_its_own_lines_and_alone_makes_no_step_line() -> None:
    display, stream = plain()
    validation = {"val-core/x/acc/mean@1": 0.7312, "val-aux/x/acc/std": 0.1, "val-core/y/acc/mean@1": 0.5}
    validation |= {"val-aux/x/acc/mean@1/low": 0.7, "val-aux/x/acc/mean@1/high": 0.7611}
    lines = [
        "validation at step {}: val-core/x/acc/mean@1 0.731 [0.700, 0.761]",
        "validation at step {}: val-core/y/acc/mean@1 0.500",
    ]
    display.step(0, validation)
    assert stream.getvalue().splitlines() == [line.format(0) for line in lines]
    display.step(12, METRICS | validation)
    assert stream.getvalue().splitlines()[2:] == [LINE] + [line.format(12) for line in lines]


# -- the live view ---------------------------------------------------------------------------------------------------


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def live(screen: io.StringIO) -> Iterator[LiveDisplay]:
    with LiveDisplay(Console(file=screen, force_terminal=True, width=100, height=40, color_system=None)) as display:
        yield display


def final_frame(screen: io.StringIO, live: LiveDisplay) -> str:
    """What is drawn after the line codes that erase the frame before."""
    live.close()
    return without_codes(screen.getvalue().rpartition("\x1b[1A\x1b[2K")[2])


def test_live_shows_progress_recent_steps_stage_times_and_the_reward_curve(live: LiveDisplay, screen: io.StringIO) -> None:
    live.start(total_steps=60, first_step=2, title="tiny [bold]run")
    for step in range(3, 13):
        live.step(step, METRICS | {"critic/score/mean": step / 10, "timing_s/step": step})
    frame = final_frame(screen, live)
    assert "tiny [bold]run" in frame, "a title is text, not markup"
    assert re.search(r"━+ +12/60 steps +ETA 0:\d\d:\d\d", frame)
    rows = [line.split() for line in frame.splitlines() if re.match(r" *\d+ +", line)]
    assert rows == [[str(n), f"{n / 10:.3f}", "0.0012", "0.5000", "1.23", "7.4", f"{n:.1f}"] for n in range(5, 13)]
    assert "step  reward  ref kl  policy kl  entropy  length  seconds" in frame
    assert "gen 1.2 reward 0.0 update_actor 1.3" in frame
    assert "reward  ▁▂▃▃▄▅▆▆▇█  0.300 to 1.200" in frame


def test_live_shows_what_is_running_and_how_far_it_is(live: LiveDisplay, screen: io.StringIO) -> None:
    live.start(total_steps=60)
    with progress("gen", 64, "responses") as one:
        one.done, one.tokens = 37, 4210
        for _ in range(600):  # it is redrawn by itself
            time.sleep(0.05)
            if "generating  37 of 64 responses  4,210 tokens" in without_codes(screen.getvalue()):
                break
        else:
            pytest.fail(screen.getvalue())
        assert "generating" not in final_frame(screen, live), "nothing runs once the display is closed"


def test_messages_prints_and_validation_stay_above_the_live_area(live: LiveDisplay, screen: io.StringIO) -> None:
    live.start(total_steps=60)
    live.message("saved [step 1] " + "x" * 120)
    print("from a reward function")
    live.step(1, {"val-core/x/acc/mean@1": 0.7312})
    text = without_codes(screen.getvalue())
    assert "saved [step 1] " + "x" * 120 + "\n" in text
    assert "from a reward function" in text
    assert "validation at step 1: val-core/x/acc/mean@1 0.731" in text
    assert "1/60 steps" not in text, "a validation is not a step"


def lines_of(written: str) -> list[str]:
    """The lines that a terminal shows after this: carriage returns, line feeds, erased lines, and the cursor going up."""
    lines, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z])|([^\x1b]+)", written):
        if code == "\x1b[2K":
            lines[row] = ""
        elif code.endswith("A"):
            row -= int(code[2:-1] or 1)
        for char in text:
            if char == "\r":
                column = 0
            elif char == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            else:
                lines[row] = f"{lines[row][:column]:<{column}}{char}{lines[row][column + 1 :]}"
                column += 1
    return [line.rstrip() for line in lines if line.strip()]


def test_a_message_before_the_live_area_stands_on_a_line_of_its_own(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a wait is shown, as when models are loaded."""
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=100, color_system=None))
    monkeypatch.setenv("COLUMNS", "100")
    with display.waits(), progress("loading the model of ref (2 of 2)"):
        waiting._area.refresh()
        display.message("resuming from checkpoints/run")
        waiting._area.refresh()
        shown = lines_of(screen.getvalue())
        assert shown[0] == "resuming from checkpoints/run"
        assert [line.partition("  ")[0] for line in shown[1:]] == ["loading the model of ref (2 of 2)"]


def test_an_exception_leaves_the_terminal_in_order(screen: io.StringIO) -> None:
    before = sys.stdout, sys.stderr, sys.breakpointhook
    display = LiveDisplay(Console(file=screen, force_terminal=True))

    def run_that_fails() -> None:
        with display:
            display.start(total_steps=60)
            assert screen.getvalue().startswith("\x1b[?25l"), "the cursor is hidden while the area is live"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_that_fails()
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
    assert (sys.stdout, sys.stderr, sys.breakpointhook) == before
    display.close()


def test_waits_are_shown_before_the_live_area_is_there(screen: io.StringIO) -> None:
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=100))
    with display.waits():
        with progress("starting new workers"):
            waiting._area.refresh()
        display.start(3)
        assert waiting._area is None
        display.close()
    assert "starting new workers" in screen.getvalue()


def test_breakpoint_gets_the_terminal_and_the_live_area_returns(
    live: LiveDisplay, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_stdout, seen = sys.stdout, []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys.stdout))
    live.start(total_steps=60)
    assert sys.stdout is not real_stdout
    monkeypatch.setattr(display_module, "_is_under_debugger", lambda: True)
    breakpoint()
    assert seen == [real_stdout]
    live.step(12, METRICS)
    assert CELLS in without_codes(screen.getvalue()), "plain lines while the debugger is at work"
    monkeypatch.setattr(display_module, "_is_under_debugger", lambda: False)
    screen.truncate(0)
    live.step(13, METRICS)
    assert sys.stdout is not real_stdout
    assert "12/60 steps" in screen.getvalue().partition("\x1b[2K")[0], (
        "what the debugger wrote is not erased, only what is drawn now"
    )
    live.close()
    assert sys.stdout is real_stdout


@settings(max_examples=40, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys([*METRICS, "val-core/x"], strange)), max_size=12))
def test_no_number_makes_a_display_raise(metrics_of_steps: list[dict[str, float]]) -> None:
    live = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=80, height=30))
    for display in (PlainDisplay(io.StringIO()), live):
        with display:
            display.start(total_steps=0)
            for step, metrics in enumerate(metrics_of_steps):
                display.step(step, metrics)


@given(st.lists(strange, max_size=200), st.integers(1, 50))
@example([-1.7e308, 1.7e308], 2)
@example([1.7e308, 1.7e308], 1)
def test_a_sparkline_has_at_most_its_width_and_spans_its_bars(numbers: list[float], width: int) -> None:
    line = sparkline(numbers, width, bars="01234567")
    if not any(map(math.isfinite, numbers)):
        assert line == ""
        return
    curve = re.sub(r"  \S+ to \S+$", "", line)
    assert len(curve) == min(len(numbers), width)
    assert "0" in curve
    assert set(curve) <= set("01234567 ")


def test_a_sparkline_averages_groups_and_leaves_gaps() -> None:
    assert sparkline([0, 2, math.nan, math.inf, 7, 9], 3, bars="01234567") == "0 7  1.000 to 8.000"


def test_live_needs_no_unicode() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), force_terminal=True, width=80)
    with LiveDisplay(console) as display:
        display.start(total_steps=2)
        for reward in (0.0, 1.0):
            display.step(1, {"critic/score/mean": reward})
    assert b"reward  _@  0.000 to 1.000" in raw.getvalue()


# -- choosing --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_live_unless_it_is_dumb_or_a_debugger_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
    assert isinstance(make_display(Terminal()), LiveDisplay)
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert isinstance(make_display(Terminal()), PlainDisplay)
    monkeypatch.undo()
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal()), PlainDisplay)


def run_on_terminal(*arguments: str, keys: bytes = b"") -> str:
    """What a Python process writes to a real (pseudo) terminal."""
    terminal, its_end = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "PYTHONUTF8": "1"}
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment)
    os.close(its_end)
    os.write(terminal, keys)
    output = b""
    try:
        while chunk := os.read(terminal, 65536):
            output += chunk
    except OSError:
        pass  # how Linux says that the other end is closed
    finally:
        os.close(terminal)
    assert process.wait(timeout=20) == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


def test_a_process_on_a_terminal_is_live() -> None:
    output = run_on_terminal("-c", RUN)
    assert "\x1b[?25l" in output, "the cursor is hidden"
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "and shown again"
    assert "2/2 steps" in output
    assert "saved\n" in without_codes(output)
    assert without_codes(output).endswith("end\n")


ECHO = """
import os, sys, termios
from lockstep.observability.display import make_display
def echoes():
    flags = termios.tcgetattr(0)[3]
    return bool(flags & termios.ECHOCTL), bool(flags & termios.NOFLSH)
before = echoes()
with make_display() as display:
    display.start(total_steps=2)
    display.message(f"inside {echoes()}")
print("outside", before, echoes())
"""


def test_ctrl_c_is_not_echoed_into_the_live_area_and_drops_no_part_of_it() -> None:
    code = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + ECHO
    output = without_codes(run_on_terminal("-c", code))
    assert "inside (False, True)" in output
    assert "outside (True, False) (True, False)" in output


def test_a_piped_process_prints_plain_lines() -> None:
    result = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    assert re.sub(r"ETA \S+", "ETA x", result.stdout).splitlines() == [
        "tiny run",
        "step 1/2  reward 0.250  0.5 s  ETA x",
        "step 2/2  reward 0.500  0.5 s",
        "saved",
        "end",
    ]


def test_a_process_under_pdb_is_plain_even_without_breakpoints(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    output = run_on_terminal("-m", "pdb", "-c", "continue", str(script), keys=b"q\n")
    assert "step 2/2  reward 0.500" in output
    assert "\x1b[?25l" not in output


FORK = """
import os, sys
from lockstep.observability.display import make_display
with make_display() as display:
    display.start(total_steps=2)
    print("parent", type(sys.stdout).__name__)
    child = os.fork()
    if child == 0:
        print("child", type(sys.stdout).__name__, sys.breakpointhook is sys.__breakpointhook__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_forked_child_prints_past_the_live_area() -> None:
    output = without_codes(run_on_terminal("-c", FORK))
    assert "parent FileProxy" in output
    assert "child TextIOWrapper True" in output
