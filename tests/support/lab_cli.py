"""Run verbs of `lab` in the process of the test; what they tune, and the Markdown they write."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from click.testing import CliRunner, Result
from huggingface_hub import constants
from markdown_it import MarkdownIt

from basics.errors import UserError
from checkpointing import CheckpointMeta, Snapshot, save_checkpoint
from gpt import GPTModel
from lab.__main__ import cli
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL, Workplace


def run_lab(*arguments: str, **environment: str | None) -> Result:
    """Run a verb; an HF_ENDPOINT in `environment` is that of the hub client too."""
    with _hub_client(environment):
        return CliRunner().invoke(cli, list(arguments), env=environment)


def publish(workplace: Workplace, *arguments: str, **environment: str) -> Result:
    """Publish without a token, unless one is given."""
    return run_lab(
        "publish",
        *arguments,
        "--runs-dir",
        str(workplace.runs_dir),
        **{"HF_TOKEN": "", **environment},
    )


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def error_line(result: Result, *, status: int = 2) -> str:
    """Return the one line that a user sees of an error; nothing may have gone to stdout."""
    assert isinstance(result.exception, UserError), result.output + repr(result.exception)
    assert not result.stdout and result.exception.status == status
    line = result.exception.line()
    assert "\n" not in line
    return line


@contextlib.contextmanager
def _hub_client(environment: dict[str, str | None]) -> Iterator[None]:
    """Set the constants that the hub client reads from the environment when it is imported."""
    endpoint, home = environment.get("HF_ENDPOINT"), environment.get("HF_HOME")
    changes: dict[str, object] = {}
    if endpoint:
        changes |= {
            "ENDPOINT": endpoint,
            "HF_HUB_DISABLE_XET": True,
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }
    if home:
        changes |= {"HF_HUB_CACHE": str(Path(home) / "hub"), "HF_TOKEN_PATH": f"{home}/token"}
    with mock.patch.multiple(constants, **changes) if changes else contextlib.nullcontext():
        yield


TUNABLE = ModelConfig(**TINY_MODEL | {"context_length": 192})
FAST = ("--learning-rate", "0.01", "--max-new-tokens", "20")


def add_tunable_run(workplace: Workplace) -> Workplace:
    """Add a run with a checkpoint, and instructions that all have the same output."""
    run_dir = workplace.add_run(model={"context_length": 192, "drop_rate": 0.0})
    torch.manual_seed(0)
    meta = CheckpointMeta(
        global_step=1,
        tokens=0,
        loss=1.0,
        train_loss=1.0,
        seconds={},
        tokenizer="bytes",
        model=TUNABLE,
        random_seed=42,
        data={},
    )
    save_checkpoint(run_dir / "checkpoints", Snapshot(GPTModel(TUNABLE).state_dict(), {}), meta)
    write_entries(workplace.root / "data.json", 40, output=" Yes.")
    return workplace


def write_entries(path: Path, count: int, *, output: str) -> Path:
    path.write_text(
        json.dumps(
            [
                {"instruction": f"Ask {i}", "input": "é" if i == 36 else "", "output": output}
                for i in range(count)
            ]
        )
    )
    return path


def entries_of(path: Path) -> list[dict[str, str]]:
    return json.loads(path.read_text())


def tune(workplace: Workplace, *arguments: str, data: Path | None = None) -> Result:
    return run_lab(
        "tune",
        "tiny",
        "--runs-dir",
        str(workplace.runs_dir),
        "--data",
        str(data or workplace.root / "data.json"),
        *FAST,
        *arguments,
    )


def answers_in(workplace: Workplace) -> dict:
    return json.loads((workplace.runs_dir / "tiny/instruction-answers.json").read_text())


# A link, an image, a tag and an address, from inside code too; may be the name of a file.
HOSTILE = "a`[b](javascript:c()) <script>d() ![e](f)|[g](javascript:h()) <i@j.k>"


def active_parts(text: str) -> set[str]:
    """Return the scripts and the targets of links and images that a Markdown text has."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.validateLink = lambda url: True  # not every program refuses a javascript: link
    page = parser.render(text.partition("\n---\n")[2] or text)  # without front matter
    return set(re.findall(r'<script|(?:href|src)="([^"]*)"', page))
