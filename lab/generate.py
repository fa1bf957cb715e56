"""`lab generate`: text from a model."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.cli import FiniteRange
from basics.errors import visible

if TYPE_CHECKING:
    from reporting.sampling import SamplingOptions
    from trainer.models import LoadedModel


@click.command()
@click.argument("target")
@click.option("--checkpoint", default="best", show_default=True,
              help="Of a run: latest, best or a checkpoint directory's name.")
@click.option("--prompt", default="", help="Text to continue.  [default: start a new document]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--samples", "num_samples", type=click.IntRange(1, 1024), default=1,
              show_default=True, help="Number of texts, drawn in one batch.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT",
              help="End before this text; may be repeated.")
@click.option("--temperature", type=FiniteRange(0, 1e6), default=0.8, show_default=True,
              help="0 always picks the most likely token.")
@click.option("--top-k", type=click.IntRange(min=0), default=40, show_default=True,
              help="Draw from the K most likely tokens only; 0 draws from all.")
@click.option("--seed", type=click.IntRange(min=0, max=2**62), default=42, show_default=True,
              help="Seed of the first text; each further text adds 1.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(target: str, checkpoint: str, prompt: str, stops: tuple[str, ...], runs_dir: Path,
            **sampling: Any) -> None:
    """Generate text from a model.

    TARGET is a run, a directory of GPT-2 weights, or a model on the Hugging Face hub
    (owner/name). A single text is printed while it is generated, several when all are complete. A
    text ends at the end-of-text token, or before a --stop. When the context is full, its older
    half is dropped.
    """
    # Imported here so that --help does not wait for torch.
    from reporting.sampling import SamplingOptions
    from trainer.models import load_model

    model = load_model(target, runs_dir=runs_dir, checkpoint_name=checkpoint)
    options = SamplingOptions(**sampling)
    pieces = stream_texts(model, prompt, options, stops=stops)
    if options.num_samples == 1:
        click.echo(visible(prompt), nl=False)
        for piece, in pieces:
            click.echo(visible(piece), nl=False)
        click.echo()
        return
    texts = [prompt] * options.num_samples
    for step in pieces:
        texts = [text + piece for text, piece in zip(texts, step, strict=True)]
    for number, text in enumerate(texts, start=1):
        head = f"--- {number} of {len(texts)}, seed {options.seed + number - 1}"
        click.echo(f"{head}\n{visible(text)}")


def stream_texts(target: LoadedModel, prompt: str, options: SamplingOptions, *,
                 stops: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Continue a prompt: yield, token by token, the new text of each sample, which may be empty.

    An empty prompt starts a new document. A text ends at the end-of-text token.

    Raises:
        UserError: the model's tokenizer is not known.
    """
    from reporting.sampling import stream_tokens

    tokenizer = target.load_tokenizer()
    options = replace(options, stop_token=tokenizer.eot_token)
    prompt_ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    texts = [StreamedText(stops) for _ in range(options.num_samples)]
    for token_ids in stream_tokens(target.model, prompt_ids, options):
        yield [text.add(tokenizer.decode_single_token_bytes(token_id))
               if token_id is not None and token_id < tokenizer.n_vocab else ""
               for text, token_id in zip(texts, token_ids, strict=True)]
        if all(text.is_stopped for text in texts):
            return
    yield [text.add(b"", is_last=True) for text in texts]


class StreamedText:
    """Text that arrives as bytes and ends before the first of its stop strings.

    The beginning of a possible stop string, and an incomplete character, are held back.
    """

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
