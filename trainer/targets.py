"""Load a model by name: of a run, from a directory of weights, or from the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import safe_open

from basics.checkpoint_names import BEST, directory_of, named_as_checkpoints
from basics.config_files import describe
from basics.errors import UserError, first_line, print_error
from basics.files import check_tensor_header
from basics.json_files import read_json_object
from basics.machine import available_ram_gib
from basics.manifest import MANIFEST
from basics.sizes import gib
from basics.tensor_files import first_non_finite
from checkpointing import DAMAGE, Checkpoint, find_checkpoint, load_weights, open_checkpoint
from gpt import GPTModel
from preparation.hub import ask_hub, hide_progress_bars
from run_config import RUN_NAME, ModelConfig, Run, load_config, load_run
from tokens.batches import TOKENIZERS_BY_VOCABULARY
from tokens.tokenizer import END_OF_TEXT_IDS, Tokenizer, file_beside, load_tokenizer
from tokens.tokenizer_file import TOKENIZER_FILE, name_of, parse_tokenizer, read_tokenizer_file
from trainer.weight_formats import (
    Gpt2Config,
    Weights,
    from_gpt2,
    from_original,
    is_original,
    without_zero_biases,
)

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
WEIGHT_FILES = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
DOWNLOADED = [*WEIGHT_FILES, TOKENIZER_FILE]
NEEDED_BY = "a directory of weights"
TRIES = 10  # to read a checkpoint of a run that saves and removes checkpoints meanwhile


@dataclass(frozen=True)
class Target:
    """A model with its weights, float32, on its device and in eval mode.

    Attributes:
        name: as given on the command line.
        tokenizer_name: None if neither a checkpoint nor the vocabulary size determines it.
        run: set only if the target is a run; likewise its checkpoint.
    """

    name: str
    model: GPTModel
    tokenizer_name: str | None
    run: Run | None = None
    checkpoint: Checkpoint | None = None
    tokenizer_path: Path | None = None  # of its file, if it has one

    @property
    def device(self) -> torch.device:
        return self.model.token_embedding.weight.device

    def needs_tokenizer(self) -> str:
        """Return the tokenizer's name. Raises: UserError if it is not known."""
        if self.tokenizer_name is None:
            raise UserError(f"{self.name}: its tokenizer is not known, and no known one has a"
                            f" vocabulary of {self.model.config.vocab_size:,}; name a model that"
                            f" uses {' or '.join(END_OF_TEXT_IDS)}")
        return self.tokenizer_name

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises: UserError if it is not known."""
        return load_tokenizer(self.needs_tokenizer(), self.tokenizer_path)


def load_target(name: str, *, runs_dir: Path, checkpoint_name: str = BEST,
                device: torch.device | None = None) -> Target:
    """Load a run's model, a directory's, or one from the Hugging Face hub (`owner/name`).

    A directory holds a GPT-2 as `transformers` stores it, a checkpoint of a run, or one of the
    original system with its `model.json` beside it or two directories above.

    Raises:
        UserError: there is no such model, it is damaged, or it is not a GPT-2.
    """
    check_name(name, runs_dir)
    if is_run(name, runs_dir):
        target = _of_run(name, runs_dir, checkpoint_name)
    else:
        place = directory_of(Path(name))
        target = _of_directory(name, place if place.is_dir() else _download(name))
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = target.model.to(device).eval()
    with torch.inference_mode():
        if not model(torch.zeros(1, 1, dtype=torch.int64, device=device)).isfinite().all():
            raise UserError(f"{name}: its logits are not finite: its weights are too large; take"
                            " another model")
    return target


def check_name(name: str, runs_dir: Path) -> None:
    """Check that a name is a run, a directory, or owner/name. Raises: UserError."""
    is_place = is_run(name, runs_dir) or directory_of(Path(name)).is_dir()
    if not (is_place or HUB_NAME.fullmatch(name)):
        load_run(runs_dir, name)  # its error lists the runs


def is_run(name: str, runs_dir: Path) -> bool:
    """Return whether a target's name is that of a run."""
    return bool(RUN_NAME.fullmatch(name)) and (runs_dir / name).is_dir()


def _of_run(name: str, runs_dir: Path, checkpoint_name: str) -> Target:
    run = load_run(runs_dir, name)
    for tries_left in reversed(range(TRIES)):
        before = named_as_checkpoints(run.checkpoints_dir)
        try:
            checkpoint = find_checkpoint(run.checkpoints_dir, checkpoint_name)
            if checkpoint is None:
                raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train the run first")
            return _of_checkpoint(name, checkpoint, run.model, run)
        except UserError:  # the run may train, and have removed what was being read
            if not tries_left or named_as_checkpoints(run.checkpoints_dir) == before:
                raise
    raise AssertionError


def _of_checkpoint(name: str, checkpoint: Checkpoint, config: ModelConfig,
                   run: Run | None = None) -> Target:
    model = _on_meta(checkpoint.path, config).to_empty(device="cpu")
    load_weights(checkpoint, model)
    tokenizer = checkpoint.meta.tokenizer
    return Target(name, model, tokenizer, run, checkpoint, file_beside(checkpoint.path, tokenizer))


def _of_directory(name: str, directory: Path) -> Target:
    if (directory / MANIFEST).exists():
        found = open_checkpoint(directory, thoroughly=True)
        return _of_checkpoint(name, found, found.meta.model)
    weights = _map_weights(directory)
    try:
        if is_original(weights.keys()):
            config, end_of_text, convert = _original_config(directory), None, from_original
        else:
            gpt2 = _gpt2_config(directory / "config.json")
            config, end_of_text, convert = gpt2.as_model_config(), gpt2.eos_token_id, from_gpt2
        shapes = convert({key: weight.to("meta") for key, weight in weights.items()}, config)
        _check_shapes(directory, shapes, _on_meta(directory, config).state_dict())
        ours = {key: weight.float() for key, weight in convert(weights, config).items()}
        if broken := first_non_finite(ours):
            raise UserError(f"{directory}: {broken} holds a number that is not finite in float32;"
                            " download or export it again")
        if convert is from_gpt2:
            ours, config = without_zero_biases(ours, config)
        model = _on_meta(directory, config)
        model.load_state_dict(ours, assign=True)
    except KeyError as error:
        raise UserError(f"{directory}: has no weights {error.args[0]}; give a GPT-2 whose tensors"
                        " are named as in transformers") from None
    except ValidationError as error:
        raise UserError(f"{directory}: not a GPT-2: {_first_error(error)}") from None
    except DAMAGE as error:
        raise UserError(f"{directory}: not a GPT-2: {first_line(error)}") from None
    tokenizer_name, path = _tokenizer_of(directory, config, end_of_text)
    return Target(name, model, tokenizer_name, tokenizer_path=path)


def _on_meta(place: Path, config: ModelConfig) -> GPTModel:
    """Make a model without memory. Raises: UserError: its weights would not fit into the RAM."""
    with torch.device("meta"):
        model = GPTModel(config)
    needed, available = 4 * model.num_parameters(), available_ram_gib() * 2**30
    if needed > available:
        raise UserError(f"{place}: its config makes a model of {gib(needed)}; this machine has"
                        f" {gib(available)} of memory left; take a smaller one")
    return model


def _check_shapes(directory: Path, found: Weights, wanted: Weights) -> None:
    for name, weight in wanted.items():
        if not found[name].is_floating_point():
            raise UserError(f"{directory}: not a GPT-2: {name} holds {found[name].dtype}; wanted"
                            " floating-point numbers")
        if found[name].shape != weight.shape:
            raise UserError(f"{directory}: not a GPT-2: {name} has shape"
                            f" {tuple(found[name].shape)}; its config needs"
                            f" {tuple(weight.shape)}")


def _map_weights(directory: Path) -> Weights:
    """Map `model.safetensors`, or the files that its index lists; nothing is read before use."""
    index_path, names = directory / "model.safetensors.index.json", ["model.safetensors"]
    if index_path.exists():
        weight_map = read_json_object(index_path, needed_by=NEEDED_BY).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index_path}: has no weight_map; download the directory again")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if not re.fullmatch(r"model-[\w-]+\.safetensors", name):
                raise UserError(f"{index_path}: lists {name[:60]!r}, which is not a weight file in"
                                " the same directory; download the directory again")
    weights: Weights = {}
    for name in names:
        try:
            if (directory / name).exists() and not (directory / name).is_file():
                raise OSError("is not a file")  # reading a pipe could block forever
            check_tensor_header(directory / name)
            with safe_open(directory / name, framework="pt") as file:
                weights |= {key: file.get_tensor(key) for key in file.keys()}
        except FileNotFoundError:
            raise UserError(f"{directory / name}: no such file; {NEEDED_BY} needs it (pickled"
                            " weights such as pytorch_model.bin are not read)") from None
        except DAMAGE as error:
            raise UserError(f"{directory / name}: not a whole safetensors file"
                            f" ({first_line(error)}); download or export it again") from None
    return weights


def _gpt2_config(path: Path) -> Gpt2Config:
    values = read_json_object(path, needed_by=NEEDED_BY)
    try:
        return Gpt2Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: not a GPT-2: {_first_error(error)}") from None


def _original_config(directory: Path) -> ModelConfig:
    """Read the config of an original checkpoint: from its run, or from its published config."""
    if (directory / "config.json").exists():
        path = directory / "config.json"
        published = read_json_object(path, needed_by=NEEDED_BY).get("cfg")
        return ModelConfig.model_validate(published)
    above = directory.parent.parent / "model.json"
    return load_config(directory / "model.json" if not above.exists() else above, ModelConfig)


def _tokenizer_of(directory: Path, config: ModelConfig,
                  end_of_text: int | None) -> tuple[str | None, Path | None]:
    """Return the name of a directory's tokenizer, and its file unless it is a known tokenizer."""
    by_end = {token_id: name for name, token_id in END_OF_TEXT_IDS.items()
              if token_id < config.vocab_size}  # vocabularies may be padded
    known = TOKENIZERS_BY_VOCABULARY.get(config.vocab_size) or by_end.get(end_of_text)
    path = directory / TOKENIZER_FILE
    try:
        content = read_tokenizer_file(path)
    except UserError:  # it is missing, or none that this project can use
        return known, None
    if known and _begins_with(parse_tokenizer(content), load_tokenizer(known)):
        return known, None
    return name_of(content), path


def _begins_with(found: Tokenizer, known: Tokenizer) -> bool:
    """Return whether a tokenizer has all tokens of a known one, with the same ids."""
    return found.eot_token == known.eot_token and all(
        found.decode_single_token_bytes(token_id) == known.decode_single_token_bytes(token_id)
        for token_id in range(known.n_vocab))


def _download(repository: str) -> Path:
    """Download a model's files into the hub client's cache, unless they are there."""
    from huggingface_hub import hf_hub_download, snapshot_download

    hide_progress_bars()
    config_path = Path(ask_hub(repository, lambda: hf_hub_download(repository, "config.json"),
                               pauses=()))
    if "cfg" not in read_json_object(config_path, needed_by=NEEDED_BY):
        _gpt2_config(config_path)  # refuse other architectures before downloading gigabytes
    print_error(f"{repository}: loading the weights from the Hugging Face hub or its cache")
    return Path(ask_hub(repository, lambda: snapshot_download(
        repository, revision=config_path.parent.name, allow_patterns=DOWNLOADED)))


def _first_error(error: ValidationError) -> str:
    return describe(error).removesuffix("; change it")  # a trained model cannot be changed
