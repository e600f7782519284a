"""One HTML file of the page's parts and the data.

Nothing of the data is markup: a block is base64 in an element that no browser runs, and the page writes texts with `textContent` only.
On top of that the Content-Security-Policy allows the page's own script and style, by their hashes, and no connection; with `live` to its
own server.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files

from lockstep.tools.report.blocks import Block

SCRIPTS = (
    "dom", "unpack", "store", "format", "charts", "overview", "stages", "settings", "alarms", "filters", "table", "strips", "detail",
    "samples", "keyboard", "main",
)  # fmt: skip
"""The page's scripts, in the order in which they are joined."""
STYLES = ("base", "overview", "samples")


def assemble(blocks: Sequence[Block], *, live: bool = False) -> Iterator[str]:
    """The file, piece by piece. With `live` the page asks its server for the blocks that come later."""
    own_server = "'self'" if live else "'none'"
    style, script = (_joined(names, suffix) for names, suffix in ((STYLES, "css"), (SCRIPTS, "js")))
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            f"connect-src {own_server}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head, body = _read("page.html").split("<!-- body -->")
    yield head.replace("POLICY", policy).replace("MODE", "live" if live else "file")
    yield f"<style>{style}</style>\n</head>\n"
    yield body
    for block in blocks:
        yield f'<script type="text/plain" class="block" data-kind="{block.kind}" data-first="{block.first}">{block.base64}</script>\n'
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _joined(names: Sequence[str], suffix: str) -> str:
    text = "\n".join(_read(f"{name}.{suffix}") for name in names)
    return f'\n"use strict";\n{text}' if suffix == "js" else text


def _read(name: str) -> str:
    return (files("lockstep.tools.report") / "page" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
