import io
import os
import sys

import pytest

from lockstep.observability import waiting
from lockstep.observability.spans import Progress, StageTimer, expect, progress, running
from lockstep.observability.waiting import LINES, describe, leave_terminal, now_running, shown_waits


def test_a_line_says_what_how_much_of_how_much_and_how_fast() -> None:
    one = Progress("gen", 100.0, total=64, unit="responses", done=37, tokens=4210)
    assert describe(one, now=110.0) == "generating  37 of 64 responses  4,210 tokens  421 tokens/s  10 s"
    assert "generating  0 of 64 responses  900 tokens  90 tokens/s" in describe(
        Progress("gen", 100.0, total=64, unit="responses", written=900), now=110.0
    )
    assert describe(Progress("loading the model of actor", 100.0), now=112.4) == "loading the model of actor  12 s"
    assert describe(Progress("steps", 0.0, done=12000), now=1.0) == "steps  12,000  1 s"


def test_the_innermost_is_shown_and_a_stage_that_raises_is_over() -> None:
    assert now_running() == ""
    timer = StageTimer()
    with timer.stage("testing"):
        expect(10, "responses").done += 4
        expect(6, "responses")  # one more batch of the ten
        assert now_running().startswith("validating  4 of 10 responses")
        with pytest.raises(ZeroDivisionError), progress("compiling"):
            assert now_running().startswith("compiling")
            raise ZeroDivisionError
        expect(20, "responses")
        assert now_running().startswith("validating  4 of 24 responses")
    assert running == []
    assert expect(3, "rows").total == 3, "counting is no error where nothing is being done"


def test_a_log_gets_a_line_when_ten_seconds_were_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stream = [1000.0], io.StringIO()
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    LINES.start(stream)
    try:
        with progress("loading the model of actor"):
            for wait, lines in ((9, 0), (1, 1), (9, 1), (1, 2)):
                now[0] += wait
                LINES.say()
                assert stream.getvalue().count("  loading the model of actor") == lines
            now[0] += 9
            LINES.heard()  # a step's line, for example
            now[0] += 9
            LINES.say()
            assert stream.getvalue().count("\n") == 2
        now[0] += 100
        LINES.say()
        assert stream.getvalue().count("\n") == 2, "nothing is said when nothing is being done"
    finally:
        LINES.stop()
    with progress("more"):
        LINES.say()
    assert "more" not in stream.getvalue()


def test_a_terminal_has_one_line_that_goes_away_and_a_fork_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, streams = io.StringIO(), (sys.stdout, sys.stderr)
    with shown_waits(screen, is_live=True), progress("reading the tokenizer"):
        assert sys.stdout is not streams[0], "prints appear above the line"
        child = os.fork()
        if child == 0:
            os._exit(0 if (sys.stdout, sys.stderr) == streams else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        waiting._area.refresh()
        assert "reading the tokenizer" in screen.getvalue()
        leave_terminal()  # a display begins
        assert (sys.stdout, sys.stderr) == streams
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l"), "the cursor is shown again"
