"""Imported by the process that workers are forked from: all share one tokenizer of GPT-2's."""

import gc

import preparation.encoding  # noqa: F401
from tokens.tokenizer import load_tokenizer

load_tokenizer("gpt2")
gc.freeze()  # a look through it would copy what is shared
