"""What one `lab tune` is to do: from which model, on which entries, how, and where to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from basics.errors import one_line
from lab.instruct.instructions import Split
from lab.instruct.tuning import TuneOptions
from lab.publish.model_card import public_name
from trainer.models import LoadedModel


@dataclass(frozen=True)
class Job:
    """The base model and the data, read; the options; the places of answers and tuned model."""

    target: LoadedModel
    data: Path
    data_sha256: str
    entries: Split
    options: TuneOptions
    output: Path
    model_output: Path

    @property
    def base_name(self) -> str:
        """The base model's name in a card: without the directories of this machine."""
        return one_line(public_name(self.target.name))

    @property
    def progress_dir(self) -> Path:
        return self.model_output.with_name(f".{self.model_output.name}.progress")

    def identity(self) -> dict[str, str]:
        """Return what decides the tuned weights; call it before they change."""
        options = {key: json.dumps(value) for key, value in asdict(self.options).items()}
        del options["max_new_tokens"]  # of answers, which come after training
        return options | {"data": self.data_sha256, "base_model": _digest(self.target)}


def _digest(target: LoadedModel) -> str:
    """Return the SHA-256 of a model's weights and its tokenizer's name."""
    digest = hashlib.sha256(f"{target.tokenizer_name} {target.model.config}".encode())
    for name, tensor in target.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy())
    return digest.hexdigest()
