"""Prepare what `lab publish` uploads, a dataset or an exported model, and upload it."""

from dataclasses import dataclass
from pathlib import Path

import click
import torch
from huggingface_hub import HfApi, get_token

from basics.errors import UserError, visible
from basics.json_files import found_object
from lab.publish.export import (
    Extras,
    check_output,
    is_export,
    is_own_file,
    put_back,
    write_export,
)
from lab.publish.model_card import Request, changed_card, model_card
from preparation.ensure_dataset import is_complete
from preparation.hub import ask_hub
from run_config import load_run
from tokens.token_file import TokenFile
from tokens.tokenizer import TOKENIZER_FILE
from trainer.models import HUB_NAME, TRIES, is_run, load_model

TOKEN_FILES = ("train.safetensors", "validation.safetensors")
TEXTS = (TOKENIZER_FILE, "README.md")


@dataclass(frozen=True)
class Upload:
    """The files to upload to the hub."""

    folder: Path
    files: list[str]  # names in the folder
    kind: str  # model or dataset


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
    texts = [name for name in TEXTS if is_own_file(directory / name)]
    return Upload(directory, [*TOKEN_FILES, *texts], "dataset")


def export_model(request: Request) -> Upload:
    """Write the export of a run's model, or of an exported or tuned one. Raises: UserError."""
    request.check_words()
    source = Path(request.source).absolute()
    put_back(source)
    of_run = is_run(request.source, request.runs_dir)
    if not of_run and not is_export(source):
        load_run(request.runs_dir, request.source)  # its error lists the runs
    output_dir = request.output_dir or (
        request.runs_dir / request.source / "export" if of_run else source)
    output_dir = output_dir.absolute()
    check_output(output_dir)
    for tries_left in reversed(range(TRIES)):
        target = load_model(request.source if of_run else str(source), runs_dir=request.runs_dir,
                            checkpoint_name=request.checkpoint, device=torch.device("cpu"))
        if of_run:
            card, charts_dir, template = model_card(target, request), target.run.run_dir, None
        else:  # once more, with what the command line adds to it
            card, charts_dir = changed_card(source / "README.md", request), source
            template = found_object(source / "tokenizer_config.json").get("chat_template")
        try:
            write_export(target, output_dir, card, Extras(charts_dir, template, request.with_gguf))
            break
        except UserError:  # the run may train, and have removed the checkpoint and its tokenizer
            if not tries_left or target.checkpoint is None or target.checkpoint.path.is_dir():
                raise
    return Upload(output_dir, sorted(path.name for path in output_dir.iterdir()), "model")


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
