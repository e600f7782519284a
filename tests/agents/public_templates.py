"""The template on a folder of chat templates: `python -m tests.agents.public_templates FOLDER [--out FILE]`.

For the 41 original templates of TRL's wheel: `pip download --no-deps trl`, unzip it, FOLDER is trl/chat_templates. Each has a tokenizer of
bytes with the special tokens that it names. Says for each whether the tokens between turns are proven not to depend on the turns before,
whether it has a place for tools, which parser reads its calls, and whether a plain answer stays when a question follows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.chat_templates import SCHEMAS, tokenizer_for

from lockstep.agents.chat_template import ConversationTemplate, TurnTemplate
from lockstep.agents.environment import Action, Message
from lockstep.agents.parsers import detect_parser
from lockstep.data.conversations import ChatTemplate
from lockstep.errors import LockstepError

ASKS: Message = {"role": "user", "content": "one"}
MORE: Message = {"role": "user", "content": "two"}


def examine(template: str) -> dict[str, Any]:
    """What is known of a template; a refusal is the message's text."""
    tokenizer = tokenizer_for(template)
    found: dict[str, Any] = {}
    for name, make in (
        ("sampled", lambda: _proven(TurnTemplate(tokenizer, {}))),
        ("sampled_with_tools", lambda: _proven(TurnTemplate(tokenizer, {}, SCHEMAS))),
        ("template", lambda: _rendered(ConversationTemplate(tokenizer, {}), tokenizer)),
        ("template_with_tools", lambda: _proven(ConversationTemplate(tokenizer, {}, SCHEMAS))),
        ("parser", lambda: detect_parser(template)),
    ):
        try:
            found[name] = make()
        except LockstepError as error:
            found[name] = f"refused: {error}"[:200]
    return found


def _proven(template: TurnTemplate) -> str:
    return "tools in the template's form" if template.has_tools else "yes"


def _rendered(template: ConversationTemplate, tokenizer: Any) -> str:
    """The policy must see what the template writes, in the same context or a new one."""
    end = min(template.end_ids) if template.end_ids else tokenizer.eos_token_id
    context = [*template.start([ASKS]), *tokenizer.encode("alpha", add_special_tokens=False), end]
    new, is_new = template.next_tokens([ASKS, Action("alpha", "alpha"), MORE], context)
    seen = tokenizer.decode(new if is_new else context + new)
    answer = {"role": "assistant", "content": f"{template._begun}alpha"}
    assert seen == ChatTemplate(tokenizer, {}).render([ASKS, answer, MORE], add_generation_prompt=True), seen
    return "a new context" if is_new else "goes on"


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    paths = [path for path in sorted(args.folder.glob("*.jinja")) if not path.stem.endswith("_training")]
    results = {path.stem: examine(path.read_text()) for path in paths}
    names = list(next(iter(results.values())))
    counts = {name: dict(Counter(result[name].partition(":")[0] for result in results.values())) for name in names}
    text = json.dumps({"templates": len(results), "counts": counts, "results": results}, indent=1, ensure_ascii=False)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
