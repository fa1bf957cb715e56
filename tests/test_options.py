"""The options are frozen: whoever adds one to `options.txt` says in the change what goes."""

import importlib

import click

import prepare_dataset
from lab.__main__ import MODULES, cli
from processes import command_line
from run_config import ModelConfig, TrainConfig
from tests.support.workplace import PROJECT_DIR

PATH = PROJECT_DIR / "tests/options.txt"


def options_of(program, command):
    return {
        f"{program} {option}"
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }


def all_options():
    found = {f"model.json {key}" for key in ModelConfig.model_fields}
    found |= {f"train.json {key}" for key in TrainConfig.model_fields}
    found |= options_of("ddp_train.py", command_line.command_line)
    found |= options_of("prepare_dataset.py", prepare_dataset.main)
    found |= options_of("lab", cli)
    for verbs in MODULES.values():
        for verb, module in verbs.items():
            found |= options_of(f"lab {verb}", importlib.import_module(module).command)
    return found


def test_the_options_are_those_of_the_list():
    listed = PATH.read_text().splitlines()
    assert listed == sorted(all_options())
