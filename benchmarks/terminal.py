"""The README's picture of a run: what `lockstep ppo` printed, as an SVG. Every fifth step is shown, and no samples.

lockstep ppo trainer.total_training_steps=40 trainer.test_freq=10 | python benchmarks/terminal.py > docs/images/terminal.svg
"""

import io
import re
import sys

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COMMAND = "lockstep ppo trainer.total_training_steps=40 trainer.test_freq=10"
WIDTH, EVERY = 118, 5
HIDDEN = re.compile(r"\[(data_source|prompt|response|ground_truth|score)\]|  \w.* \d+ s$|what to try next|  lockstep |\s{20}")
THEME = TerminalTheme((24, 27, 34), (205, 211, 222), [(0, 0, 0)] * 8)
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#181b22" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, 18)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def is_shown(line: str) -> bool:
    """Whether a line is in the picture."""
    step = re.match(r"step (\d+)/", line)
    return int(step[1]) % EVERY == 0 if step else not HIDDEN.match(line)


def main() -> None:
    """Draw what stdin has."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, color_system="truecolor", force_terminal=True)
    console.print(Text.assemble(("$ ", "bold #6ecd8c"), (COMMAND, "bold")))
    for line in filter(is_shown, sys.stdin.read().splitlines()):
        style = "#6ea5fa" if line.startswith(("validation at", "  val-core")) else ""
        console.print(Text(line, style, no_wrap=True, overflow="crop"))
    print(console.export_svg(theme=THEME, code_format=SVG, unique_id="terminal"), end="")


if __name__ == "__main__":
    main()
