"""Preloaded by the fork server, so that worker processes share one GPT-2 tokenizer."""

import gc

import preparation.encoding  # noqa: F401
from tokens.tokenizer import load_tokenizer

load_tokenizer("gpt2")
gc.freeze()  # a garbage collection would write to the shared pages, and so copy them
