"""docs/serve.md: its commands work as written, and it names every option, path and field."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from helpers.serving import load_served, save_served_model, serving

from lockstep.tools.serve import _parser, schema

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
        for route in client.server.app.routes:
            assert route.path.partition("/{")[0] in PAGE, route.path


def test_every_option_and_field_is_named():
    options = {word for action in _parser()._actions for word in action.option_strings} - {"-h", "--help"}
    assert {option for option in options if option not in PAGE} <= {"--port", "--name"}
    openais = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "stream_options", "add_generation_prompt"}
    openais |= {"max_completion_tokens", "tool_choice", "best_of", "model"}
    models = (schema.CompletionRequest, schema.ChatRequest, schema.TokenizeRequest)
    for field in {field for model in models for field in model.model_fields} - openais:
        assert f"`{field}" in PAGE, field


def test_the_openapi_page_describes_every_path_with_its_models(tmp_path):
    with serving(load_served(save_served_model(tmp_path))) as client:
        status, page = client.get("/openapi.json")
        assert client.get("/docs")[0] == 200
    assert status == 200
    asked = {
        "/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatRequest",
        "/tokenize": "TokenizeRequest", "/detokenize": "DetokenizeRequest",
    }  # fmt: skip
    for path, model in asked.items():
        described = page["paths"][path]["post"]
        assert described["requestBody"]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{model}"}
        assert set(described["responses"]) == {"200", "default"}
    fields = page["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(fields) == set(schema.CompletionRequest.model_fields)
    assert len(fields["prompt"]["anyOf"]) == 4
    assert fields["temperature"]["maximum"] == 100.0


def test_other_commands_do_not_import_the_packages_of_the_server():
    code = "import sys, lockstep.cli, lockstep.tools.serve; print({'fastapi', 'starlette', 'uvicorn', 'pydantic'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
