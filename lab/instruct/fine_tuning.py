"""The work of `lab tune`: tune a model, write it with its card, and answer the test."""

import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCardData
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from tqdm import tqdm

from basics.device import has_bf16
from basics.errors import UserError, one_line, visible, writing_to
from basics.files import write_atomically
from basics.json_files import to_json
from basics.text import code, escaped
from gpt import FOR_ANY_LENGTH, GPTModel
from lab.instruct.instructions import CHAT_TEMPLATE, INPUT, Data, Entry
from lab.publish.export import Extras, write_export
from lab.publish.model_card import MARK, public_name, template
from reporting.sampling import SamplingOptions, stream_text
from tokens.tokenizer import Tokenizer
from trainer.model_names import HUB_NAME
from trainer.models import LoadedModel
from trainer.precision import autocast

IGNORED = -100  # a target that cross-entropy ignores
COMPUTED_ON = {"response": "the response only", "all": "prompt and response"}
Epoch = dict[str, Any]  # number, train_loss, validation_loss


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


class Example(NamedTuple):
    """One entry as input tokens and, for each, the next token as its target or `IGNORED`."""

    token_ids: list[int]
    targets: list[int]


def encode_entries(
    entries: list[Entry], tokenizer: Tokenizer, *, context_length: int, loss_on: str
) -> tuple[list[Example], int]:
    """Turn entries into examples: prompt, response, end of text; cut to the context length.

    The end of text is a target too, after the response, so that the model learns to stop. Entries
    whose prompt exceeds the context are left out. Return also how many examples were cut.
    """
    examples = []
    num_cut = 0
    for entry in entries:
        # Encode each separately: when answering, the prompt is encoded without a response.
        prompt = tokenizer.encode_ordinary(entry.prompt())
        if len(prompt) > context_length:
            continue
        token_ids = [*prompt, *tokenizer.encode_ordinary(entry.output), tokenizer.eot_token]
        inputs = token_ids[:-1]
        targets = token_ids[1:]
        if loss_on == "response":
            num_ignored = len(prompt) - 1  # the last token of the prompt predicts the response
            targets[:num_ignored] = [IGNORED] * num_ignored
        num_cut += len(targets) > context_length
        examples.append(Example(inputs[:context_length], targets[:context_length]))
    return examples, num_cut


def mean_loss(
    model: GPTModel, examples: list[Example], batch_size: int, optimizer: AdamW | None = None
) -> float:
    """Return the examples' mean loss in nats per token; train on them if there is an optimizer."""
    device = model.token_embedding.weight.device
    in_bf16 = has_bf16(device)
    model.train(optimizer is not None)
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_targets = 0
    for start in tqdm(range(0, len(examples), batch_size), unit="batch", disable=None, leave=False):
        rows = examples[start : start + batch_size]
        # Padding is ignored as a target, and causal attention hides it from earlier tokens.
        token_ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True)
        targets = pad_sequence(
            [torch.tensor(row.targets) for row in rows], batch_first=True, padding_value=IGNORED
        )
        with (
            torch.set_grad_enabled(optimizer is not None),
            autocast("bf16" if in_bf16 else "fp32", device),
            sdpa_kernel(FOR_ANY_LENGTH),
        ):
            logits = model(token_ids.to(device)).flatten(0, 1).float()  # (B * T, V)
            loss = F.cross_entropy(logits, targets.to(device).flatten(), ignore_index=IGNORED)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        count = int((targets != IGNORED).sum())
        total += loss.detach() * count
        num_targets += count
    return total.item() / num_targets


def tune(
    model: GPTModel, train: list[Example], validation: list[Example], options: TuneOptions
) -> tuple[list[Epoch], Epoch]:
    """Train until validation loss rises, then load the weights of the best epoch.

    Return all epochs, of which 0 is the model before, and the best; losses in nats per token.
    """
    optimizer = AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, fused=True
    )
    epochs: list[Epoch] = []
    best = None
    best_weights = {}
    train_loss = None
    for number in range(options.max_epochs + 1):
        if number:
            # Order and dropout depend on the seed and the epoch's number only.
            chance = random.Random(f"{options.seed}/{number}")
            shuffled = chance.sample(train, len(train))
            torch.manual_seed(chance.getrandbits(63))
            train_loss = mean_loss(model, shuffled, options.batch_size, optimizer)
        loss = mean_loss(model, validation, options.batch_size)
        epochs.append({"number": number, "train_loss": train_loss, "validation_loss": loss})
        head = "before training" if train_loss is None else f"train loss {train_loss:.4f}"
        click.echo(f"epoch {number}: {head}, validation loss {loss:.4f} nats per token")
        if best and not loss < best["validation_loss"]:
            break
        best = epochs[-1]
        weights = model.state_dict()
        best_weights = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
    model.load_state_dict(best_weights)
    model.eval()
    return epochs, best


def run(
    target: LoadedModel,
    data: Data,
    options: TuneOptions,
    output: Path,
    model_output: Path | None,
    repeat: int = 1,
) -> None:
    """Fine-tune, write the tuned model whole or not at all, then its answers.

    Without `model_output` only the answers are kept; `repeat` counts tunings of the same model.
    Raises: UserError.
    """
    tokenizer = target.load_tokenizer()
    length = target.model.config.context_length
    encode = partial(
        encode_entries, tokenizer=tokenizer, context_length=length, loss_on=options.loss_on
    )
    train, num_cut = encode(data.train)
    validation, more_cut = encode(data.validation)
    if not (train and validation):
        raise UserError(
            f"{data.path}: no entry for {'validation' if train else 'training'} has a"
            f" prompt that fits {target.name}'s context of {length} tokens; give"
            " shorter ones with --data"
        )
    num_encoded = len(train) + len(validation)
    counts = {
        "train": len(train),
        "validation": len(validation),
        "test": len(data.test),
        "cut": num_cut + more_cut,
        "skipped": len(data.train) + len(data.validation) - num_encoded,
    }
    click.echo(
        visible(
            f"{target.name}: {counts['train']} entries for training,"
            f" {counts['validation']} for validation, {counts['test']} for the test"
        )
    )
    if counts["cut"] or counts["skipped"]:
        click.echo(
            f"{counts['cut']} entries cut to the context of {length} tokens,"
            f" {counts['skipped']} skipped because the prompt alone is longer"
        )
    epochs, best = tune(target.model, train, validation, options)
    click.echo(f"using the weights of epoch {best['number']:,}")
    record = {
        "model": target.full_name,
        "checkpoint": target.checkpoint and target.checkpoint.name,
        "data": {"file": str(data.path), **counts},
        "options": asdict(options),
        "epochs": epochs,
        "best_epoch": best["number"],
        "repeat": repeat,
    }
    if model_output:
        card = tuned_card(target, data, record)
        write_export(target, model_output, Extras(card, chat_template=CHAT_TEMPLATE))
        click.echo(visible(f"tuned model in {model_output}"))
    record["answers"] = _answer(target, data.test, options.max_new_tokens)
    with writing_to(output):
        write_atomically(output, to_json(record, indent=2))
    click.echo(visible(f"{len(data.test)} answers in {output}"))


def _answer(target: LoadedModel, test: list[Entry], max_new_tokens: int) -> list[dict[str, str]]:
    model = target.model
    tokenizer = target.load_tokenizer()
    greedy = SamplingOptions(max_new_tokens, temperature=0, top_k=0)
    answers = []
    num_long = 0
    for entry in tqdm(test, desc="answering", unit="question", disable=None, leave=False):
        prompt = entry.prompt()
        prompt_ids = tokenizer.encode_ordinary(prompt)  # text of the data: no end of text in it
        num_long += len(prompt_ids) > model.config.context_length
        answer = "".join(stream_text(model, tokenizer, prompt_ids, greedy))
        answers.append(entry.model_dump() | {"answer": answer.strip()})
    if num_long:
        click.echo(
            f"{num_long} questions are longer than the context: the model saw only their end"
        )
    return answers


def tuned_card(target: LoadedModel, data: Data, record: dict[str, Any]) -> str:
    """Return the card of a tuned model, made of what it was tuned from, on and how."""
    base = one_line(public_name(target.name))
    checkpoint = target.checkpoint
    title = f"{base.rpartition('/')[2]}-tuned"
    front_matter = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=title,
        base_model=base if HUB_NAME.fullmatch(base) else None,
        tags=["gpt2", MARK, "instruction-tuning"],
    ).to_yaml()
    described = code(base)
    if checkpoint is not None:
        after = "" if checkpoint.tokens is None else f" after {checkpoint.tokens:,} tokens"
        described += f"{after} (checkpoint `{checkpoint.name}`)"
    losses = []
    for epoch in record["epochs"]:
        train_loss = "-" if epoch["train_loss"] is None else f"{epoch['train_loss']:.6f}"
        losses.append(f"| {epoch['number']} | {train_loss} | {epoch['validation_loss']:.6f} |")
    return template("tuned_model.md").format(
        front_matter=front_matter,
        title=escaped(title),
        base=described,
        num_parameters=target.model.config.num_parameters,
        prompt=Entry(instruction="Name the largest planet.", output="").prompt().rstrip("\n"),
        input=INPUT.replace("\n", "\\n"),
        file=escaped(one_line(data.path.name)),
        sha256=data.sha256,
        num_entries=len(data.train) + len(data.test) + len(data.validation),
        loss_on=COMPUTED_ON[record["options"]["loss_on"]],
        losses="\n".join(losses),
        **record,
    )
