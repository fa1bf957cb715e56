"""Text generation, one token at a time."""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from gpt import FOR_ANY_LENGTH, Block, GPTModel
from tokens.tokenizer import Tokenizer

SAMPLE_TOKENS = 64  # per prompt at a validation: one or two seconds on a GPU


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled: `temperature` 0 is greedy, `top_k` 0 keeps all tokens."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 42


LONG_SAMPLE = SamplingOptions(max_new_tokens=400)  # at the end of a run


class KeyValueCache:
    """Keys and values of the tokens so far, so that each token runs through the layers once."""

    def __init__(self, model: GPTModel, *, capacity: int) -> None:
        self._model = model
        self._capacity = capacity
        self._length = 0  # of the last context
        self._layers: dict[Block, tuple[Tensor, Tensor]] = {}  # each (1, H, capacity, D)

    def next_logits(self, context: list[int]) -> Tensor:
        """Return the logits after some tokens, (V,) float32.

        `context` either extends that of the last call, or replaces it and is not longer; then all
        of it is computed again.
        """
        self._first = self._length if len(context) > self._length else 0
        self._length = len(context)
        token_ids = torch.tensor(
            [context[self._first :]],  # (1, T)
            device=self._model.token_embedding.weight.device,
        )
        x = self._model.embed(token_ids, first_position=self._first)  # (1, T, C)
        with sdpa_kernel(FOR_ANY_LENGTH):
            x = self._model.transform(x, self._run)[0, -1]  # (C,)
        return F.linear(self._model.final_norm(x), self._model.head_weight).float()

    def _run(self, block: Block, x: Tensor) -> Tensor:
        q, k, v = block.attention.project(block.attention_norm(x))  # each (B, H, T, D)
        B, H, T, D = k.shape
        if block not in self._layers:
            shape = (B, H, self._capacity, D)
            self._layers[block] = k.new_empty(shape), k.new_empty(shape)
        first = self._first
        stop = first + T
        for cached, new in zip(self._layers[block], (k, v), strict=True):
            cached[:, :, first:stop] = new
        keys, values = (cached[:, :, :stop] for cached in self._layers[block])
        # A single new token attends to all; several at once are the first ones, so causal.
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=T > 1)
        x = x + block.attention.output(y.transpose(1, 2).reshape(B, T, H * D))
        return x + block.mlp(block.mlp_norm(x))


@torch.inference_mode()
def stream_tokens(
    model: GPTModel, prompt: list[int], options: SamplingOptions, stop_token: int | None = None
) -> Iterator[int]:
    """Continue a prompt of at least one token id; yield the next ones, up to `stop_token`.

    When the context is full, its older half is dropped and the rest is computed again. The global
    random state does not change. The model is left in eval mode.
    """
    longest = model.config.context_length
    device = model.token_embedding.weight.device
    generator = torch.Generator(device).manual_seed(options.seed)
    cache = KeyValueCache(model, capacity=min(longest, len(prompt) + options.max_new_tokens))
    context = prompt[-longest:]
    model.eval()
    for _ in range(options.max_new_tokens):
        logits = cache.next_logits(context)
        if options.temperature == 0:
            token_id = int(logits.argmax())
        else:
            if 0 < options.top_k < logits.numel():
                smallest_kept = logits.topk(options.top_k).values[-1]
                logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
            # The largest becomes 0, so that a tiny temperature cannot overflow it.
            probabilities = ((logits - logits.max()) / options.temperature).softmax(dim=-1)
            token_id = int(torch.multinomial(probabilities, num_samples=1, generator=generator))
        if token_id == stop_token:
            return
        yield token_id
        context = [*context, token_id]
        if len(context) > longest:
            context = context[-(longest // 2 + 1) :]


def stream_text(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompt: list[int],
    options: SamplingOptions,
    *,
    stops: tuple[str, ...] = (),
) -> Iterator[str]:
    """Continue a prompt of at least one token id: yield, token by token, the new text.

    It may be empty. It ends with the document, or before a stop.
    """
    return decoded(
        (
            # A model may have more entries than its tokenizer.
            tokenizer.decode_single_token_bytes(token_id) if token_id < tokenizer.n_vocab else b""
            for token_id in stream_tokens(model, prompt, options, tokenizer.eot_token)
        ),
        stops,
    )


def decoded(pieces: Iterable[bytes], stops: tuple[str, ...] = ()) -> Iterator[str]:
    """Decode text that arrives in pieces, up to the first of `stops`; yield what can be shown.

    The beginning of a possible stop, and an incomplete character, are held back.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    stops = tuple(filter(None, stops))
    for piece in pieces:
        held += decoder.decode(piece)
        places = [held.find(stop) for stop in stops if stop in held]
        if places:
            yield held[: min(places)]
            return
        keep = max(
            (
                length
                for stop in stops
                for length in range(1, len(stop))
                if held.endswith(stop[:length])
            ),
            default=0,
        )
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held + decoder.decode(b"", True)
