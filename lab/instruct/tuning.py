"""Fine-tuning on instructions: encode entries, train until validation loss rises."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from tqdm import tqdm

from gpt import GPTModel
from lab.instruct.instructions import Entry
from tokens.tokenizer import Tokenizer
from trainer.precision import autocast

IGNORED = -100  # a target that cross-entropy ignores


class Example(NamedTuple):
    """One entry as input tokens and, for each, the next token as its target or `IGNORED`."""

    token_ids: list[int]
    targets: list[int]


class Examples(NamedTuple):
    """A part of the data, without the entries whose prompt exceeds the context."""

    examples: list[Example]
    num_cut: int  # to the model's context
    num_skipped: int


@dataclass(frozen=True)
class TuneOptions:
    """How to fine-tune and to answer. AdamW decays all parameters, as in the book."""

    loss_on: Literal["response", "all"]
    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    max_new_tokens: int  # in an answer
    seed: int  # of the order of the examples, and of dropout


@dataclass(frozen=True)
class Epoch:
    """Mean losses in nats per token; epoch 0 is the model before fine-tuning."""

    number: int
    train_loss: float | None
    validation_loss: float


def encode_entries(entries: list[Entry], tokenizer: Tokenizer, *, context_length: int,
                   loss_on: str) -> Examples:
    """Turn entries into examples: prompt, response, end of text; cut to the context length.

    The end of text is a target too, after the response, so that the model learns to stop.
    """
    examples, num_cut = [], 0
    for entry in entries:
        # Encode each separately: when answering, the prompt is encoded without a response.
        prompt = tokenizer.encode_ordinary(entry.prompt())
        token_ids = [*prompt, *tokenizer.encode_ordinary(entry.output), tokenizer.eot_token]
        if len(prompt) > context_length:
            continue
        targets = token_ids[1:]
        if loss_on == "response":
            targets = [IGNORED] * (len(prompt) - 1) + targets[len(prompt) - 1 :]
        num_cut += len(targets) > context_length
        examples.append(Example(token_ids[:-1][:context_length], targets[:context_length]))
    return Examples(examples, num_cut, num_skipped=len(entries) - len(examples))


def collate(examples: list[Example], *, pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad examples to the longest: token ids and targets, each (B, T) int64.

    Padding targets are ignored, and causal attention hides padding from earlier tokens.
    """
    token_ids, targets = zip(*((torch.tensor(one), torch.tensor(other))
                               for one, other in examples), strict=True)
    return (pad_sequence(token_ids, batch_first=True, padding_value=pad_id),
            pad_sequence(targets, batch_first=True, padding_value=IGNORED))


class Tuner:
    """Fine-tune a model on some examples and validate it on others.

    Attributes:
        epochs: the losses so far.
    """

    def __init__(self, model: GPTModel, options: TuneOptions, *, pad_id: int) -> None:
        self.model, self.options, self.pad_id = model, options, pad_id
        self.device = model.token_embedding.weight.device
        has_bf16 = (self.device.type == "cuda"
                    and torch.cuda.is_bf16_supported(including_emulation=False))
        self.precision = "bf16" if has_bf16 else "fp32"
        self.optimizer = AdamW(model.parameters(), lr=options.learning_rate,
                               weight_decay=options.weight_decay, fused=True)
        self.epochs: list[Epoch] = []

    @property
    def best(self) -> Epoch:
        """The epoch with the lowest validation loss; NaN is never lower."""
        best = self.epochs[0]
        for epoch in self.epochs[1:]:
            best = epoch if epoch.validation_loss < best.validation_loss else best
        return best

    def run(self, train: list[Example], validation: list[Example],
            report: Callable[[Epoch], None]) -> None:
        """Train until validation loss rises, then load the weights of the best epoch.

        `report` is called after each epoch, and before the first one.
        """
        train_loss, best_weights = None, {}
        while True:
            epoch = Epoch(len(self.epochs), train_loss, self.mean_loss(validation))
            self.epochs.append(epoch)
            report(epoch)
            if self.best is not epoch:
                break
            best_weights = {name: tensor.to("cpu", copy=True)
                            for name, tensor in self.model.state_dict().items()}
            if epoch.number == self.options.max_epochs:
                break
            train_loss = self._train(train)
        self.model.load_state_dict(best_weights)
        self.model.eval()

    def _train(self, train: list[Example]) -> float:
        """Train on all examples once, in a new order; return the mean loss.

        Order and dropout depend on the seed and the epoch's number only.
        """
        number = len(self.epochs)
        chance = random.Random(f"{self.options.seed}/{number}")
        shuffled = chance.sample(train, len(train))
        torch.manual_seed(chance.getrandbits(63))
        self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in tqdm(list(self._batches(shuffled)), desc=f"epoch {number}", unit="step",
                          disable=None, leave=False):
            loss = self._loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach() * _num_targets(batch)
        return total.item() / _num_targets(train)

    @torch.no_grad()
    def mean_loss(self, examples: list[Example]) -> float:
        """Return the mean loss in nats per token; it does not depend on the batch size."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self._batches(examples):
            total += self._loss(batch) * _num_targets(batch)
        return total.item() / _num_targets(examples)

    def _batches(self, examples: list[Example]) -> Iterator[list[Example]]:
        size = self.options.batch_size
        return (examples[start : start + size] for start in range(0, len(examples), size))

    def _loss(self, batch: list[Example]) -> Tensor:
        token_ids, targets = collate(batch, pad_id=self.pad_id)
        with autocast(self.precision, self.device):
            return self.model(token_ids.to(self.device), targets.to(self.device))


def _num_targets(examples: list[Example]) -> int:
    return sum(target != IGNORED for example in examples for target in example.targets)
