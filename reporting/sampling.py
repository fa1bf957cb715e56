"""Text generation, one token at a time."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basics.errors import describe
from basics.files import append_whole
from basics.json_files import to_json
from gpt import Block, GPTModel
from tokens.tokenizer import Tokenizer, load_tokenizer

SAMPLE_TOKENS = 64  # per prompt at a validation: one or two seconds on a GPU


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled: `temperature` 0 is greedy, `top_k` 0 keeps all tokens.

    Sample i uses the random stream of `seed` + i, so that it does not depend on `num_samples`. A
    sample ends at `stop_token`.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 42
    num_samples: int = 1
    stop_token: int | None = None


LONG_SAMPLE = SamplingOptions(max_new_tokens=400)  # at the end of a run


class KeyValueCache:
    """Keys and values of the tokens so far, so that each token runs through the layers once.

    When the context is full, its older half is dropped and the rest is computed again.

    Args:
        num_tokens: upper bound of the tokens of prompt and continuation.
    """

    def __init__(self, model: GPTModel, *, num_tokens: int) -> None:
        self._model = model
        self._capacity = min(num_tokens, model.config.context_length)
        self._context: Tensor | None = None  # (B, T), the cached tokens
        self._layers: dict[Block, tuple[Tensor, Tensor]] = {}  # each (B, H, capacity, D)

    def next_logits(self, token_ids: Tensor) -> Tensor:
        """Append tokens (B, T) int64; return the logits of the next one, (B, V) float32."""
        longest = self._model.config.context_length
        context = token_ids
        if self._context is not None:
            context = torch.cat([self._context, token_ids], dim=1)
            if context.shape[1] > longest:
                context = context[:, -(longest // 2 + 1):]
                self._context = None
        if self._context is None:
            token_ids = context = context[:, -longest:]
        self._first = context.shape[1] - token_ids.shape[1]
        self._context = context
        x = self._model.embed(token_ids, first_position=self._first)  # (B, T, C)
        x = self._model.transform(x, self._run)[:, -1]  # (B, C)
        return F.linear(self._model.final_norm(x), self._model.head_weight).float()

    def _run(self, block: Block, x: Tensor) -> Tensor:
        """Run one layer of a model in eval mode, (B, T, C) to (B, T, C)."""
        q, k, v = block.attention.project(block.attention_norm(x))  # each (B, H, T, D)
        B, H, T, D = k.shape
        if block not in self._layers:
            shape = (B, H, self._capacity, D)
            self._layers[block] = k.new_empty(shape), k.new_empty(shape)
        first, stop = self._first, self._first + T
        for cached, new in zip(self._layers[block], (k, v), strict=True):
            cached[:, :, first:stop] = new
        keys, values = (cached[:, :, :stop] for cached in self._layers[block])
        # A single new token attends to all; several at once are the first ones, so causal.
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=T > 1)
        x = x + block.attention.output(y.transpose(1, 2).reshape(B, T, H * D))
        return x + block.mlp(block.mlp_norm(x))


@torch.inference_mode()
def stream_tokens(model: GPTModel, prompt: list[int],
                  options: SamplingOptions) -> Iterator[list[int | Any]]:
    """Continue a prompt of at least one token id; yield the next id of each sample.

    None means that a sample has ended. The global random state does not change. The model is left
    in eval mode.
    """
    device = model.token_embedding.weight.device
    generators = [torch.Generator(device).manual_seed(options.seed + number)
                  for number in range(options.num_samples)]
    token_ids = torch.tensor([prompt] * options.num_samples, device=device)  # (B, T)
    has_ended = [False] * options.num_samples
    model.eval()
    cache = KeyValueCache(model, num_tokens=len(prompt) + options.max_new_tokens)
    for _ in range(options.max_new_tokens):
        logits = cache.next_logits(token_ids)  # (B, V)
        token_ids = torch.stack([_sample(sample_logits, options, generator=generator)
                                 for sample_logits, generator
                                 in zip(logits, generators, strict=True)])  # (B, 1)
        next_ids = token_ids[:, 0].tolist()
        has_ended = [ended or token == options.stop_token
                     for ended, token in zip(has_ended, next_ids, strict=True)]
        if all(has_ended):
            return
        yield [None if ended else token for ended, token in zip(has_ended, next_ids, strict=True)]


def stream_texts(model: GPTModel, tokenizer: Tokenizer, prompt: str, options: SamplingOptions, *,
                 stops: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Continue a prompt: yield, token by token, the new text of each sample, which may be empty.

    An empty prompt starts a new document. A text ends before the first of `stops`. The beginning
    of a possible stop, and an incomplete character, are held back.
    """
    prompt_ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    texts = [StreamedText(stops) for _ in range(options.num_samples)]
    for token_ids in stream_tokens(model, prompt_ids, options):
        yield [text.add(tokenizer.decode_single_token_bytes(token_id))
               if token_id is not None and token_id < tokenizer.n_vocab else ""
               for text, token_id in zip(texts, token_ids, strict=True)]
        if all(text.is_stopped for text in texts):
            return
    yield [text.add(b"", is_last=True) for text in texts]


class StreamedText:
    """Text that arrives as bytes and ends before the first of its stops."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.is_stopped = False

    def add(self, new: bytes, *, is_last: bool = False) -> str:
        """Add bytes; return the text that can be shown now, all of it after the last bytes."""
        if self.is_stopped:
            return ""
        text = self._held + self._decoder.decode(new, is_last)
        if found := [place for place in map(text.find, self._stops) if place >= 0]:
            self.is_stopped = True
            return text[: min(found)]
        keep = 0 if is_last else max(
            (length for stop in self._stops for length in range(1, len(stop))
             if text.endswith(stop[:length])), default=0)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep]


class Sampler:
    """Generates text during training, with a heartbeat for each token. Rank 0.

    Args:
        tokenizer_name: None if the tokenizer of the data is not known.
        tokenizer_path: of its file, if it has one.
    """

    def __init__(self, model: GPTModel, tokenizer_name: str | None, *,
                 heartbeat: Callable[[], None], tokenizer_path: Path | None = None) -> None:
        self._model, self._heartbeat = model, heartbeat
        self._load_tokenizer = partial(load_tokenizer, tokenizer_name or "", tokenizer_path)

    def try_to_write(self, path: Path, prompts: Sequence[str], global_step: int) -> str:
        """Append a JSON line with the continuation of each prompt; return any error as text.

        Errors must not stop training. The model is left in training mode.
        """
        try:
            options = SamplingOptions(max_new_tokens=SAMPLE_TOKENS,
                                      stop_token=self._load_tokenizer().eot_token)
            append_whole(path, "".join(to_json({
                "global_step": global_step, "prompt": prompt,
                "text": self.text(prompt, options)}) + "\n" for prompt in prompts))
        except Exception as error:
            return describe(error)
        finally:
            self._model.train()
        return ""

    def text(self, prompt: str = "", options: SamplingOptions = LONG_SAMPLE) -> str:
        """Generate text that continues a prompt."""
        text = ""
        for piece, in stream_texts(self._model, self._load_tokenizer(), prompt, options):
            self._heartbeat()
            text += piece
        return text


def _sample(logits: Tensor, options: SamplingOptions, *, generator: torch.Generator) -> Tensor:
    """Sample one token, (1,), from logits (V,)."""
    if options.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if 0 < options.top_k < logits.numel():
        smallest_kept = logits.topk(options.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    # The largest becomes 0, so that a tiny temperature cannot overflow it.
    probabilities = ((logits - logits.max()) / options.temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)
