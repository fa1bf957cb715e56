from __future__ import annotations

from pathlib import Path

import pytest

from basics.errors import UserError
from run_config import (
    AS_ORIGINAL,
    ModelConfig,
    Run,
    TrainConfig,
    load_run,
    with_defaults,
)
from tests.support.workplace import PROJECT_DIR, TINY_MODEL, TINY_TRAIN, Workplace


def load(workplace: Workplace, **changes: dict) -> Run:
    workplace.add_run(**changes)
    return load_run(workplace.runs_dir, "tiny")


@pytest.mark.parametrize("path", sorted((PROJECT_DIR / "runs").glob("*/train.json")))
def test_runs_that_ship_are_valid(path: Path) -> None:
    run = load_run(PROJECT_DIR / "runs", path.parent.name)
    assert run.model.vocab_size in (257, 50257)
    assert not run.warnings


def test_the_originals_runs_have_its_settings() -> None:
    table = {"original": (6, 5922, 3200), "8xa100m40": (13, 617, 300), "8xa100m80": (28, 617, 300),
             "8xh100m80": (27, 617, 300), "8xb200m160": (64, 617, 300)}
    for name, settings in table.items():
        run = load_run(PROJECT_DIR / "runs", name)
        train = run.train
        assert (train.microbatch_size, train.validation_interval, train.validation_batches) \
            == settings
        assert train.min_train_tokens == 3_260_190_720 and train.learning_rate == 4e-4
        assert train.weight_decay == 0.1 and train.decay_norms_and_biases
        assert run.model.init == "torch" and run.model.drop_rate == 0.1
        assert (run.model.emb_dim, run.model.n_layers, run.model.n_heads) == (768, 12, 12)


@pytest.mark.parametrize(("file", "changes", "message"), [
    ("train", {"microbatch_sise": 3}, 'unknown key "microbatch_sise"; the nearest known one is'
     ' "microbatch_size"'),
    ("train", {"microbatch_size": 0}, "microbatch_size should be greater than or equal to 1, "
     "found 0"),
    ("train", {"microbatch_size": "4"}, 'microbatch_size should be a valid integer, found "4"'),
    ("train", {"microbatch_size": None}, '"microbatch_size" is missing'),
    ("train", {"min_train_tokens": 0}, "min_train_tokens is 0"),
    ("train", {"validation_batches": None}, "validation_interval goes together with"),
    ("train", {"validation_interval": None, "validation_batches": None}, "checkpoint_interval"),
    ("train", {"validation_sequences": 4}, "validation_batches and validation_sequences exclude"),
    ("train", {"global_batch_size": 8}, "gradient_accumulation_steps follows from global_batch"),
    ("train", {"optimizer": "sgd"}, "optimizer should be 'adamw' or 'muon', found"),
    ("train", {"schedule": "constant", "schedule_learning_rate": True}, "schedule is \"constant\""),
    ("train", {"schedule": "linear", "schedule_learning_rate": True}, "which means cosine"),
    ("train", {"warmup_period_percent": 50, "decay_period_percent": 51}, "more than 100"),
    ("train", {"vector_weight_decay": 0.1}, "has gone: remove it; weight_decay is that of all"),
    ("train", {"head_beta2": 0.9}, "has gone: remove it; beta2 is that of all groups"),
    ("train", {"weight_average": 0}, "has gone: remove it; averaged weights were not better"),
    ("train", {"cautious_weight_decay": True}, "has gone: remove it; it was never measured here"),
    ("train", {"head_beta1": 0.8}, "has gone: remove it; beta1 is that of all groups"),
    ("train", {"fit_budget": True}, "has gone: remove it; lab plan RUN --budget USD --save sets"),
    ("train", {"usd_per_hour": 0}, "usd_per_hour should be greater than 0"),
    ("train", {"usd_per_hour": 1e308}, "usd_per_hour should be less than or equal to 1000000"),
    ("train", {"weight_decay": 1e308}, "weight_decay should be less than or equal to 1000, found"),
    ("train", {"precision": "int8"}, "precision should be 'fp32', 'tf32', 'bf16' or 'fp16'"),
    ("train", {"precision": "bf16", "use_amp": False}, "use_amp is false but precision"),
    ("train", {"dataset": "../secrets"}, "dataset should be a plain name, or owner/name, found"),
    ("train", {"deterministic": True, "attention": "cudnn"}, 'attention "cudnn" is not determ'),
    ("train", {"cross_entropy": "fused"}, 'the key "cross_entropy" has gone: remove it;'),
    ("train", {"compile_mode": "default"}, 'the key "compile_mode" has gone: remove it; PyTorch'),
    ("model", {"emb_dim": 15}, "emb_dim 15 is not divisible by n_heads 2"),
    ("model", {"drop_rate": 1.5}, "drop_rate should be less than 1"),
    ("model", {"moe": {}}, 'unknown key "moe"'),
])
def test_wrong_values_are_refused_in_one_line(
    workplace: Workplace, file: str, changes: dict, message: str
) -> None:
    run_dir = workplace.add_run(**{file: changes})
    with pytest.raises(UserError) as caught:
        load_run(workplace.runs_dir, "tiny")
    assert str(caught.value).startswith(f"{run_dir / file}.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid JSON"),
    ("[1]", "holds a list; wanted a JSON object"),
    ('{"microbatch_size": NaN}', "NaN is not a JSON number"),
    ('{"dataset": "a", "dataset": "b"}', 'key "dataset" is there twice'),
])
def test_files_that_are_not_a_json_object_are_refused(
    workplace: Workplace, text: str, message: str
) -> None:
    (workplace.add_run() / "train.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(workplace.runs_dir, "tiny")


@pytest.mark.parametrize("name", ["../tiny", "/etc", ".", "", "a/b", "tiny\n", "x" * 200])
def test_run_names_stay_inside_the_runs_directory(workplace: Workplace, name: str) -> None:
    workplace.add_run()
    with pytest.raises(UserError, match="is not a plain name.*letters.*at most 128") as found:
        load_run(workplace.runs_dir, name)
    assert ("no such directory" in str(found.value)) == (name not in ("/etc", "."))


def test_the_error_for_a_missing_run_lists_the_existing_ones(workplace: Workplace) -> None:
    workplace.add_run()
    with pytest.raises(UserError, match="no such run; .* has: tiny"):
        load_run(workplace.runs_dir, "tinny")


def test_a_renamed_key_works_with_one_warning(workplace: Workplace) -> None:
    run = load(workplace, train={"microbatch_size": None, "minibatch_size": 4})
    assert run.train.microbatch_size == 4
    assert [("minibatch_size is now called microbatch_size" in w) for w in run.warnings] == [True]


@pytest.mark.parametrize(("changes", "said"), [
    ({}, 'set "decay_norms_and_biases": true, "precision": "fp16", "residual_dtype": "fp32"'),
    ({"use_amp": False}, 'set "decay_norms_and_biases": true; in model'),
    ({"precision": "bf16"}, None), ({"decay_norms_and_biases": False}, None),
])
def test_a_run_of_the_original_is_told_what_other_defaults_apply(
    workplace: Workplace, changes: dict, said: str | None
) -> None:
    keys = {"precision": None, "minibatch_size": 4, "microbatch_size": None} | changes
    warnings = [line for line in load(workplace, train=keys).warnings if "of the original" in line]
    assert bool(warnings) == (said is not None)
    if said:
        assert said in warnings[0] and warnings[0].endswith('; in model.json "init": "torch"')


def test_the_shipped_runs_of_the_original_train_as_there() -> None:
    for path in sorted((PROJECT_DIR / "runs").glob("[8o][xr]*")):
        run = load_run(path.parent, path.name)
        assert run.warnings == () and run.model.init == "torch"
        found = run.train.model_dump()
        assert {key: found[key] for key in AS_ORIGINAL} == AS_ORIGINAL


def test_tied_weights_with_torch_init_cause_a_warning(workplace: Workplace) -> None:
    run = load(workplace, model={"tie_weights": True, "init": "torch"})
    assert len(run.warnings) == 1 and "480" in run.warnings[0]


def test_the_price_on_the_command_line_overrides_the_runs(workplace: Workplace) -> None:
    run = load(workplace, train={"usd_per_hour": 5.0, "max_cost_usd": 3.0})
    assert run.priced(None).train.usd_per_hour == 5.0
    assert run.priced(7.5).train.usd_per_hour == 7.5


def test_a_limit_in_dollars_needs_a_price(workplace: Workplace) -> None:
    run = load(workplace, train={"max_cost_usd": 3.0})
    with pytest.raises(UserError, match="max_cost_usd needs the machine's price; set usd_per_hour"):
        run.priced(None)
    assert run.priced(1.0).train.max_cost_usd == 3.0


@pytest.mark.parametrize(("train", "sequences"), [
    ({}, 6),
    ({"validation_batches": None, "validation_sequences": 5}, 5),
    ({"validation_batches": None, "validation_interval": None, "checkpoint_interval": 1}, 0),
])
def test_validation_is_counted_in_sequences(
    workplace: Workplace, train: dict, sequences: int
) -> None:
    assert load(workplace, train=train).train.num_validation_sequences == sequences


def test_the_defaults_with_muon_are_those_of_the_recipe(workplace: Workplace) -> None:
    """At the width of GPT-2 small, those of runs/gpt2-small-muon."""
    recipe = load_run(PROJECT_DIR / "runs", "gpt2-small-muon")
    model = recipe.model.model_dump(exclude={"init"})
    keys = {"optimizer": "muon", "learning_rate": None}
    workplace.add_run("muon", model=model, train=keys)
    run = load_run(workplace.runs_dir, "muon")
    for key in ("learning_rate", "matrix_learning_rate", "embedding_learning_rate",
                "vector_learning_rate"):
        assert getattr(run.train, key) == pytest.approx(getattr(recipe.train, key), rel=0.03)
    for key in ("weight_decay", "beta1", "beta2", "schedule", "momentum"):
        assert getattr(run.train, key) == getattr(recipe.train, key)
    assert run.model.init == recipe.model.init == "zero_projections"
    assert not {"embedding_learning_rate", "schedule"} & run.train.model_fields_set


@pytest.mark.parametrize(("model", "train", "wanted"), [
    ({"init": "gpt2"}, {"weight_decay": 0.1, "beta2": 0.9}, {
        "init": "gpt2", "weight_decay": 0.1, "beta2": 0.9}),
    ({}, {"init_from": "other"}, {"init": "gpt2"}),
    ({}, {"schedule": "wsd"}, {"schedule": "wsd"}),
    ({}, {"schedule_learning_rate": True}, {"schedule": None}),
    ({}, {"matrix_learning_rate": None, "schedule": None}, {
        "matrix_learning_rate": 0.02, "schedule": "linear"}),
    ({}, {"learning_rate": 0.01}, {"learning_rate": 0.01, "embedding_learning_rate": None,
                                   "matrix_learning_rate": 0.02}),
])
def test_what_is_set_beside_muon_stays(model: dict, train: dict, wanted: dict[str, object]) -> None:
    given = {key: value for key, value in TINY_TRAIN.items() if key != "learning_rate"}
    found = with_defaults(ModelConfig(**TINY_MODEL | model),
                          TrainConfig(**given | train | {"optimizer": "muon"}))
    values = found[0].model_dump() | found[1].model_dump()
    assert {key: values[key] for key in wanted} == wanted


def test_adamw_keeps_the_originals_defaults() -> None:
    model, train = ModelConfig(**TINY_MODEL), TrainConfig(**TINY_TRAIN)
    assert with_defaults(model, train) == (model, train)
