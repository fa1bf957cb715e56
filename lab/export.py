"""A model as a directory that `transformers` loads: a stock GPT-2, no code of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from lab.targets import Target
from lab.tokenizer_files import write_tokenizer_files
from lab.weight_formats import gpt2_config, to_gpt2
from tokenizer import END_OF_TEXT_IDS
from user_error import UserError

OURS = {"config.json", "model.safetensors"}  # by which an earlier export is known


def write_export(target: Target, output_dir: Path, card: str) -> Path:
    """Write a model's directory, all of it or nothing; an earlier export there is replaced.

    With it go the run's charts, which its card shows.

    Raises:
        UserError: GPT-2 cannot express the model, or the directory cannot be written, or it holds
            something else.
    """
    check_output(output_dir)
    config = gpt2_config(target.model.config, target.tokenizer_name)
    partial_dir = output_dir.with_name(f".{output_dir.name}.partial")
    try:
        shutil.rmtree(partial_dir, ignore_errors=True)
        partial_dir.mkdir(parents=True)
        _write(target, partial_dir, config)
        (partial_dir / "README.md").write_text(card, encoding="utf-8")
        if output_dir.exists():
            shutil.rmtree(output_dir)
        partial_dir.rename(output_dir)
    except OSError as error:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise UserError(f"{output_dir}: cannot be written: {error.strerror or error}; make room, or"
                        " name another place with --output") from None
    return output_dir


def check_output(output_dir: Path) -> None:
    """Refuse a place that holds something else than an export. Raises: UserError."""
    if output_dir.is_symlink() or (output_dir.exists() and not output_dir.is_dir()):
        raise UserError(f"{output_dir}: is not a directory; name another with --output")
    found = {path.name for path in output_dir.iterdir()} if output_dir.exists() else OURS
    if found and not found >= OURS:
        raise UserError(f"{output_dir}: holds other files ({', '.join(sorted(found)[:3])}); name"
                        " another directory with --output")


def _write(target: Target, directory: Path, config: dict[str, object]) -> None:
    model, tokenizer_name = target.model, target.tokenizer_name
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    end_of_text = END_OF_TEXT_IDS.get(tokenizer_name or "")
    (directory / "generation_config.json").write_text(json.dumps({
        "bos_token_id": end_of_text, "eos_token_id": end_of_text}, indent=2) + "\n")
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    save_file(to_gpt2(weights, model.config), directory / "model.safetensors", {"format": "pt"})
    if tokenizer_name is not None:
        write_tokenizer_files(directory, tokenizer_name,
                              context_length=model.config.context_length)
    for chart in target.run.run_dir.glob("*-chart.png") if target.run else ():
        shutil.copyfile(chart, directory / chart.name)
