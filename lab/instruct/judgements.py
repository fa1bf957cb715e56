"""Saved judgements, one line each, so that no question is paid for twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from basics.errors import UserError, cannot_be_written
from lab.instruct.comparison import HIGHEST_SCORE, Comparison

LINE_START = b'{"key":"'  # of every line that this module writes


class Judgement(BaseModel):
    """A line of the file: the result of one comparison."""

    model_config = ConfigDict(frozen=True, strict=True)

    key: str
    judge: str
    instruction: str
    order: list[str]  # the models, in the order in which the judge saw their answers
    scores: dict[str, Annotated[float, Field(ge=0, le=HIGHEST_SCORE)]]  # by model


class Judgements:
    """The judgements in a file. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists; skip a line that a kill has cut short.

        Raises:
            UserError: it cannot be read, or holds something else.
        """
        self.path = path
        try:
            if path.exists() and not path.is_file():  # reading a pipe could block forever
                raise OSError("is not a plain file")
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}; name another file"
                            " with --output") from None
        self._by_key = {}
        for number, line in enumerate(content.splitlines(), start=1):
            if not (line.startswith(LINE_START) or LINE_START.startswith(line)):
                raise UserError(f"{path}: line {number} is not a judgement; name another file with"
                                " --output")
            try:
                judgement = Judgement.model_validate_json(line)
            except ValidationError:
                continue
            self._by_key[judgement.key] = judgement
        self._is_cut = bool(content) and not content.endswith(b"\n")

    def check_writable(self) -> None:
        """Check before any request is paid for. Raises: UserError if it cannot be written."""
        is_new = not os.path.lexists(self.path)  # do not delete a broken link of the user
        try:
            self.path.open("ab").close()
            if is_new:
                self.path.unlink()
        except OSError as error:
            raise cannot_be_written(self.path, error) from None

    def scores(self, comparison: Comparison) -> dict[str, float] | None:
        """Return the score of each model's answer; None if there is no judgement yet."""
        found = self._by_key.get(comparison.key)
        if found is None or found.scores.keys() != comparison.answers.keys():
            return None
        return found.scores

    def add(self, comparison: Comparison, scores: dict[str, float], *, judge_model: str) -> None:
        """Save a judgement. Raises: UserError if the file cannot be written."""
        judgement = Judgement(key=comparison.key, judge=judge_model, scores=scores,
                              instruction=comparison.question.instruction,
                              order=list(comparison.order))
        line = judgement.model_dump_json() + "\n"
        try:
            with self.path.open("ab") as file:
                file.write(("\n" + line if self._is_cut else line).encode())
        except OSError as error:
            raise cannot_be_written(self.path, error) from None
        self._is_cut = False
        self._by_key[judgement.key] = judgement
