"""Preloaded by the fork server too, so that worker processes share one GPT-2 tokenizer."""

import gc
from contextlib import suppress

from basics.errors import UserError
from tokens.tokenizer import load_tokenizer

with suppress(UserError):  # the command reports it
    load_tokenizer("gpt2")
gc.freeze()  # a garbage collection would write to the shared pages, and so copy them
