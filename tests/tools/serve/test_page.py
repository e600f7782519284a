"""docs/serve.md: its commands work as written, and it names every option, path and field."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

from helpers.serving import load_served, save_served_model, serving

from lockstep.tools.serve import _parser, protocol
from lockstep.tools.serve.fields import WITHOUT_EFFECT

PAGE = (Path(__file__).parents[3] / "docs/serve.md").read_text()
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ").splitlines()


def test_commands_work_as_written(tmp_path):
    for line in COMMANDS:
        if line.startswith("lockstep serve "):
            _parser().parse_args(shlex.split(line)[2:])
    asked = [shlex.split(line) for line in COMMANDS if line.startswith("curl ")]
    assert len(asked) == 2
    with serving(load_served(save_served_model(tmp_path)), name="smollm2-135m") as client:
        for words in asked:
            path = words[1].removeprefix("http://127.0.0.1:8000")
            status, answer = client.post(path, json.loads(words[words.index("-d") + 1]))
            assert (status, len(answer["choices"])) == (200, 1)
        for route in client.server.routes:
            assert route.path.partition("/{")[0] in PAGE, route.path


def test_every_option_and_field_is_named():
    options = {word for action in _parser()._actions for word in action.option_strings} - {"-h", "--help"}
    assert {option for option in options if option not in PAGE} <= {"--port", "--name"}
    source = "".join(inspect.getsource(function) for function in (protocol._drawing, protocol._form, protocol._template_kwargs))
    openais = {
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "stream_options",
        "add_generation_prompt",
    } | WITHOUT_EFFECT
    for field in set(re.findall(r'fields\.\w+\("(\w+)"', source)) - openais:
        assert f"`{field}`" in PAGE, field
