from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lockstep.data.encoder import PromptEncoder
from lockstep.data.prompt_shapes import prompt_shapes
from lockstep.errors import DataError

TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["She'll sell 48 clips", "<|im_end|>", "日本語 text", " \n"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}), min_size=1, max_size=3
)


def test_a_batch_has_the_ids_of_transformers_own_call_and_never_more_than_the_bound(qwen_like):
    encoder = PromptEncoder(qwen_like, {})

    @settings(max_examples=50, deadline=None)
    @given(prompts=st.lists(TEXT.filter(bool) | MESSAGES, min_size=1, max_size=6))
    def check(prompts):
        ids = encoder.encode(prompts, range(len(prompts)))
        for prompt, row_ids in zip(prompts, ids, strict=True):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            assert row_ids == qwen_like.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            roles = None if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
            assert len(row_ids) <= prompt_shapes([prompt]).num_bytes[0] + encoder.max_tokens_beyond_bytes(roles, prompt, 0)

    check()


def test_without_a_template_special_tokens_are_added_as_the_tokenizer_says(qwen_like):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(qwen_like.backend_tokenizer.to_str()))
    prompts = ["48 clips", "naïve"]
    assert PromptEncoder(tokenizer, {}).encode(prompts, [0, 1]) == [tokenizer.encode(p) for p in prompts]
    bos = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = bos
    assert tokenizer.encode("48 clips")[0] == 0
    encoder = PromptEncoder(tokenizer, {})
    assert encoder.encode(prompts, [0, 1]) == [tokenizer.encode(p) for p in prompts]
    assert len(tokenizer.encode("~")) <= 1 + encoder.max_tokens_beyond_bytes(None, "~", 0)


def test_the_refused_prompt_of_a_batch_is_named(tokenizer):
    prompts = [[{"role": role, "content": "w1"}] for role in ("user", "pirate", "user")]
    with pytest.raises(DataError, match=r"row 8: .*template.*role pirate"):
        PromptEncoder(tokenizer, {}).encode(prompts, [7, 8, 9])


def test_a_template_that_repeats_contents_or_refuses_the_probe_has_no_bound(tokenizer):
    assert PromptEncoder(tokenizer, {}).max_tokens_beyond_bytes(None, "w1", 0) is not None
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {{ m['content'] }}{% endfor %}"
    assert PromptEncoder(tokenizer, {}).max_tokens_beyond_bytes(None, "w1", 0) is None
    tokenizer.chat_template = "{% if messages[0]['content'] != 'w1' %}{{ raise_exception('no') }}{% endif %}" + template
    assert PromptEncoder(tokenizer, {}).max_tokens_beyond_bytes(None, "w1", 0) is None


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "is_bounded"),
    [
        (None, None, True),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, True),
        (None, pre_tokenizers.Metaspace(), True),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True), True),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=True)]), False),
        (normalizers.Replace("a", "bbb"), None, False),
        (normalizers.NFKC(), None, False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("four")]), None, False),
    ],
)
def test_only_tokenizers_whose_parts_are_known_have_a_bound(normalizer, pre_tokenizer, is_bounded):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    if normalizer:
        backend.normalizer = normalizer
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert (PromptEncoder(tokenizer, {}).max_tokens_beyond_bytes(None, "a", 0) is not None) == is_bounded
