"""Prepare what `lab publish` uploads, a dataset or an exported model, and upload it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import torch
from huggingface_hub import HfApi, get_token

from basics.errors import UserError, visible
from lab.publish.export import (
    Extras,
    chat_template_of,
    check_output,
    is_export,
    put_back,
    write_export,
)
from lab.publish.model_card import HERE, CardFacts, changed_card, model_card
from lab.publish.plain_files import is_plain
from preparation.ensure_dataset import is_complete
from preparation.hub import ask_hub
from run_config import load_run
from tokens.token_file import TokenFile
from tokens.tokenizer import TOKENIZER_FILE
from trainer.models import HUB_NAME, TRIES, is_run, load_model

TOKEN_FILES = ("train.safetensors", "validation.safetensors")
TEXTS = (TOKENIZER_FILE, "README.md")


@dataclass(frozen=True)
class Request:
    """The command line's arguments and options."""

    source: str
    repository: str | None
    checkpoint: str
    output_dir: Path | None
    is_public: bool
    is_dry_run: bool
    with_gguf: bool
    licence: str | None
    languages: tuple[str, ...]
    runs_dir: Path
    datasets_dir: Path


@dataclass(frozen=True)
class Upload:
    """The files to upload to the hub."""

    folder: Path
    files: list[str]  # names in the folder
    kind: str  # model or dataset

    def file_list(self) -> list[str]:
        sizes = [(self.folder / name).stat().st_size for name in self.files]
        return [f"{size:>15,} bytes  {name}"
                for name, size in zip(self.files, sizes, strict=True)]


def check_repository(name: str) -> None:
    """Check that a name is owner/name. Raises: UserError."""
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"{name[:60]!r} is not the name of a repository; give owner/name")


def find_dataset(request: Request) -> Upload | None:
    """Return the upload of a dataset directory; None if the source is not one.

    Only the token files, their tokenizer and README.md are uploaded, unchanged.

    Raises:
        UserError: the dataset is incomplete, an option applies only to models, or README.md or
            the tokenizer is a link.
    """
    directory = Path(request.source)
    if not is_complete(directory):
        return None
    if request.repository is None:
        raise UserError(f"{directory}: is a dataset, which needs no export; name the REPOSITORY to"
                        " upload it to")
    if request.output_dir or request.licence or request.languages or request.with_gguf:
        raise UserError(f"{directory}: is a dataset; --output, --license, --language and --gguf"
                        " apply only to models; put a dataset's licence in its README.md")
    for name in TOKEN_FILES:
        TokenFile(directory / name)  # raises an error if it is damaged, or no token file
    texts = [name for name in TEXTS if is_plain(directory / name)]
    return Upload(directory, [*TOKEN_FILES, *texts], "dataset")


def export_model(request: Request) -> Upload:
    """Write the export of a run's model, or of an exported or tuned one. Raises: UserError."""
    facts = CardFacts(request.source, request.repository or HERE, request.licence,
                      request.languages, request.with_gguf, request.datasets_dir)
    put_back(Path(request.source).absolute())
    if is_run(request.source, request.runs_dir):
        folder = _export_run(request, facts)
    elif is_export(Path(request.source)):
        folder = _export_again(request, facts)
    else:
        load_run(request.runs_dir, request.source)  # its error lists the runs
    return Upload(folder, sorted(path.name for path in folder.iterdir()), "model")


def _export_run(request: Request, facts: CardFacts) -> Path:
    output_dir = request.output_dir or request.runs_dir / request.source / "export"
    output_dir = output_dir.absolute()
    check_output(output_dir)
    for tries_left in reversed(range(TRIES)):
        target = load_model(request.source, runs_dir=request.runs_dir,
                             checkpoint_name=request.checkpoint, device=torch.device("cpu"))
        try:
            return write_export(target, output_dir, model_card(target, facts),
                                Extras(charts_dir=target.run.run_dir, with_gguf=request.with_gguf))
        except UserError:  # the run may train, and have removed the checkpoint and its tokenizer
            if not tries_left or target.checkpoint.path.is_dir():
                raise
    raise AssertionError


def _export_again(request: Request, facts: CardFacts) -> Path:
    """Write an exported model once more, with what the command line adds to it."""
    source = Path(request.source).absolute()
    output_dir = (request.output_dir or source).absolute()
    check_output(output_dir)
    card = changed_card(source / "README.md", facts)
    target = load_model(str(source), runs_dir=request.runs_dir, device=torch.device("cpu"))
    return write_export(target, output_dir, card, Extras(
        charts_dir=source, chat_template=chat_template_of(source), with_gguf=request.with_gguf))


def send(upload: Upload, repository: str, *, is_public: bool) -> None:
    """Upload all files in one commit; files that an interrupted upload sent are not sent again.

    The hub client retries by itself.
    """
    if not get_token():
        raise UserError(f"{repository} on the Hugging Face hub: uploading needs a token; set"
                        " HF_TOKEN to one with write access, or run `uv run hf auth login`")
    api = HfApi()
    about = {"repo_id": repository, "repo_type": upload.kind}
    ask_hub(repository, lambda: api.create_repo(**about, private=not is_public, exist_ok=True))
    if ask_hub(repository, lambda: api.repo_info(**about).private) is is_public:
        found, remedy = ("private", "omit --public") if is_public else ("public", "add --public")
        raise UserError(f"{repository} on the Hugging Face hub: already exists and is {found};"
                        f" {remedy}, or change it on its page; nothing was uploaded")
    commit = ask_hub(repository, lambda: api.upload_folder(
        **about, folder_path=upload.folder, allow_patterns=upload.files,
        commit_message=f"Upload {upload.folder.name} with lab publish"), pauses=(1,))
    click.echo(f"uploaded to the Hugging Face hub, {'public' if is_public else 'private'}:"
               f" {visible(commit.repo_url.url)}")
