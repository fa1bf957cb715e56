"""Tokens per second with and without a key-value cache, on an untrained GPT-2 small.

    python -m benchmarks.generation --rounds 3

Checks each time that both generate the same tokens. The rounds are interleaved, and the medians
are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from gpt import GPTModel
from reporting.sampling import SamplingOptions, generate_tokens
from run_config import ModelConfig

GPT2_SMALL = ModelConfig(vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12,
                         n_layers=12, drop_rate=0.0, qkv_bias=True, tie_weights=True)


@torch.inference_mode()
def without_cache(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """Pick the most likely token each time, with a forward pass over the whole context."""
    token_ids = torch.tensor([prompt], device=model.token_embedding.weight.device)
    for _ in range(count):
        last = model.final_norm(model.transform(model.embed(token_ids))[:, -1])
        next_id = F.linear(last, model.head_weight).argmax(dim=-1, keepdim=True)
        token_ids = torch.cat([token_ids, next_id], dim=1)
    return token_ids[0, len(prompt):].tolist()


def with_cache(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    return generate_tokens(model, prompt, SamplingOptions(count, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPTModel(GPT2_SMALL).to(device).eval()
    prompt = torch.randint(50257, (16,)).tolist()
    for length in options.lengths:
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(options.rounds):
            generated = []
            for name, run in (("without", without_cache), ("with", with_cache)):
                began = time.perf_counter()
                generated.append(run(model, prompt, length))
                seconds[name].append(time.perf_counter() - began)
            if generated[0] != generated[1]:
                raise SystemExit(f"with the cache, one of {length} tokens differs")
        without, cached = (statistics.median(seconds[name]) for name in ("without", "with"))
        print(f"{length:5} tokens: {length / without:8.1f} per second without a cache,"
              f" {length / cached:8.1f} with: {without / cached:.1f} times", flush=True)


if __name__ == "__main__":
    main()
