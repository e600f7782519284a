"""Load a tokenizer that can pad, or say why not."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import DataError
from lockstep.models.source import check_hub, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SAMPLE = "The 12 quick foxes' pay: 3.14 + x^2 \u2260 na\u00efve; def f(a):\n    return a"


def hf_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or a model on the Hugging Face hub; without a pad token, the end token pads.

    Raises DataError when the folder does not exist, holds no usable tokenizer, the hub cannot give one, or there is
    neither a pad nor an end token.
    """
    from transformers import AutoTokenizer

    path = model_folder(path)
    is_local = Path(path).expanduser().exists()
    if not is_local and (path.startswith((".", "~", "/")) or path.count("/") > 1):
        raise DataError(f"{path} does not exist; expected a folder with tokenizer files, or a hub id such as Qwen/Qwen3-0.6B")
    if not is_local:
        check_hub(path, "tokenizer.json", "tokenizer_config.json")
    source = str(Path(path).expanduser()) if is_local else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError, ImportError: the library has no one class for this
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        expected = "a folder with tokenizer files" if is_local else "an existing folder, or a hub id within reach"
        if is_local and not any((*Path(source).glob("*token*"), *Path(source).glob("vocab*"))):
            reason = "there are none; copy tokenizer.json and tokenizer_config.json of its model there"
        raise DataError(f"cannot load a tokenizer from {path}; expected {expected}: {reason}") from error
    # From a folder with a model config alone, the library makes a tokenizer that knows nothing and raises nothing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise DataError(f"the tokenizer in {path} has an empty vocabulary; expected tokenizer files such as tokenizer.json")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {path} has neither pad_token nor eos_token; set one in tokenizer_config.json")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def has_tokenizer(path: str) -> bool:
    """Whether there are a tokenizer's files with the model in `path`, as far as can be seen here: one on the hub has some."""
    folder = Path(model_folder(path)).expanduser()
    return not folder.exists() or any((*folder.glob("*token*"), *folder.glob("vocab*")))


def check_same_tokenizer(
    own: PreTrainedTokenizerBase, path: str, trust_remote_code: bool, key: str, shared_only: bool = False
) -> None:
    """Raise DataError unless the model in `path`, the value of `key`, has the same tokenizer: the same tokens with the same ids, and the
    same cut of some text. With `shared_only` either may have tokens of its own (for padding, for an end) that the other lacks."""
    other = hf_tokenizer(path, trust_remote_code)
    if len(own) != len(other) and not shared_only:
        raise DataError(
            f"{key}={path} has another tokenizer: {len(other)} tokens, not {len(own)}; token ids would not mean the same"
        )
    vocabulary = other.get_vocab()
    for token, number in sorted(own.get_vocab().items(), key=itemgetter(1)):
        if vocabulary.get(token, number if shared_only else None) != number:
            raise DataError(f"{key}={path} has another tokenizer: {token!r} is {vocabulary.get(token)} there, not {number}")
    # What each puts around a text is its own: rows are read as token ids.
    if own.encode(_SAMPLE, add_special_tokens=False) != other.encode(_SAMPLE, add_special_tokens=False):
        raise DataError(f"{key}={path} has another tokenizer: it cuts {_SAMPLE!r} in another way")


def separate_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Where the end token pads, make another special token pad: a row that ends with padding has no end for transformers.

    Raises DataError where the tokenizer has no other.
    """
    end = tokenizer.eos_token
    if tokenizer.pad_token != end:
        return
    others = [tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    others += [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    found = next((token for token in others if token not in (None, end)), None)
    if found is None:
        raise DataError(f"the tokenizer has no special token beside its end token {end!r}; add a pad_token to it")
    tokenizer.pad_token = found
