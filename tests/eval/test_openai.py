"""The openai package's own calls against `lockstep serve`: what it sends is understood, what it gets it can read."""

from __future__ import annotations

import asyncio
import re

import pytest
from eval.parity import ROOT, served

openai = pytest.importorskip("openai")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def address():
    with served("smollm2-135m", "--dtype", "float32", "--num-tokens", "8192", "--api-key", "secret") as found:
        yield f"{found}/v1"


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=address, api_key="secret", max_retries=0, timeout=600)


def test_completions_of_text_and_tokens(client):
    answer = client.completions.create(
        model="smollm2-135m", prompt=["The capital of France is", "2, 4, 6,"], max_tokens=4, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens == 8
    pieces = client.completions.create(
        model="smollm2-135m", prompt="2, 4, 6,", max_tokens=4, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(pieces)
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == answer.choices[1].text
    assert pieces[-1].usage.completion_tokens == 4


def test_log_probs_of_a_prompt(client):
    answer = client.completions.create(
        model="smollm2-135m", prompt=[504, 3575, 282], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 4
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())


def test_chat_whole_and_streamed(client):
    body = {"model": "smollm2-135m", "messages": QUESTION, "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert "Paris" in message.content
    entries = answer.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    with client.chat.completions.stream(**body) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == message.content


def test_many_at_once_by_the_asynchronous_client(address):
    async def ask():
        async with openai.AsyncOpenAI(base_url=address, api_key="secret", timeout=600) as client:
            calls = (
                client.completions.create(model="smollm2-135m", prompt=f"{i}, {i + 1},", max_tokens=4, temperature=0)
                for i in range(8)
            )
            return await asyncio.gather(*calls)

    assert all(answer.choices[0].text for answer in asyncio.run(ask()))


def test_models_and_errors_have_the_types_that_the_package_expects(client, address):
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
    assert client.models.retrieve("smollm2-135m").id == "smollm2-135m"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smollm2-135m", prompt="a", temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="wrong", max_retries=0).models.list()


def test_the_python_of_the_page_works_as_written(address, capsys):
    page = (ROOT / "docs/serve.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    exec(code.replace("http://127.0.0.1:8000/v1", address).replace('api_key="none"', 'api_key="secret"'), {})
    assert capsys.readouterr().out.strip()
