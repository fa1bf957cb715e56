"""Models by name: of a run, from a directory of weights, or from the hub."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open

from basics.checkpoint_files import BEST, MANIFEST, directory_of, named_as_checkpoints
from basics.device import CPU, first_device
from basics.errors import UserError, first_line, one_line, print_error
from basics.json_files import describe, read_json_object
from basics.machine import available_ram_gib
from basics.tensors import first_non_finite
from basics.text import gib
from checkpointing import (
    DAMAGE,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_weights,
    open_checkpoint,
)
from gpt import GPTModel
from run_config import ModelConfig, Run, load_config, load_run
from tokens.batches import TOKENIZERS_BY_VOCABULARY
from tokens.tokenizer import (
    KNOWN_SIZES,
    TOKENIZER_FILE,
    Tokenizer,
    file_beside,
    load_tokenizer,
    read_tokenizer_file,
    short_name,
)
from trainer.model_names import find_model
from trainer.weight_formats import Gpt2Config, Weights, from_gpt2, from_original

WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+")  # names of a module inside of DDP or compiled
DOWNLOADED = [
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    TOKENIZER_FILE,
]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, float32, on its device and in eval mode."""

    name: str  # as given on the command line
    model: GPTModel
    tokenizer_name: str | None  # None if neither checkpoint nor vocabulary size determines it
    run: Run | None = None  # set only if the name is that of a run; likewise its checkpoint
    checkpoint: Checkpoint | None = None
    tokenizer_path: Path | None = None  # of its file, if it has one

    @property
    def device(self) -> torch.device:
        return self.model.token_embedding.weight.device

    @property
    def full_name(self) -> str:
        """The name; of a directory its whole path, the same from every working directory."""
        place = directory_of(Path(self.name))
        return str(place.resolve()) if self.run is None and place.is_dir() else self.name

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises: UserError if it is not known."""
        if self.tokenizer_name is None:
            raise UserError(
                f"{self.name}: its tokenizer is not known, and no known one has a"
                f" vocabulary of {self.model.config.vocab_size:,}; name a model that"
                f" uses {' or '.join(KNOWN_SIZES)}"
            )
        return load_tokenizer(self.tokenizer_name, self.tokenizer_path)


def load_model(
    name: str, *, runs_dir: Path, checkpoint_name: str = BEST, device: torch.device | None = None
) -> LoadedModel:
    """Load a run's model, a directory's, or one from the Hugging Face hub (`owner/name`).

    A directory holds a GPT-2 as `transformers` stores it, a checkpoint of a run, or one of the
    original system with its `model.json` beside it or two directories above.

    Of RUN@CHECKPOINT that checkpoint is loaded.

    Raises: UserError: there is no such model, it is damaged, or it is not a GPT-2.
    """
    if named := find_model(name, runs_dir):
        if named.checkpoint and checkpoint_name not in (BEST, named.checkpoint):
            raise UserError(
                f"{name}: names a checkpoint, and --checkpoint {checkpoint_name} another; drop one"
            )
        loaded = _of_run(named.name, runs_dir, named.checkpoint or checkpoint_name)
    else:
        place = directory_of(Path(name))
        loaded = _of_directory(name, place if place.is_dir() else None)
    device = device or first_device()
    model = loaded.model.to(device).eval()
    with torch.inference_mode():
        if not model(torch.zeros(1, 1, dtype=torch.int64, device=device)).isfinite().all():
            raise UserError(
                f"{name}: its logits are not finite: its weights are too large; take another model"
            )
    return loaded


def say_step(target: LoadedModel, *, names_newest: bool = True) -> None:
    """Print the step of a run's checkpoint, and the newest one's where that is another."""
    if not (target.run and target.checkpoint):
        return
    step = target.checkpoint.meta.global_step + 1
    text = f"{target.name}: step {step:,}, checkpoint {target.checkpoint.name}"
    if names_newest:
        found = list_checkpoints(target.run.checkpoints_dir)
        newest = max((each.meta.global_step + 1 for each in found), default=step)
        if newest != step:
            text += f"; the newest is of step {newest:,}"
    print_error(one_line(text))


def initial_model(run: Run, runs_dir: Path) -> LoadedModel:
    """Load the model that `init_from` names, float32, on the CPU. May download it.

    One without biases in attention gets zeros, if the run has them: it computes the same.

    Raises: UserError: there is no such model, or it has another shape than the run's.
    """
    source = run.config.init_from or ""
    try:
        named = find_model(source, runs_dir)
        if named and named.name == run.name:
            raise UserError("is this run itself; name another one")
        loaded = load_model(source, runs_dir=runs_dir, device=CPU)
        model = loaded.model
        if run.model.qkv_bias and not model.config.qkv_bias:
            model = _with_zero_biases(source, model)
        for key, wanted in run.model.shape().items():
            found = getattr(model.config, key)
            if found != wanted:
                raise UserError(
                    f"{source} has {key} {found}, model.json has {wanted}; they must be equal"
                )
    except UserError as error:
        raise UserError(f"{run.train_path}: init_from: {error}") from None
    return replace(loaded, model=model)


def check_initial_tokenizer(run: Run, theirs: str | None, ours: str | None) -> None:
    """Compare the tokenizer of the initial weights with the dataset's. Raises: UserError."""
    if theirs and ours and theirs != ours:
        raise UserError(
            f"{run.train_path}: init_from: {run.config.init_from} was trained with the tokenizer"
            f" {short_name(theirs)}, the dataset was made with {short_name(ours)}; prepare the"
            " dataset with its tokenizer"
        )


def _with_zero_biases(source: str, model: GPTModel) -> GPTModel:
    """Return a model that computes the same with `qkv_bias`, of the same weights."""
    biased = _on_meta(Path(source), model.config.model_copy(update={"qkv_bias": True}))
    zeros = {
        f"blocks.{layer}.attention.qkv.bias": torch.zeros(3 * model.config.emb_dim)
        for layer in range(model.config.n_layers)
    }
    biased.load_state_dict(model.state_dict() | zeros, assign=True)
    return biased.eval()


def model_directory(name: str, runs_dir: Path) -> Path:
    """Return where the files of a model are that has been loaded before."""
    named = find_model(name, runs_dir)
    directory = Path(name)
    if named:
        directory = runs_dir / named.name / "checkpoints" / (named.checkpoint or BEST)
    directory = directory_of(directory)
    if directory.is_dir():
        return directory
    from huggingface_hub import hf_hub_download  # takes half a second

    return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent


def _of_run(name: str, runs_dir: Path, checkpoint_name: str) -> LoadedModel:
    run = load_run(runs_dir, name)
    while True:
        before = named_as_checkpoints(run.checkpoints_dir)
        try:
            checkpoint = find_checkpoint(run.checkpoints_dir, checkpoint_name)
            if checkpoint is None:
                raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train the run first")
            if checkpoint.is_of_the_original:
                loaded = _of_directory(name, checkpoint.path)
                return replace(loaded, run=run, checkpoint=checkpoint)
            model, meta = run.model, checkpoint.meta
            if meta.run_layers == model.n_layers:  # the checkpoint may have fewer: see `grow`
                model = model.with_layers(min(meta.model.n_layers, model.n_layers))
            return _of_checkpoint(name, checkpoint, model, run)
        except UserError:
            if named_as_checkpoints(run.checkpoints_dir) == before:
                raise  # else the run trains, and has removed what was being read


def _of_checkpoint(
    name: str, checkpoint: Checkpoint, config: ModelConfig, run: Run | None = None
) -> LoadedModel:
    model = _on_meta(checkpoint.path, config).to_empty(device="cpu")
    load_weights(checkpoint, model)
    tokenizer = checkpoint.meta.tokenizer
    return LoadedModel(
        name, model, tokenizer, run, checkpoint, file_beside(checkpoint.path, tokenizer)
    )


def _of_directory(name: str, directory: Path | None) -> LoadedModel:
    """Load a model from a directory; without one from the hub.

    Raises: UserError: it is damaged, or it is not a GPT-2.
    """
    try:
        return _of_weights(name, directory or _download(name))
    except DAMAGE as error:
        reason = first_line(error)
        if isinstance(error, KeyError):
            reason = f"it has no weights {error.args[0]}"
        elif isinstance(error, ValidationError):
            reason = describe(error).removesuffix("; change it")  # it is trained already
        raise UserError(f"{name}: not a GPT-2: {reason}") from None


def _of_weights(name: str, directory: Path) -> LoadedModel:
    if (directory / MANIFEST).exists():
        found = open_checkpoint(directory, thoroughly=True)
        return _of_checkpoint(name, found, found.meta.model)
    weights = _map_weights(directory)
    ends_of_text: list[int | None] = []
    if weights.keys() & {"pos_emb.weight", "model.pos_emb.weight"}:  # of the original system
        above = directory.parent.parent / "model.json"
        if (directory / "config.json").exists():  # as published
            config = ModelConfig.model_validate(_json(directory / "config.json").get("cfg"))
        else:
            config = load_config(above if above.exists() else directory / "model.json", ModelConfig)
        ours, config = from_original(weights, config)
    else:
        gpt2 = Gpt2Config.model_validate(_json(directory / "config.json"))
        ours, config = from_gpt2(weights, gpt2.as_model_config())
        ends = gpt2.eos_token_id
        ends_of_text = [*ends] if isinstance(ends, list) else [ends]
    model = _on_meta(directory, config)
    for key, wanted in model.state_dict().items():
        if not ours[key].is_floating_point() or ours[key].shape != wanted.shape:
            raise UserError(
                f"{directory}: not a GPT-2: {key} holds {ours[key].dtype} of shape"
                f" {tuple(ours[key].shape)}; its config needs floating-point numbers"
                f" of shape {tuple(wanted.shape)}"
            )
        ours[key] = ours[key].float().contiguous()
    if broken := first_non_finite(ours):
        raise UserError(
            f"{directory}: {broken} holds a number that is not finite in float32;"
            " download or export it again"
        )
    model.load_state_dict(ours, assign=True)
    tokenizer_name, tokenizer_path = _tokenizer_of(directory, config, ends_of_text)
    return LoadedModel(name, model, tokenizer_name, tokenizer_path=tokenizer_path)


def _on_meta(place: Path, config: ModelConfig) -> GPTModel:
    """Make a model without memory. Raises: UserError: its weights would not fit into the RAM."""
    with torch.device("meta"):
        model = GPTModel(config)
    needed, available = 4 * model.config.num_parameters, available_ram_gib() * 2**30
    if needed > available:
        raise UserError(
            f"{place}: its config makes a model of {gib(needed)}; this machine has"
            f" {gib(available)} of memory left; take a smaller one"
        )
    return model


def _map_weights(directory: Path) -> Weights:
    """Map `model.safetensors`, or the files that its index lists; nothing is read before use."""
    index_path, names = directory / "model.safetensors.index.json", ["model.safetensors"]
    if index_path.exists():
        weight_map = _json(index_path).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else [""]
    weights: Weights = {}
    for name in names:
        path = directory / name
        if not re.fullmatch(r"model(-[\w-]+)?\.safetensors", name):
            raise UserError(
                f"{index_path}: lists {name[:60]!r}, which is not a weight file in the"
                " same directory; download the directory again"
            )
        try:
            if path.exists() and not path.is_file():
                raise OSError("is not a file")  # reading a pipe could block forever
            with safe_open(path, framework="pt") as file:
                weights |= {WRAPPERS.sub("", key): file.get_tensor(key) for key in file.keys()}
        except FileNotFoundError:
            raise UserError(
                f"{path}: no such file; a directory of weights needs it (pickled"
                " weights such as pytorch_model.bin are not read)"
            ) from None
        except DAMAGE as error:
            raise UserError(
                f"{path}: not a whole safetensors file ({first_line(error)}); download"
                " or export it again"
            ) from None
    return weights


def _json(path: Path) -> dict[str, Any]:
    return read_json_object(path, needed_by="a directory of weights")


def _tokenizer_of(
    directory: Path, config: ModelConfig, ends_of_text: list[int | None]
) -> tuple[str | None, Path | None]:
    """Return the name of a directory's tokenizer, and its file unless it is a known tokenizer."""
    known = TOKENIZERS_BY_VOCABULARY.get(config.vocab_size) or next(
        (
            name
            for name, size in KNOWN_SIZES.items()  # vocabularies may be padded
            if size - 1 in ends_of_text and size <= config.vocab_size
        ),
        None,
    )
    try:
        theirs = read_tokenizer_file(directory / TOKENIZER_FILE)
    except UserError:  # it is missing, or none that this project can use
        return known, None
    if known:
        ours = load_tokenizer(known)
        if theirs.eot_token == ours.eot_token and all(  # it begins with the known one's tokens
            theirs.decode_single_token_bytes(each) == ours.decode_single_token_bytes(each)
            for each in range(ours.n_vocab)
        ):
            return known, None
    return theirs.name, directory / TOKENIZER_FILE


def _download(repository: str) -> Path:
    """Download a model's files into the hub client's cache, unless they are there."""
    from huggingface_hub import hf_hub_download, snapshot_download  # takes half a second

    from preparation.hub import ask_hub, hide_progress_bars

    hide_progress_bars()
    config_path = Path(
        ask_hub(repository, lambda: hf_hub_download(repository, "config.json"), pauses=())
    )
    if "cfg" not in (config := _json(config_path)):
        Gpt2Config.model_validate(config)  # refuse other architectures before their gigabytes
    print_error(f"{repository}: loading the weights from the Hugging Face hub or its cache")
    return Path(
        ask_hub(
            repository,
            lambda: snapshot_download(
                repository, revision=config_path.parent.name, allow_patterns=DOWNLOADED
            ),
        )
    )
