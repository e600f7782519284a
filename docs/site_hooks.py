"""MkDocs hooks: README.md is the home page, and links into the repository lead to copies of the files inside the site.

```text
docs/NAME         NAME
README.md         index.md
OTHER.md          more/OTHER.md     a page
any other file    source/PATH.txt   its text
a folder          no link, only its name
```
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name come last in it: a new page is never lost."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    found = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    more = [page for page in found if page not in named]
    config.nav = [*config.nav, *([{"More": more}] if more else [])]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the home page and every file of the repository that a page links to."""
    waiting, known = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], set()
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        if path.suffix == ".md":
            waiting += [target for target in _targets(path) if target.is_file()]
        if path.is_relative_to(ROOT / "docs"):
            continue
        content = rewritten(path, path.read_text()) if path.suffix == ".md" else path.read_text(errors="replace")
        files.append(File.generated(config, site_path(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The links of a page of docs/ as the site has them; generated pages have them already."""
    source = ROOT / "docs" / page.file.src_uri
    return rewritten(source, markdown) if source.is_file() else markdown


def site_path(path: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] == "docs":
        return inside.relative_to("docs").as_posix()
    if path.suffix == ".md":
        return "index.md" if inside.as_posix() == "README.md" else f"more/{inside.as_posix().replace('/', '_')}"
    return f"source/{inside.as_posix()}.txt"


def rewritten(path: Path, text: str) -> str:
    """`text` of the file `path` with links that the site has."""

    def replace(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        target, hash_, anchor = link.partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        place = (path.parent / target).resolve()
        if place.is_dir():
            return label
        here = os.path.dirname(site_path(path))
        return f"{mark}[{label}]({os.path.relpath(site_path(place), here or '.')}{hash_}{anchor})"

    return _LINK.sub(replace, text)


def _targets(path: Path) -> list[Path]:
    links = (match[3].partition("#")[0] for match in _LINK.finditer(path.read_text()))
    return [(path.parent / link).resolve() for link in links if link and "://" not in link]
