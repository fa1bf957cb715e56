"""`lab generate`: text from a model."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from basics.cli import RUNS_DIR, FiniteRange
from basics.errors import visible


@click.command()
@click.argument("target")
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    help="Of a run: latest, best or a checkpoint directory's name.",
)
@click.option("--prompt", default="", help="Text to continue.  [default: start a new document]")
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
    target: str,
    checkpoint: str,
    prompt: str,
    num_samples: int,
    stops: tuple[str, ...],
    seed: int,
    runs_dir: Path,
    **sampling: Any,
) -> None:
    """Generate text from a model.

    TARGET is a run, a directory of GPT-2 weights, or a model on the Hugging Face hub
    (owner/name). A text is printed while it is generated, and ends at the end-of-text token, or
    before a --stop. When the context is full, its older half is dropped.
    """
    # Imported here so that --help does not wait for torch.
    from reporting.sampling import SamplingOptions, stream_text
    from trainer.models import load_model

    loaded = load_model(target, runs_dir=runs_dir, checkpoint_name=checkpoint)
    tokenizer = loaded.load_tokenizer()
    prompt = as_utf8(prompt)
    for number in range(num_samples):
        if num_samples > 1:
            click.echo(visible(f"--- {number + 1} of {num_samples}, seed {seed + number}"))
        click.echo(visible(prompt), nl=False)
        options = SamplingOptions(**sampling, seed=seed + number)
        for piece in stream_text(loaded.model, tokenizer, prompt, options, stops=stops):
            click.echo(visible(piece), nl=False)
        click.echo()


def as_utf8(argument: str) -> str:
    """Return an argument of the command line as UTF-8, whatever the locale; else as it is."""
    with suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument
