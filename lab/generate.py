"""`lab generate`: text from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sampling import SamplingOptions


@click.command()
@click.argument("run")
@click.option("--checkpoint", default="best", show_default=True,
              help="latest, best or a checkpoint directory's name.")
@click.option("--prompt", default="", help="Text to go on from.  [default: a new document]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True,
              help="0 takes the likeliest token every time.")
@click.option("--top-k", type=click.IntRange(min=0), default=40, show_default=True,
              help="Draw from the K likeliest tokens only; 0 draws from all.")
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(run: str, checkpoint: str, prompt: str, runs_dir: Path, **sampling: Any) -> None:
    """Print text that RUN's model makes up."""
    # Imported here so that --help does not wait for torch.
    from sampling import SamplingOptions

    click.echo(prompt + generate_text(
        runs_dir, run, checkpoint_name=checkpoint, prompt=prompt,
        options=SamplingOptions(**sampling),
    ))


def generate_text(runs_dir: Path, run_name: str, *, checkpoint_name: str, prompt: str,
                  options: SamplingOptions) -> str:
    """Continue a prompt with a run's model; an empty one starts a new document.

    Raises:
        UserError: no such run or checkpoint, or its tokenizer is not known.
    """
    import torch

    from checkpoint_loading import load_weights
    from checkpointing import find_checkpoint
    from gpt import GPTModel
    from resuming import check_weights_fit
    from run_config import load_run
    from sampling import generate_tokens
    from tokenizer import decode, load_tokenizer
    from user_error import UserError

    run = load_run(runs_dir, run_name)
    checkpoint = find_checkpoint(run.checkpoints_dir, checkpoint_name)
    if checkpoint is None:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train the run first")
    if checkpoint.meta.tokenizer is None:
        raise UserError(f"{checkpoint.path / 'meta.json'}: names no tokenizer;"
                        " wanted gpt2 or bytes there")
    check_weights_fit(checkpoint, run.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPTModel(run.model).to(device)
    load_weights(checkpoint, model)
    tokenizer = load_tokenizer(checkpoint.meta.tokenizer)
    prompt_ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    return decode(tokenizer, generate_tokens(model, prompt_ids, options))
