"""Conversion of text to tokens and of tokens to text: tokenizers, chat templates and incremental detokenization."""
