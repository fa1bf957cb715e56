"""`lab publish`: a run's model for the Hugging Face ecosystem, and to its hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.errors import UserError

if TYPE_CHECKING:
    from lab.targets import Target

DATASET_FILES = ("train.safetensors", "validation.safetensors", "README.md")


@dataclass(frozen=True)
class Request:
    """What was typed."""

    source: str
    repository: str | None
    checkpoint: str
    output_dir: Path | None
    is_public: bool
    is_dry_run: bool
    licence: str | None
    runs_dir: Path


@dataclass(frozen=True)
class Parcel:
    """What is to go to the hub."""

    folder: Path
    files: list[str]  # in the folder
    kind: str  # model or dataset

    def lines(self) -> list[str]:
        sizes = [(self.folder / name).stat().st_size for name in self.files]
        return [f"{size:>15,} bytes  {name}"
                for name, size in zip(self.files, sizes, strict=True)]


@click.command()
@click.argument("source")
@click.argument("repository", required=False)
@click.option("--output", "output_dir", type=click.Path(path_type=Path), metavar="DIR",
              help="Where the model's directory is written.  [default: runs/<run>/export]")
@click.option("--checkpoint", default="best", show_default=True,
              help="latest, best or a checkpoint directory's name.")
@click.option("--public", "is_public", is_flag=True,
              help="Make a new repository public; without it is private.")
@click.option("--dry-run", "is_dry_run", is_flag=True,
              help="Write the directory and say what would go, but send nothing.")
@click.option("--license", "licence", metavar="NAME",
              help="For the model card, such as apache-2.0.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(**typed: Any) -> None:
    """Write a run's model as transformers has it, and upload it.

    SOURCE is a run, or the directory of a token dataset. REPOSITORY is owner/name on the Hugging
    Face hub; without one nothing is sent. What is sent needs a token: HF_TOKEN, or the one that
    `uv run hf auth login` keeps. The same command may be repeated after an error.
    """
    request = Request(**typed)
    if request.repository is not None:
        _check_name(request.repository)
    parcel = _dataset(request) or _model(request)
    for line in parcel.lines():
        click.echo(line)
    if request.repository is None:
        click.echo(f"written to {parcel.folder}")
    elif request.is_dry_run:
        kind = "public" if request.is_public else "private"
        click.echo(f"would go to {request.repository} on the Hugging Face hub, a {kind}"
                   f" {parcel.kind} repository; nothing was sent")
    else:
        _upload(parcel, request.repository, is_public=request.is_public)


def _check_name(repository: str) -> None:
    from lab.targets import HUB_NAME

    if not HUB_NAME.fullmatch(repository):
        raise UserError(f"{repository[:60]!r} is not a repository's name; wanted owner/name")


def _dataset(request: Request) -> Parcel | None:
    """Take a directory of token files as it is; what is there besides stays.

    Raises:
        UserError: it is a dataset, but not whole, or the command asks for what only a model has.
    """
    from preparation.ensure_dataset import is_complete

    directory = Path(request.source)
    if not is_complete(directory):
        return None
    from tokens.token_file import TokenFile

    if request.repository is None:
        raise UserError(f"{directory}: is a dataset as it is; name the REPOSITORY that it is to"
                        " go to")
    if request.output_dir or request.licence:
        raise UserError(f"{directory}: is a dataset; --output and --license are for models, a"
                        " dataset's licence stands in its README.md")

    for split in ("train", "validation"):
        TokenFile(directory / f"{split}.safetensors")  # an error if it is not whole
    present = [name for name in DATASET_FILES if (directory / name).is_file()]
    return Parcel(directory, present, "dataset")


def _model(request: Request) -> Parcel:
    from lab.publish.export import check_output, write_export
    from lab.publish.model_card import CardFacts, model_card
    from lab.targets import is_run
    from run_config import load_run

    if not is_run(request.source, request.runs_dir):
        load_run(request.runs_dir, request.source)  # says which runs there are
    output_dir = request.output_dir or request.runs_dir / request.source / "export"
    output_dir = output_dir.absolute()
    check_output(output_dir)
    target = _load(request)
    facts = CardFacts(request.source, request.repository or str(output_dir), request.licence)
    folder = write_export(target, output_dir, model_card(target, facts))
    return Parcel(folder, sorted(path.name for path in folder.iterdir()), "model")


def _load(request: Request) -> Target:
    import torch

    from lab.targets import load_target

    return load_target(request.source, runs_dir=request.runs_dir,
                       checkpoint_name=request.checkpoint, device=torch.device("cpu"))


def _upload(parcel: Parcel, repository: str, *, is_public: bool) -> None:
    """Send everything in one commit; what an interrupted upload has sent is not sent again.

    The client tries again by itself.
    """
    from huggingface_hub import HfApi, get_token

    from preparation.hub import ask_hub

    if not get_token():
        raise UserError(f"{repository} on the Hugging Face hub: uploading needs a token; set"
                        " HF_TOKEN to one that may write there, or keep one with"
                        " `uv run hf auth login`")
    api = HfApi()
    about = {"repo_id": repository, "repo_type": parcel.kind}
    ask_hub(repository, lambda: api.create_repo(**about, private=not is_public, exist_ok=True))
    if ask_hub(repository, lambda: api.repo_info(**about).private) is is_public:
        raise UserError(f"{repository} on the Hugging Face hub: is there already, and"
                        f" {'private: leave out --public' if is_public else 'public: say --public'}"
                        ", or change that on its page; nothing was sent")
    commit = ask_hub(repository, lambda: api.upload_folder(
        **about, folder_path=parcel.folder, allow_patterns=parcel.files,
        commit_message=f"Upload {parcel.folder.name} with lab publish"), pauses=(1,))
    click.echo(f"now on the Hugging Face hub, {'public' if is_public else 'private'}:"
               f" {commit.repo_url.url}")
