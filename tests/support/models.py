"""Small models with random weights, and their export as GPT-2."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from gpt import GPTModel
from run_config import ModelConfig
from tests.support.tokenizers import write_tokenizer
from tests.support.workplace import TINY_MODEL, Workplace, write_tokens
from tokens.tokenizer import choose_tokenizer
from trainer.weight_formats import gpt2_config, to_gpt2

SHAPE = {"vocab_size": 61, "context_length": 12, "emb_dim": 24, "n_heads": 3, "n_layers": 2,
         "drop_rate": 0.1, "qkv_bias": False}


def random_model(**changes: Any) -> GPTModel:
    """Return a model none of whose weights has its initial value, so that any mix-up shows."""
    torch.manual_seed(0)
    model = GPTModel(ModelConfig(**SHAPE | changes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return model


def export(model: GPTModel, directory: Path, **changes: Any) -> Path:
    """Write a model as GPT-2, with changes of its config.json; return the directory."""
    directory.mkdir(exist_ok=True)
    config = gpt2_config(model.config, None) | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(to_gpt2(model.state_dict(), model.config), directory / "model.safetensors",
              {"format": "pt"})
    return directory


def add_dataset_with_tokenizer(workplace: Workplace) -> tuple[Path, str]:
    """Add a dataset with a tokenizer of its own and an exported model.

    Returns the model's directory and the tokenizer's name.
    """
    dataset_dir = workplace.add_dataset()
    name = choose_tokenizer(str(write_tokenizer(dataset_dir, vocab_size=257))).name
    write_tokens(dataset_dir / "train.safetensors", np.zeros(4000, dtype=np.uint16),
                 {"tokenizer": name})
    torch.manual_seed(0)
    return export(GPTModel(ModelConfig(**TINY_MODEL)), workplace.root / "published"), name
