"""Text out of a model, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt import GPTModel
from tokenizer import decode, load_tokenizer


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is drawn: `temperature` 0 takes the likeliest, `top_k` 0 keeps all."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 42


@torch.inference_mode()
def generate_tokens(model: GPTModel, prompt: list[int], options: SamplingOptions) -> list[int]:
    """Continue a prompt of at least one token id; give the new ids only.

    Draws from a generator of its own: the training's random state stays as it was. A context
    longer than the model's is cut from the left. Leaves the model in eval mode.
    """
    device = model.token_embedding.weight.device
    generator = torch.Generator(device).manual_seed(options.seed)
    token_ids = torch.tensor([prompt], device=device)  # (1, T)
    model.eval()
    for _ in range(options.max_new_tokens):
        logits = model(token_ids[:, -model.config.context_length :])[0, -1].float()  # (V,)
        next_id = _draw(logits, options, generator=generator)  # (1,)
        token_ids = torch.cat([token_ids, next_id[None]], dim=1)
    return token_ids[0, len(prompt) :].tolist()


def sample_text(model: GPTModel, tokenizer_name: str) -> str:
    """Give what a model makes up without a prompt."""
    tokenizer = load_tokenizer(tokenizer_name)
    options = SamplingOptions(max_new_tokens=400)
    return decode(tokenizer, generate_tokens(model, [tokenizer.eot_token], options))


def _draw(logits: Tensor, options: SamplingOptions, *, generator: torch.Generator) -> Tensor:
    if options.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if 0 < options.top_k < logits.numel():
        smallest_kept = logits.topk(options.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    probabilities = (logits / options.temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)
