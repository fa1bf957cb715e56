"""`lab generate`: text from a model, or from several side by side."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from basics.cli import RUNS_DIR, FiniteRange
from basics.errors import UserError, one_line, visible
from lab.table import Column, Table

MIN_WIDTH = 16  # characters to which a text is wrapped beside others


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    help="Of a run: latest, best or a checkpoint directory's name.",
)
@click.option(
    "--prompt",
    default="",
    help="Text to continue; in it, the end-of-text token's text (<|endoftext|>) means that token."
    "  [default: start a new document]",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--samples",
    "num_samples",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Number of texts.",
)
@click.option(
    "--stop", "stops", multiple=True, metavar="TEXT", help="End before this text; may be repeated."
)
@click.option(
    "--temperature",
    type=FiniteRange(0, 1e6),
    default=0.8,
    show_default=True,
    help="0 always picks the most likely token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Draw from the K most likely tokens only; 0 draws from all.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**62),
    default=42,
    show_default=True,
    help="Seed of the first text; each further text adds 1.",
)
@RUNS_DIR
def command(
    targets: tuple[str, ...],
    checkpoint: str,
    prompt: str,
    num_samples: int,
    stops: tuple[str, ...],
    seed: int,
    runs_dir: Path,
    **sampling: Any,
) -> None:
    """Generate text from a model, or from several models side by side.

    TARGET is a run, RUN@CHECKPOINT, a directory of GPT-2 weights, or a model on the Hugging Face
    hub (owner/name). A text is printed while it is generated, and ends at the end-of-text token, or
    before a --stop. When the context is full, its older half is dropped. Texts of several models
    are printed in a table, each from the same seed.
    """
    from trainer.model_names import check_before_torch

    check_before_torch(targets, runs_dir)
    # Imported here so that --help and a wrong name do not wait for torch.
    from lab.evaluate.measure import choose_models
    from reporting.sampling import SamplingOptions, stream_text
    from tokens.tokenizer import encode_prompt
    from trainer.models import load_model, say_step

    models = choose_models(targets, checkpoint, None, runs_dir)
    prompt = as_utf8(prompt)
    seeds = range(seed, seed + num_samples)
    heads = [f"--- {place + 1} of {num_samples}, seed {each}" for place, each in enumerate(seeds)]
    texts: list[list[str]] = [[] for _ in seeds]
    failure = None
    for chosen in models:  # one at a time is in memory
        try:
            loaded = load_model(chosen.name, runs_dir=runs_dir, checkpoint_name=chosen.checkpoint)
            tokenizer = loaded.load_tokenizer()
            say_step(loaded)
        except UserError as error:
            if not texts[0]:
                raise
            failure = error  # the texts of the models before it are printed first
            break
        for head, text, each in zip(heads, texts, seeds, strict=True):
            options = SamplingOptions(**sampling, seed=each)
            prompt_ids = encode_prompt(tokenizer, prompt)
            pieces = stream_text(loaded.model, tokenizer, prompt_ids, options, stops=stops)
            if len(models) > 1:
                text.append(prompt + "".join(pieces))
                continue
            if num_samples > 1:
                click.echo(head)
            click.echo(visible(prompt), nl=False)
            for piece in pieces:
                click.echo(visible(piece), nl=False)
            click.echo()
        del loaded  # before the next one is loaded
    if len(models) == 1:
        return
    columns = [
        Column(one_line("@".join(filter(None, (one.name, one.checkpoint)))), "left", MIN_WIDTH)
        for one in models[: len(texts[0])]
    ]
    for head, text in zip(heads, texts, strict=True):
        if num_samples > 1:
            click.echo(head)
        click.echo(visible(Table(columns, [text]).terminal()))
    if failure:
        raise failure


def as_utf8(argument: str) -> str:
    """Return an argument of the command line as UTF-8, whatever the locale; else as it is."""
    with suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument
