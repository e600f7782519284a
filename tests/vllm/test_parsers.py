"""vLLM's own tool parsers as an oracle. What ours does otherwise on purpose is said in docs/agents.md."""

import json
import logging
import random

import pytest
from helpers.tool_calls import SCHEMAS, WRITE, mutated
from helpers.vllm_engines import needs_vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.agents.parsers import PARSERS

pytestmark = needs_vllm

COUNT = 400
FORMS = {
    "hermes": ("hermes", WRITE["hermes"]),
    "qwen_xml": ("qwen3_coder", WRITE["qwen_xml"]),
    "llama_json": ("llama3_json", WRITE["llama_json"]),
    "llama_json, bare": ("llama3_json", lambda calls: WRITE["llama_json"](calls).removeprefix("<|python_tag|>")),
    "pythonic": ("pythonic", WRITE["pythonic"]),
    "pythonic, tags": ("llama4_pythonic", lambda calls: f"<|python_start|>{WRITE['pythonic'](calls)}<|python_end|>"),
    "pythonic, lines": (
        "olmo3",
        lambda calls: "<function_calls>\n" + "\n".join(WRITE["pythonic"]([call])[1:-1] for call in calls) + "\n</function_calls>",
    ),
    "mistral": ("mistral", WRITE["mistral"]),
    "mistral, names": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)),
}
SPECIAL = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "<think>",
    "</think>",
)
TEXTS = ("", "x", "two words", 'say "hi", it\'s', "é 漢", "a\nb", "<b>", "[1, 2]", "{}", "3", "true", "null", "(", "\\n", "; ")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def tokenizer_of(*special):
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def theirs(form, text):
    """[(name, arguments)] that vLLM finds."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    tokenizer = tokenizer_of(*SPECIAL, *(["[ARGS]"] if form == "mistral, names" else []))
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object", **s}}} for n, s in SCHEMAS.items()]
    parser = ToolParserManager.get_tool_parser(FORMS[form][0])(tokenizer, [ChatCompletionToolsParam(**tool) for tool in tools])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=tools)
    found = parser.extract_tool_calls(text, request)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]


def ours(form, text):
    parsed = PARSERS[form.partition(",")[0]].parse(text, SCHEMAS)
    return [(call.name, call.arguments) for call in parsed.calls], parsed.faults


def calls_at_random(chance):
    def arguments():
        given = {"a": chance.randint(-9, 10**6), "s": chance.choice(TEXTS), "x": {"k": [1, None, chance.choice(TEXTS)]}}
        return {name: given[name] for name in chance.sample(sorted(given), chance.randint(0, 3))}

    return [("f", arguments()) if chance.random() < 0.7 else ("g", {}) for _ in range(chance.randint(1, 3))]


@pytest.mark.parametrize("form", FORMS)
def test_well_formed_calls_are_read_alike(form):
    chance = random.Random(0)
    for _ in range(COUNT):
        calls = calls_at_random(chance)
        text = FORMS[form][1](calls)
        assert ours(form, text) == (calls, ()), text
        assert theirs(form, text) == calls, text


@pytest.mark.parametrize("form", FORMS)
def test_no_call_of_a_malformed_text_is_lost_in_silence_and_none_is_made_up(form):
    """What vLLM finds ours finds, or says what is wrong; and ours finds more only where vLLM has given the whole text up."""
    chance = random.Random(1)
    differ = []
    for _ in range(COUNT):
        text = mutated(FORMS[form][1](calls_at_random(chance)), chance)
        if chance.random() < 0.3:
            text = f"Let me see. {text}"
        (mine, faults), other = ours(form, text), attempt(form, text)
        if mine != other and not faults and other:
            differ.append((text, mine, other))
    report = "\n".join(f"{text!r}\n  ours {mine}\n  vllm {other}" for text, mine, other in differ[:10])
    assert not differ, f"{len(differ)} of {COUNT}:\n{report}"


def attempt(form, text):
    """What vLLM finds; nothing where it raises or gives arguments that are no JSON."""
    try:
        return theirs(form, text)
    except Exception:
        return []
