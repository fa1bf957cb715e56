"""`lab publish`: export a run's model, and upload models and datasets to the hub."""

from pathlib import Path
from typing import Any

import click

from basics.cli import DATASETS_DIR, PLACE, RUNS_DIR
from basics.errors import visible
from basics.files import put_back


@click.command()
@click.argument("source")
@click.argument("repository", required=False)
@click.option(
    "--output",
    "output_dir",
    type=PLACE,
    metavar="DIR",
    help="Write the model to this directory.  [default: runs/<run>/export; SOURCE itself"
    " if it is an exported or tuned model]",
)
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    help="latest, best or the name of a checkpoint directory; the run may be training.",
)
@click.option(
    "--public", "is_public", is_flag=True, help="Make a new repository public instead of private."
)
@click.option(
    "--dry-run",
    "is_dry_run",
    is_flag=True,
    help="Write the directory and list the files, but upload nothing.",
)
@click.option(
    "--gguf",
    "with_gguf",
    is_flag=True,
    help="Write GGUF files for llama.cpp too: 16-bit floats and 8-bit integers. Needs the"
    " extra gguf: uv run --extra gguf lab publish ...",
)
@click.option(
    "--license",
    "licence",
    metavar="NAME",
    help="For the model card, such as apache-2.0.  [default: that of the dataset's card,"
    " or of FineWeb, if trained from scratch]",
)
@click.option(
    "--language",
    "languages",
    multiple=True,
    metavar="CODE",
    help="For the model card, such as en; may be repeated.  [default: as the"
    " dataset's card says, or en of FineWeb]",
)
@RUNS_DIR
@DATASETS_DIR
def command(**options: Any) -> None:
    """Export a run's model in the format of transformers, and upload it.

    SOURCE is a run, a directory that `lab publish` or `lab tune` wrote (runs/RUN/tuned), or that
    of a token dataset. REPOSITORY is owner/name on the Hugging Face hub; without it nothing is
    uploaded. Uploading needs a token: HF_TOKEN, or the one stored by `uv run hf auth login`. After
    an error, run the same command again.
    """
    from trainer.model_names import check_before_torch

    put_back(Path(options["source"]).absolute())
    check_before_torch([options["source"]], options["runs_dir"])
    # Imported here so that --help and a wrong name do not wait for torch.
    from lab.publish.export import export_model, find_dataset, send
    from lab.publish.model_card import PublishRequest, names_licence

    request = PublishRequest(**options)
    request.check()
    upload = find_dataset(request) or export_model(request)
    for name in upload.files:
        click.echo(visible(f"{(upload.folder / name).stat().st_size:>15,} bytes  {name}"))
    if upload.kind == "model" and not names_licence(upload.folder):
        click.echo("the model card names no licence: name it with --license before others use it")
    if request.repository is None:
        click.echo(visible(f"written to {upload.folder}"))
    elif request.is_dry_run:
        kind = "public" if request.is_public else "private"
        click.echo(
            visible(
                f"dry run, nothing uploaded: would upload to the {kind} {upload.kind}"
                f" repository {request.repository} on the Hugging Face hub"
            )
        )
    else:
        send(upload, request.repository, is_public=request.is_public)
