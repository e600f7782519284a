from helpers.word_tokenizer import plain_tokenizer, tokenizer  # noqa: F401
