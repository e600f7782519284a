from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lockstep.data.encoder import PromptEncoder, num_bytes
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
            assert len(row_ids) <= num_bytes(encoder.render([prompt], [0])[0]) + encoder.tokens_beyond_bytes

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
    assert len(tokenizer.encode("~")) <= num_bytes("~") + encoder.tokens_beyond_bytes < math.inf


def test_the_refused_prompt_of_a_batch_is_named(tokenizer):
    prompts = [[{"role": role, "content": "w1"}] for role in ("user", "pirate", "user")]
    with pytest.raises(DataError, match=r"row 8: .*template.*role pirate"):
        PromptEncoder(tokenizer, {}).encode(prompts, [7, 8, 9])


def test_the_bound_holds_for_every_character_in_every_normal_form():
    # No character from 0x30000 on has another normal form than itself.
    for character in (chr(code) for code in range(1, 0x30000) if not 0xD800 <= code <= 0xDFFF):
        assert max(len(unicodedata.normalize(form, character).encode()) for form in ("NFC", "NFD")) <= num_bytes(character)


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
    assert math.isfinite(PromptEncoder(tokenizer, {}).tokens_beyond_bytes) == is_bounded
