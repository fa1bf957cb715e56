"""model.json and train.json: what is accepted, refused, warned of, and the defaults."""

import gc
import json
import re
import shutil
import sys
from pathlib import Path
from types import FunctionType

import pytest

import run_config
from basics.errors import UserError
from basics.json_files import read_json_object
from lab.__main__ import cli
from processes.command_line import check_before_torch
from run_config import (
    ModelConfig,
    TrainConfig,
    load_run,
    make_run_dir,
    setting_warnings,
    with_defaults,
)
from settings.optimizer import GROUPS
from tests.support.lab_cli import run_lab
from tests.support.runs import run_in_process
from tests.support.workplace import PROJECT_DIR, TINY_MODEL, TINY_TRAIN, succeeded


def load(workplace, **changes):
    workplace.add_run(**changes)
    return load_run(workplace.runs_dir, "tiny")


def test_runs_that_ship_are_valid():
    for path in (PROJECT_DIR / "runs").glob("*/train.json"):
        run = load_run(PROJECT_DIR / "runs", path.parent.name)
        assert run.model.vocab_size in (257, 50257)
        assert setting_warnings(run) == []


def test_the_originals_runs_have_its_settings():
    table = {
        "original": (6, 5922, 3200),
        "8xa100m40": (13, 617, 300),
        "8xa100m80": (28, 617, 300),
        "8xh100m80": (27, 617, 300),
        "8xb200m160": (64, 617, 300),
    }
    for name, settings in table.items():
        run = load_run(PROJECT_DIR / "runs", name)
        train = run.config
        assert (
            train.microbatch_size,
            train.validation_interval,
            train.validation_batches,
        ) == settings
        assert train.min_train_tokens == 3_260_190_720 and train.learning_rate == 4e-4
        assert train.weight_decay == 0.1 and train.decay_norms_and_biases
        assert run.model.init == "torch" and run.model.drop_rate == 0.1
        assert train.precision == "fp16" and train.residual_dtype == "fp32"
        assert (run.model.emb_dim, run.model.n_layers, run.model.n_heads) == (768, 12, 12)


WRONG = [
    (
        "train",
        {"microbatch_sise": 3},
        'unknown key "microbatch_sise"; the nearest known one is "microbatch_size"',
    ),
    (
        "train",
        {"microbatch_size": 0},
        "microbatch_size should be greater than or equal to 1, found 0",
    ),
    ("train", {"microbatch_size": "4"}, 'microbatch_size should be a valid integer, found "4"'),
    ("train", {"microbatch_size": None}, '"microbatch_size" is missing'),
    ("train", {"min_train_tokens": 0}, "min_train_tokens is 0"),
    ("train", {"validation_batches": None}, "validation_interval goes together with"),
    (
        "train",
        {
            "validation_interval": None,
            "validation_batches": None,
            "checkpoint_interval": 5,
            "validate_at_start": True,
        },
        "validate_at_start needs a validation",
    ),
    ("train", {"validation_interval": None, "validation_batches": None}, "checkpoint_interval"),
    ("train", {"validation_sequences": 4}, "validation_batches and validation_sequences exclude"),
    (
        "train",
        {
            "sample_prompts": ["a"],
            "validation_interval": None,
            "validation_batches": None,
            "checkpoint_interval": 5,
        },
        "continued at each validation, but there is none",
    ),
    ("train", {"sample_prompts": "def "}, "sample_prompts should be"),
    ("train", {"global_batch_size": 8}, "gradient_accumulation_steps follows from global_batch"),
    ("train", {"optimizer": "sgd"}, "optimizer should be 'adamw' or 'muon', found"),
    ("train", {"schedule": "constant", "schedule_learning_rate": True}, 'schedule is "constant"'),
    ("train", {"warmup_period_percent": 50, "decay_period_percent": 51}, "more than 100"),
    ("train", {"precision": "int8"}, "precision should be 'fp32', 'tf32', 'bf16' or 'fp16'"),
    ("train", {"precision": "bf16", "use_amp": False}, "use_amp is false but precision"),
    ("train", {"deterministic": True, "attention": "cudnn"}, 'attention "cudnn" is not determ'),
    *(
        ("train", {"dataset": name}, "dataset should be a plain name, or owner/name, found")
        for name in ("../secrets", "/etc", "a/b/c", "tiny\n", "", "a\x1b[31m", "x" * 300, "..")
    ),
    ("model", {"emb_dim": 15}, "emb_dim 15 is not divisible by n_heads 2"),
    ("model", {"init": "../x"}, "init should be 'gpt2', "),
    ("model", {"moe": {}}, 'unknown key "moe"'),
]


def refused(run_dir, file, **changes):
    """Check that a changed config is refused in one line; return what follows the file's name."""
    path = run_dir / f"{file}.json"
    before = path.read_text()
    values = json.loads(before) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(UserError) as caught:
        load_run(run_dir.parent, run_dir.name)
    path.write_text(before)
    line = caught.value.line()
    assert line.isprintable() and str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def test_wrong_values_are_refused_in_one_line(workplace):
    run_dir = workplace.add_run()
    for file, changes, message in WRONG:
        assert message in refused(run_dir, file, **changes), changes


def test_no_topic_of_train_json_replaces_a_rule_or_a_method_of_another():
    """They are bases of one class: of two rules with one name, only one would be checked."""
    topics = [topic for topic in TrainConfig.__mro__ if topic.__module__.startswith("settings.")]
    names = [
        name
        for topic in topics
        for name, value in vars(topic).items()
        if isinstance(value, FunctionType | property) and not name.startswith("__")
    ]
    keys = [key for topic in topics for key in topic.__annotations__]
    assert len(topics) == 10 and sorted(keys) == sorted(TrainConfig.model_fields)
    assert {"_run_is_saved", "validates", "num_saves"} < set(names)
    assert len(set(names)) == len(names)


def test_numbers_beyond_their_limits_are_refused(workplace):
    """What has no upper limit does not decide how much memory or time is used."""
    run_dir, unlimited = workplace.add_run(), set()
    for file, config in (("model", ModelConfig), ("train", TrainConfig)):
        for key, facts in config.model_json_schema()["properties"].items():
            number = next(
                (
                    part
                    for part in facts.get("anyOf", [facts])
                    if part.get("type") in ("integer", "number")
                ),
                None,
            )
            if number is None:
                continue
            low = number.get("exclusiveMinimum", number.get("minimum", -1) - 1)
            high = number.get("exclusiveMaximum", number.get("maximum", 2**99) + 1)
            if high > 2**70:
                unlimited.add(key)
                high = "x"
            for value in (low, high, True, "1", [1], {}):
                assert refused(run_dir, file, **{key: value}).startswith(f"{key} "), (key, value)
    assert unlimited == {
        "epsilon",
        "clipping_max_norm",
        "learning_rate",
        *(f"{group}_learning_rate" for group in GROUPS),
    }


@pytest.mark.parametrize("name", ["../tiny", "/etc", ".", "", "a/b", "tiny\n", "x" * 200])
def test_run_names_stay_inside_the_runs_directory(workplace, name):
    workplace.add_run()
    with pytest.raises(UserError, match="is not a plain name.*letters.*at most 128") as found:
        load_run(workplace.runs_dir, name)
    assert ("no such directory" in str(found.value)) == (name not in ("/etc", "."))


def test_the_originals_name_of_a_key_is_known(workplace):
    run = load(workplace, train={"microbatch_size": None, "minibatch_size": 4})
    assert run.config.microbatch_size == 4


@pytest.mark.parametrize(
    ("model", "train", "warning"),
    [
        ({}, {}, None),
        ({}, {"momentum": 0.9}, "train.json: momentum has no effect: it is a key of .* muon; drop"),
        ({}, {"momentum": 0.9, "optimizer": "muon"}, None),
        ({}, {"optimizer": "muon", "decay_period_percent": 20}, None),  # its schedule is linear
        ({}, {"decay_period_percent": 20}, "decay_period_percent has no effect: schedule is const"),
        ({}, {"final_learning_rate_fraction": 0.1}, "final_learning_rate_fraction has no effect"),
        ({}, {"schedule_learning_rate": True, "decay_period_percent": 20}, None),
        ({}, {"head_learning_rate": 0.1}, None),
        ({"tie_weights": True}, {"head_learning_rate": 0.1}, "tied weights have embedding_l"),
        ({}, {"weight_decay": 0, "decay_norms_and_biases": True}, "weight_decay is 0; drop it"),
        ({}, {"weight_decay": 0, "decay_norms_and_biases": False}, None),
        (
            {},
            {"weight_decay": 0.1, "decay_norms_and_biases": True, "optimizer": "muon"},
            "muon decays the matrices alone; drop it",
        ),
        ({"init": "torch"}, {"init_from": "x"}, "model.json: init has no effect: init_from is set"),
        ({"init": "torch"}, {}, None),
        ({"tie_weights": True, "init": "torch"}, {}, r'ln 257 = 5.5; set init "gpt2"$'),
        ({"tie_weights": True, "init": "gpt2"}, {}, None),
        (
            {},
            {"microbatch_size": None, "minibatch_size": 4},
            "minibatch_size is the old name",
        ),
        (
            {"n_layers": 2},
            {"grow": {"at": 0.5}, "reference": "demo", "stop_if_behind": {"loss": 0.1}},
            "may end the run before it grows: .* unless that grew too, drop stop_if_behind",
        ),
        ({"n_layers": 2}, {"grow": {"at": 0.5}, "reference": "demo"}, None),
    ],
)
def test_settings_that_were_hardly_meant_are_warned_of(workplace, model, train, warning):
    found = setting_warnings(load(workplace, model=model, train=train))
    assert len(found) == (warning is not None)
    assert not found or re.search(warning, found[0]), found


def test_a_prefetch_a_launch_and_a_plan_print_the_warnings_once(workplace):
    workplace.add_run(train={"momentum": 0.9})
    workplace.add_dataset()
    warning = "train.json: momentum has no effect: it is a key of optimizer muon; drop it"
    found = run_in_process(*workplace.arguments("tiny", "--prefetch"))
    assert found.stdout.count(warning) == 1
    launched = succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "2", "--max-steps", "1"))
    assert (launched.stdout + launched.stderr).count(warning) == 1  # of parent and two ranks
    planned = run_lab("plan", "tiny", "--json", "--runs-dir", str(workplace.runs_dir))
    assert planned.stderr.count(warning) == 1 and json.loads(planned.stdout)


def test_a_limit_in_dollars_needs_a_price_of_which_the_command_lines_counts(workplace):
    run = load(workplace, train={"max_cost_usd": 3.0})
    with pytest.raises(UserError, match="max_cost_usd needs the machine's price; set usd_per_hour"):
        run.priced(None)
    assert run.priced(1.0).priced(None).config.usd_per_hour == 1.0
    assert run.priced(1.0).priced(7.5).config.usd_per_hour == 7.5


def test_the_defaults_with_muon_are_those_of_the_recipe(workplace):
    """At the width of GPT-2 small, those of runs/gpt2-small-muon."""
    recipe = load_run(PROJECT_DIR / "runs", "gpt2-small-muon")
    model = recipe.model.model_dump(exclude={"init"})
    keys = {"optimizer": "muon", "learning_rate": None}
    workplace.add_run("muon", model=model, train=keys)
    run = load_run(workplace.runs_dir, "muon")
    for key in (
        "learning_rate",
        "matrix_learning_rate",
        "embedding_learning_rate",
        "vector_learning_rate",
    ):
        assert getattr(run.config, key) == pytest.approx(getattr(recipe.config, key), rel=0.03)
    for key in ("weight_decay", "beta1", "beta2", "schedule", "momentum"):
        assert getattr(run.config, key) == getattr(recipe.config, key)
    assert run.model.init == recipe.model.init == "zero_projections"
    assert not {"embedding_learning_rate", "schedule"} & run.config.model_fields_set


@pytest.mark.parametrize(
    ("model", "train", "wanted"),
    [
        (
            {"init": "gpt2"},
            {"weight_decay": 0.1, "beta2": 0.9},
            {"init": "gpt2", "weight_decay": 0.1, "beta2": 0.9},
        ),
        ({}, {"init_from": "other"}, {"init": "gpt2"}),
        ({}, {"optimizer": "adamw"}, {"weight_decay": 0.1, "schedule": None, "init": "gpt2"}),
        ({}, {"schedule": "wsd"}, {"schedule": "wsd"}),
        ({}, {"schedule_learning_rate": True}, {"schedule": None}),
        (
            {},
            {"matrix_learning_rate": None, "schedule": None},
            {"matrix_learning_rate": 0.02, "schedule": "linear"},
        ),
        (
            {},
            {"learning_rate": 0.01},
            {"learning_rate": 0.01, "embedding_learning_rate": None, "matrix_learning_rate": 0.02},
        ),
    ],
)
def test_what_is_set_beside_muon_stays(model, train, wanted):
    given = {key: value for key, value in TINY_TRAIN.items() if key != "learning_rate"}
    found = with_defaults(
        ModelConfig(**TINY_MODEL | model), TrainConfig(**given | {"optimizer": "muon"} | train)
    )
    values = found[0].model_dump() | found[1].model_dump()
    assert {key: values[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("key", "means"),
    [
        ("max_steps", "min_train_tokens is the length of a run, and --max-steps ends one launch"),
        (
            "batch_size",
            "microbatch_size is of one forward pass of a process, global_batch_size of a",
        ),
    ],
)
def test_other_trainers_names_of_a_key_name_ours(workplace, key, means):
    with pytest.raises(UserError, match=f'unknown key "{key}"; {means}'):
        load(workplace, train={key: 5})


def test_a_run_of_the_project_is_read_where_it_is_and_copied_to_be_trained(tmp_path):
    """As from an installed package, in an empty folder."""
    runs_dir = tmp_path / "runs"
    run = load_run(runs_dir, "demo")
    assert run.run_dir == runs_dir / "demo" and not runs_dir.exists()
    make_run_dir(run)
    assert load_run(runs_dir, "demo") == run
    settings = read_json_object(run.train_path) | {"learning_rate": 0.5}
    run.train_path.write_text(json.dumps(settings))
    make_run_dir(run)  # it stays as it is
    assert load_run(runs_dir, "demo").config.learning_rate == 0.5
    assert sorted(path.name for path in runs_dir.rglob("*")) == ["demo", "model.json", "train.json"]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory that is not the clone, whose run `demo` has a checkpoint."""
    clone, here = tmp_path / "clone", tmp_path / "here"
    shutil.copytree(run_config.SHIPPED_RUNS / "demo", clone / "runs/demo")
    (clone / "runs/demo/checkpoints/20260101Z000000-iteration-4").mkdir(parents=True)
    monkeypatch.setattr(run_config, "SHIPPED_RUNS", clone / "runs")
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def test_a_run_that_was_trained_in_the_clone_does_not_start_over_elsewhere(
    elsewhere, monkeypatch, capsys
):
    clone = elsewhere.with_name("clone")
    message = (
        f"demo: its checkpoints are in {clone}/runs/demo, and there is no runs/ here: cd {clone},"
        " or mkdir runs to start it over"
    )
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", "demo"])
    monkeypatch.setattr(gc, "disable", lambda: None)
    with pytest.raises(SystemExit) as ended:
        check_before_torch()
    assert ended.value.code == 2 and not list(elsewhere.iterdir())
    assert capsys.readouterr().err.startswith("Error: demo: its checkpoints are in ")
    for command in ("plan", "doctor", "generate", "evaluate", "publish"):
        with pytest.raises(UserError, match=re.escape(message)):
            cli([command, "demo"], standalone_mode=False)
    assert not list(elsewhere.iterdir())


def test_a_run_is_copied_with_a_line_that_names_both_places(elsewhere, capsys):
    source = elsewhere.with_name("clone") / "runs/demo"
    copied = f"demo: copied from {source} to"
    make_run_dir(load_run(elsewhere / "named", "demo"))  # as somebody wants it
    assert (
        f"warning: {copied} {elsewhere}/named/demo, without its checkpoints"
        in capsys.readouterr().err
    )
    (elsewhere / "runs").mkdir()
    make_run_dir(load_run(Path("runs"), "demo"))
    assert (
        f"warning: {copied} {elsewhere}/runs/demo, without its checkpoints"
        in capsys.readouterr().err
    )
    shutil.rmtree(source / "checkpoints")
    shutil.rmtree(elsewhere / "runs")
    make_run_dir(load_run(Path("runs"), "demo"))
    assert f"{copied} {elsewhere}/runs/demo\n" == capsys.readouterr().out
    make_run_dir(load_run(Path("runs"), "demo"))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("words", [["list"], ["compare"], ["watch"]])
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_lab_says_where_it_looked_for_runs(elsewhere, monkeypatch, words, is_trained):
    runs_dir = elsewhere.with_name("clone") / "runs"
    monkeypatch.setattr("lab.runs.SHIPPED_RUNS", runs_dir)
    if is_trained:
        (runs_dir / "demo/summary.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        cli(words, standalone_mode=False)
    message = str(caught.value)
    assert message.startswith(f"{elsewhere}/runs: no such directory; ")
    assert message.endswith(f"--runs-dir {runs_dir}") == is_trained
    assert ("uv run ddp_train.py demo" in message) != is_trained
