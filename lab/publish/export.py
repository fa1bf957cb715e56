"""Export a model to a directory that `transformers` loads, a standard GPT-2 without custom code;
upload that, or a dataset, to the hub."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil
from huggingface_hub import HfApi, get_token
from safetensors import SafetensorError

from basics.device import CPU
from basics.errors import UserError, as_os_error, cannot_be_written, print_error, visible
from basics.files import fsync, put_back, read_regular_file, replace_directory
from basics.json_files import found_object, read_json_object
from basics.tensors import write_tensors
from lab.publish import formats
from lab.publish.model_card import CHARTS, MARK, PublishRequest, changed_card, model_card
from preparation.ensure_dataset import is_complete
from preparation.hub import ask_hub
from run_config import no_such_run
from settings.data import SPLITS, token_file_name
from tokens.token_file import TokenFile
from tokens.tokenizer import TOKENIZER_FILE, FileTokenizer
from trainer.model_names import find_model
from trainer.models import LoadedModel, load_model, say_step
from trainer.weight_formats import gpt2_config, to_gpt2

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    *formats.TOKENIZER_FILES,
    "vocab.json",
    "merges.txt",
    *CHARTS,
    *formats.GGUF_FILES,
}
TOKEN_FILES = [*map(token_file_name, SPLITS)]
PARTIAL = ".{}.ddp-train-"  # of an unfinished export beside its place; a process id follows


@dataclass(frozen=True)
class Extras:
    """What an export has beside weights, configs and tokenizer."""

    card: str
    charts_dir: Path | None = None  # the charts in it are copied: the card shows them
    chat_template: str | None = None
    with_gguf: bool = False


def write_export(target: LoadedModel, output_dir: Path, extras: Extras) -> Path:
    """Write a model's directory completely or not at all, replacing an earlier export.

    A power loss leaves the earlier one or the new one whole. Raises: UserError: the directory
    cannot be written or holds something else, or a chart is a link.
    """
    check_output(output_dir)
    if extras.with_gguf:
        formats.check_gguf(target)
    partial = PARTIAL.format(output_dir.name)
    new_dir = output_dir.with_name(f"{partial}{os.getpid()}")
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        for path in output_dir.parent.iterdir():
            pid = path.name.removeprefix(partial)
            is_at_work = path != new_dir and pid.isdecimal() and psutil.pid_exists(int(pid))
            if path.name.startswith(partial) and not is_at_work:  # of a kill
                shutil.rmtree(path, ignore_errors=True)
        new_dir.mkdir()
        _write_files(target, new_dir, extras)
        for path in (*new_dir.iterdir(), new_dir):
            fsync(path)
        if output_dir.exists() and any(output_dir.iterdir()):
            print_error(f"{output_dir}: replaces the earlier export there")
        check_output(output_dir)  # again: writing takes a while
        replace_directory(new_dir, output_dir)
    except (OSError, SafetensorError) as error:
        raise cannot_be_written(output_dir, as_os_error(error)) from None
    finally:
        shutil.rmtree(new_dir, ignore_errors=True)
    return output_dir


def _write_files(target: LoadedModel, directory: Path, extras: Extras) -> None:
    model = target.model
    (directory / "README.md").write_text(extras.card, encoding="utf-8")
    tokenizer = target.load_tokenizer() if target.tokenizer_name else None
    config = gpt2_config(model.config, None if tokenizer is None else tokenizer.eot_token)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    for name, values in (("config.json", config), ("generation_config.json", ends)):
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")
    ours = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    weights = to_gpt2(ours, model.config)
    length = model.config.context_length
    write_tensors(directory / "model.safetensors", weights, {"format": "pt"})
    if isinstance(tokenizer, FileTokenizer):
        formats.write_own_tokenizer(directory, tokenizer.content, context_length=length)
    elif target.tokenizer_name is not None:
        formats.write_tokenizer_files(directory, target.tokenizer_name, context_length=length)
    if extras.chat_template is not None:
        path = directory / "tokenizer_config.json"
        formats.write_json(path, read_json_object(path) | {"chat_template": extras.chat_template})
    if extras.with_gguf:
        formats.write_gguf_files(target, weights, directory)
    if extras.charts_dir:
        for name in CHARTS:
            if is_own_file(extras.charts_dir / name):
                shutil.copyfile(extras.charts_dir / name, directory / name)


def check_output(output_dir: Path, *, option: str = "--output") -> None:
    """Check that an absolute path is free or holds an earlier export. Raises: UserError."""
    put_back(output_dir)
    if output_dir.is_symlink() or (output_dir.exists() and not output_dir.is_dir()):
        raise UserError(f"{output_dir}: is not a directory; name one with {option}")
    found = list(output_dir.iterdir()) if output_dir.exists() else []
    foreign = sorted(
        path.name
        for path in found
        if path.name not in FILES or path.is_symlink() or not path.is_file()
    )
    if foreign or (found and not is_export(output_dir)):
        others = ", ".join(foreign[:3]) or "a model from elsewhere"
        raise UserError(
            f"{output_dir}: holds other files ({others}); name another directory with {option}"
        )


def is_export(directory: Path) -> bool:
    """Return whether a directory holds a model that `lab publish` or `lab tune` wrote."""
    with suppress(OSError):
        return (directory / "config.json").is_file() and MARK in read_regular_file(
            directory / "README.md"
        )
    return False


def is_own_file(path: Path) -> bool:
    """Return whether there is such a file. Raises: UserError: it is a link, to whatever file."""
    if path.is_symlink():
        raise UserError(
            f"{path}: is a link, and publishing would send what it points to; move it"
            " away, or put the file itself there"
        )
    return path.is_file()


class Upload(NamedTuple):
    folder: Path
    files: list[str]  # names in the folder
    kind: str  # model or dataset


def find_dataset(request: PublishRequest) -> Upload | None:
    """Return the upload of a dataset directory; None if the source is not one.

    Only the token files, their tokenizer and README.md are uploaded, unchanged. Raises: UserError.
    """
    directory = Path(request.source)
    if not is_complete(directory):
        return None
    of_models = request.output_dir, request.licence, request.languages, request.with_gguf
    if request.repository is None or any(of_models):
        raise UserError(
            f"{directory}: is a dataset: name the REPOSITORY to upload it to, without"
            " --output, --license, --language and --gguf"
        )
    for name in TOKEN_FILES:
        TokenFile(directory / name)  # raises an error if it is damaged, or no token file
    texts = [name for name in (TOKENIZER_FILE, "README.md") if is_own_file(directory / name)]
    return Upload(directory, [*TOKEN_FILES, *texts], "dataset")


def export_model(request: PublishRequest) -> Upload:
    """Write the export of a run's model, or of an exported or tuned one. Raises: UserError."""
    source = Path(request.source).absolute()
    named = find_model(request.source, request.runs_dir)
    if named is None and not is_export(source):
        raise no_such_run(request.runs_dir, request.source)
    default = request.runs_dir / named.name / "export" if named else source
    output_dir = (request.output_dir or default).absolute()
    check_output(output_dir)
    target = load_model(
        request.source if named else str(source),
        runs_dir=request.runs_dir,
        checkpoint_name=request.checkpoint,
        device=CPU,
    )
    say_step(target)
    if named:
        card = model_card(target, request)
        charts_dir = target.run.run_dir
        template = None
    else:  # once more, with what the command line adds to it
        card = changed_card(source / "README.md", request)
        charts_dir = source
        template = found_object(source / "tokenizer_config.json").get("chat_template")
    write_export(target, output_dir, Extras(card, charts_dir, template, request.with_gguf))
    return Upload(output_dir, sorted(path.name for path in output_dir.iterdir()), "model")


def send(upload: Upload, repository: str, *, is_public: bool) -> None:
    """Upload all files in one commit; what an interrupted upload has sent is not sent again."""
    if not get_token():
        raise UserError(
            f"{repository} on the Hugging Face hub: uploading needs a token; set"
            " HF_TOKEN to one with write access, or run `uv run hf auth login`"
        )
    api = HfApi()
    about: dict[str, Any] = {"repo_id": repository, "repo_type": upload.kind}
    ask_hub(repository, lambda: api.create_repo(**about, private=not is_public, exist_ok=True))
    if ask_hub(repository, lambda: api.repo_info(**about).private) is is_public:
        found, remedy = ("private", "omit --public") if is_public else ("public", "add --public")
        raise UserError(
            f"{repository} on the Hugging Face hub: already exists and is {found};"
            f" {remedy}, or change it on its page; nothing was uploaded"
        )
    commit = ask_hub(
        repository,
        lambda: api.upload_folder(
            **about,
            folder_path=upload.folder,
            allow_patterns=upload.files,
            commit_message=f"Upload {upload.folder.name} with lab publish",
        ),
        pauses=(1,),
    )
    click.echo(
        f"uploaded to the Hugging Face hub, {'public' if is_public else 'private'}:"
        f" {visible(commit.repo_url.url)}"
    )
