"""Threads that spin: limited before torch is imported, unless a person has chosen."""

import os

import pytest

from basics.cpu_settings import CHOSEN_BY_USER, SPIN_COUNT, limit_spinning
from lab.__main__ import main
from processes.before_torch import check_before_torch


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("RANK", *CHOSEN_BY_USER):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize("command", [check_before_torch, main])
def test_both_commands_limit_it(command, monkeypatch):
    monkeypatch.setattr("sys.argv", ["command", "--help"])
    monkeypatch.setattr("gc.disable", lambda: None)  # what else is done before torch is imported
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        command()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


@pytest.mark.parametrize("name", sorted(CHOSEN_BY_USER))
def test_a_choice_in_the_environment_is_kept(name, monkeypatch):
    monkeypatch.setenv(name, "7")
    limit_spinning()
    assert {key: os.environ[key] for key in CHOSEN_BY_USER & os.environ.keys()} == {name: "7"}
