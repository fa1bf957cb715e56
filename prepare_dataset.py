"""Turn documents into the token files that a run trains on."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from run_config import UserError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--tokenizer", default="gpt2", show_default=True, metavar="gpt2|bytes",
              help="gpt2 has 50,257 ids, bytes has 257.")
@click.option("--text-column", default="text", show_default=True,
              help="The parquet column or JSON key that holds the text.")
def main(source: str, output: Path, tokenizer: str, text_column: str) -> None:
    """Tokenise the documents in SOURCE into OUTPUT/train.safetensors (the first 99%) and
    OUTPUT/validation.safetensors (the rest), an end-of-text token after each.

    SOURCE is a file or a directory: parquet (FineWeb's sample/10BT, say), JSON lines, or plain
    text; or the word python-stdlib for the source and documentation of Python's own library.
    """
    try:
        prepare(source, output, tokenizer=tokenizer, text_column=text_column)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


def prepare(source: str, output: Path, *, tokenizer: str, text_column: str) -> None:
    """Prepare one dataset and print what was written. Raises: UserError."""
    # Imported here so that --help does not wait for them.
    from dataset_preparation import prepare_dataset
    from documents import find_documents, python_stdlib

    documents = python_stdlib() if source == "python-stdlib" else find_documents(
        Path(source), text_column=text_column)
    for split in prepare_dataset(documents, output, tokenizer_name=tokenizer):
        path = output / f"{split.name}.safetensors"
        print(f"{path}: {split.num_documents:,} documents, {split.num_tokens:,} tokens,"
              f" {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
