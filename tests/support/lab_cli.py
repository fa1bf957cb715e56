"""Run verbs of `lab` in the test's own process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from click.testing import CliRunner, Result
from huggingface_hub import constants

from basics.errors import UserError
from lab.__main__ import cli
from tests.support.workplace import Workplace


def run_lab(*arguments: str, **environment: str | None) -> Result:
    """Run a verb; an HF_ENDPOINT in `environment` is that of the hub client too."""
    with _hub_client(environment):
        return CliRunner().invoke(cli, list(arguments), env=environment)


def publish(workplace: Workplace, *arguments: str, **environment: str) -> Result:
    """Publish without a token, unless one is given."""
    return run_lab("publish", *arguments, "--runs-dir", str(workplace.runs_dir),
                   **{"HF_TOKEN": "", **environment})


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
        changes |= {"ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": True,
                    "HUGGINGFACE_CO_URL_TEMPLATE":
                        endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
    if home:
        changes |= {"HF_HUB_CACHE": str(Path(home) / "hub"), "HF_TOKEN_PATH": f"{home}/token"}
    with mock.patch.multiple(constants, **changes) if changes else contextlib.nullcontext():
        yield
