"""A command and what it printed as a picture of a terminal: docs/images/terminal.svg.

    lockstep ppo trainer.total_training_steps=40 | python docs/terminal_picture.py 'lockstep ppo' > docs/images/terminal.svg

Of the steps some are shown, evenly; of progress within a stage and of the samples that a run prints, nothing. The picture names no font
file: it needs no network.
"""

import io
import re
import sys

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

_STEPS, _WIDTH = 9, 118
_COLOURS = [
    (60, 66, 80),
    (240, 120, 100),
    (110, 205, 140),
    (225, 185, 90),
    (110, 165, 250),
    (195, 140, 230),
    (90, 195, 210),
    (225, 229, 238),
]
_THEME = TerminalTheme((20, 22, 27), (205, 211, 222), _COLOURS, _COLOURS)
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def chosen(lines: list[str]) -> list[str]:
    """The lines before the first step, some steps with the validations among them, and what the run came to."""
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    if not steps:
        return lines
    every = max(1, -(-len(steps) // _STEPS))
    shown = {*steps[::-1][::every], *(i for i, line in enumerate(lines) if line.startswith("validation") and i > steps[0])}
    end = next((i for i, line in enumerate(lines) if line.startswith("what to try")), len(lines))
    return lines[: steps[0]] + [lines[i] for i in sorted(shown)] + lines[max(shown) + 1 : end]


def picture(command: str, printed: str) -> str:
    """The SVG."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold white")))
    for line in chosen([line for line in printed.splitlines() if not re.match(r"\[|  .* \d+ s$", line)]):
        text = Text(line[:_WIDTH], "bold white" if line.startswith(("done", "validation")) else "")
        text.highlight_regex(r"(?<=  )reward \d\S*|\d\.\d+ after", "bold green")
        text.highlight_regex(r"\(gen .*", "blue")
        console.print(text)
    return console.export_svg(title="", theme=_THEME, code_format=_FORMAT, unique_id="terminal")


if __name__ == "__main__":
    print(picture(sys.argv[1], sys.stdin.read()), end="")
