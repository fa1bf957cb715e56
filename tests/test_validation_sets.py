"""Several validation sets in a run: what they may be, their records, and what shows them."""

import json
import math

import numpy as np
import pytest
from safetensors.torch import load_file

from basics.errors import UserError
from basics.json_files import to_json
from checkpointing import Checkpoint, CheckpointMeta
from lab.compare.compare import find_results, table_of
from lab.compare.rows import compare
from lab.plan.estimate import flops_of
from preparation.ensure_dataset import provide_datasets
from reporting.clock import PhaseClock
from reporting.estimate import Pace
from reporting.metrics_file import metrics_of, read_metrics, valid_records
from reporting.run_log import Report, RunLog, SetResult
from run_config import load_run
from tests.support.runs import metrics_of as records_of
from tests.support.runs import validations_of
from tests.support.workplace import Workplace, succeeded, write_tokens
from tokens.batch_plan import BatchPlan
from tokens.batches import open_run_data
from trainer.resuming import check_same_run

TWO = {"own": "tiny", "other": "places/other.safetensors"}


def add_set(workplace, *, place="places/other.safetensors", num_tokens=400, **metadata):
    """Write a token file that no model of the tiny dataset has learnt."""
    tokens = np.random.default_rng(1).integers(0, 250, size=num_tokens).astype(np.uint16)
    write_tokens(workplace.datasets_dir / place, tokens, metadata or None)


def opened(workplace, run):
    return open_run_data(
        run,
        workplace.datasets_dir / run.config.dataset,
        world_size=1,
        validation_paths=run.config.validation_paths(workplace.datasets_dir),
    )


def new_run(workplace, validation, *, name="tiny", **train):
    workplace.add_run(name, train={"validation": validation} | train)
    return load_run(workplace.runs_dir, name)


# What a set may be


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({}, "validation has 0 sets; wanted 1 to 16"),
        ({f"set-{number}": "tiny" for number in range(17)}, "validation has 17 sets; wanted"),
        ({"a b": "tiny"}, "validation has a set called 'a b'; wanted at most 32 letters"),
        ({"a/b": "tiny"}, "validation has a set called 'a/b'; wanted"),
        ({"code": "../tiny"}, "validation set code is '../tiny'; wanted a dataset's name, or a"),
        ({"code": "tokens.bin"}, None),  # a name that a dataset may have
        ({"code": 3}, "validation.code should be a valid string, found 3"),
        (["tiny"], "validation should be a valid dictionary"),
    ],
)
def test_sets_are_named_files_or_datasets(workplace, validation, message):
    if message is None:
        assert new_run(workplace, validation).config.validation == validation
        return
    with pytest.raises(UserError) as caught:
        new_run(workplace, validation)
    assert message in caught.value.line() and caught.value.line().isprintable()


def test_sets_need_a_validation(workplace):
    with pytest.raises(UserError, match="set validation_interval too, or drop it"):
        new_run(
            workplace,
            TWO,
            validation_interval=None,
            validation_batches=None,
            checkpoint_interval=5,
        )


@pytest.mark.parametrize(
    ("validation", "metadata", "message"),
    [
        ({"own": "tiny", "far": "absent.safetensors"}, {}, "set far: .*absent.*: no such token f"),
        ({"own": "tiny", "far": "nowhere"}, {}, "validation set far: .*nowhere/validation.*: no s"),
        ({"own": "tiny", "same": "tiny/validation.safetensors"}, {}, "own and same are the same"),
        (TWO, {"tokenizer": "gpt2"}, "set other: .* has the tokenizer gpt2, the run bytes; prep"),
        (TWO, {"max_token_id": "300"}, "other.safetensors: states ids up to 300, outside the mod"),
    ],
)
def test_sets_that_cannot_be_used_are_one_line(workplace, validation, metadata, message):
    workplace.add_dataset()
    add_set(workplace, **metadata)
    run = new_run(workplace, validation)
    with pytest.raises(UserError, match=message) as caught:
        opened(workplace, run)
    assert caught.value.status == 2 and caught.value.line().isprintable()


def test_the_dataset_needs_no_validation_file_of_its_own(workplace):
    workplace.add_dataset()
    add_set(workplace, place="other.safetensors")
    run = new_run(workplace, {"other": "other.safetensors"})
    (workplace.datasets_dir / "tiny/validation.safetensors").unlink()
    provide_datasets(workplace.datasets_dir, run.config)
    assert [*opened(workplace, run).validation_sets] == ["other"]
    without = new_run(workplace, None, name="without")
    with pytest.raises(UserError, match="validation.safetensors: is missing"):
        provide_datasets(workplace.datasets_dir, without.config)


def test_each_set_must_be_long_enough(workplace):
    workplace.add_dataset()
    add_set(workplace, num_tokens=96)  # of 6 sequences the last has no last target
    run = new_run(workplace, TWO)
    with pytest.raises(UserError, match=r"are 6 sequences, but .*other.safetensors has 5 from"):
        opened(workplace, run)


def test_a_set_that_states_no_tokenizer_has_that_of_the_run(workplace):
    workplace.add_dataset()
    add_set(workplace)
    data = opened(workplace, new_run(workplace, TWO))
    assert data.set_bytes_per_token == {"own": 1.0, "other": 1.0} and data.bytes_per_token == 1.0


# Resuming


def checkpoint_of(run, data):
    values = dict.fromkeys(("loss", "train_loss", "tokenizer"))
    meta = CheckpointMeta(
        global_step=4,
        tokens=5 * data.plan.tokens_per_step,
        seconds={},
        model=run.model,
        random_seed=42,
        data=data.fingerprints,
        **values,
    )
    return Checkpoint(run.checkpoints_dir / "20260101Z000000-iteration-4", meta)


def test_sets_may_come_and_go_but_not_change_under_their_name(workplace):
    workplace.add_dataset()
    add_set(workplace)
    run = new_run(workplace, None)
    without = opened(workplace, run)
    assert without.validation is not None and set(without.fingerprints) == {
        "train",
        "start_train_token",
        "validation",
        "start_val_token",
        "validation_sequences",
    }

    both = new_run(workplace, TWO, name="both")
    with_sets = opened(workplace, both)
    check_same_run(checkpoint_of(run, without), both, with_sets.fingerprints)  # one is added
    check_same_run(checkpoint_of(both, with_sets), run, without.fingerprints)  # one is left out

    swapped = new_run(workplace, dict(reversed(TWO.items())), name="swapped")
    with pytest.raises(UserError, match=r"the file of the first validation set, other, is .*; set"):
        check_same_run(
            checkpoint_of(both, with_sets), swapped, opened(workplace, swapped).fingerprints
        )
    add_set(workplace, num_tokens=300)
    with pytest.raises(UserError, match=r"the file of validation set other is 300 tokens, .*; set"):
        check_same_run(checkpoint_of(both, with_sets), both, opened(workplace, both).fingerprints)


# Records, and what reads them


def report(run, results, capsys):
    plan, clock = BatchPlan(1, 1, 1, 16, 12), PhaseClock()
    pace = Pace(run, plan, clock)
    pace.begin(run.stages(12))
    log = RunLog(
        run,
        plan,
        "bytes",
        None,
        clock=clock,
        pace=pace,
        is_active=True,
    )
    log.report_validation(Report(4, 80, results[0].loss, {}), results, 1.5)
    record = read_metrics(run.metrics_path)[-1]
    return capsys.readouterr().out, {
        key: value for key, value in record.items() if key.startswith("validation")
    }


def test_a_record_has_the_first_set_as_before_and_the_others_by_name(workplace, capsys):
    run = new_run(workplace, None)
    said, record = report(run, [SetResult("", 2.0, 2.0)], capsys)
    assert said == "step 5/12 | validation loss 2.0000 | 1.5 s\n"
    bits = 1 / math.log(2)
    assert record == {
        "validation_loss": 2.0,
        "validation_seconds": 1.5,
        "validation_bits_per_byte": bits,
    }
    results = [SetResult("own", 2.0, 2.0), SetResult("other", 3.0, 4.0), SetResult("far", 900.0)]
    said, record = report(run, results, capsys)
    assert said == (
        "step 5/12 | validation loss 2.0000 on own (perplexity 7.39, 1.4427 bits per byte),"
        " 3.0000 on other (perplexity 20.09, 1.0820 bits per byte), 900.0000 on far (perplexity"
        " inf) | 1.5 s\n"
    )
    assert record == pytest.approx(
        {
            "validation_loss": 2.0,
            "validation_seconds": 1.5,
            "validation_perplexity": math.exp(2),
            "validation_bits_per_byte": bits,
            "validation_loss/other": 3.0,
            "validation_perplexity/other": math.exp(3),
            "validation_bits_per_byte/other": 3 / math.log(2) / 4,
            "validation_loss/far": 900.0,
            "validation_perplexity/far": None,
        }
    )


def test_trackers_have_the_sets_under_their_names_and_odd_records_are_left_out():
    line = {"global_step": 4, "validation_loss": 2.0, "validation_loss/a.b": 3.0}
    odd = [{"validation_loss/a.b": "3"}, {"validation_perplexity/a.b": [1.0]}]
    records = valid_records("\n".join(to_json(line | changes) for changes in [{}, *odd]))
    assert records == [line]
    assert metrics_of(line) == {"validation/loss": 2.0, "validation/a.b/loss": 3.0}
    assert metrics_of({"global_step": 4, "validation_loss/../x": 3.0}) == {}


def test_a_plan_counts_the_time_of_all_sets(workplace):
    plan = BatchPlan(2, 2, 1, 16, 10)
    one, two = (
        flops_of(new_run(workplace, validation, name=name), plan)
        for name, validation in (("one", None), ("two", TWO))
    )
    training = plan.num_tokens * load_run(workplace.runs_dir, "one").model.flops_per_token
    assert two - training == pytest.approx(2 * (one - training)) and one > training


def test_a_budget_reserves_the_time_of_all_sets_before_the_first_validation(workplace, now):
    """Two validations lie ahead of step 11, each of 30 forward passes of 1/3 s."""

    def most_seconds(validation, name):
        run = new_run(workplace, validation, name=name, validation_batches=30)
        plan, clock = BatchPlan(2, 1, 1, 16, 1000), PhaseClock()
        pace = Pace(run, plan, clock)
        pace.begin(run.stages(plan.num_steps))
        with clock.phase("training"):
            now.seconds += 10  # for ten steps
        return pace.most_seconds(10, stop=20)

    one, two = most_seconds(None, "one"), most_seconds(TWO, "two")
    assert two - one == pytest.approx(2 * 30 / 3)


# A run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run without sets, and one that has them from its sixth step on."""
    workplace = Workplace(tmp_path_factory.mktemp("sets"))
    workplace.add_dataset()
    add_set(workplace)
    workplace.add_run("plain")
    succeeded(workplace.torchrun(2, "plain"))
    run_dir = workplace.add_run("sets", train={"validate_on": "all"})
    succeeded(workplace.torchrun(2, "sets", "--max-steps", "5"))
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"validation": TWO}))
    said = succeeded(workplace.torchrun(2, "sets")).stdout
    return workplace, said


def test_more_sets_change_neither_the_weights_nor_the_loss_that_decides(trained):
    workplace, said = trained
    plain, sets = (workplace.runs_dir / name for name in ("plain", "sets"))
    weights = [load_file(path / "checkpoints/latest/model.safetensors") for path in (plain, sets)]
    assert all((weights[0][name] == tensor).all() for name, tensor in weights[1].items())
    before, after = validations_of(plain), validations_of(sets)
    assert [one["validation_loss"] for one in after] == pytest.approx(
        [one["validation_loss"] for one in before]
    )
    assert set(before[-1]) <= set(after[0]) and set(after[0]) == set(before[0])
    own, other = after[-1]["validation_loss"], after[-1]["validation_loss/other"]
    assert other > own + 0.1
    assert after[-1]["validation_bits_per_byte/other"] == pytest.approx(other / math.log(2))
    decided = json.loads((sets / "checkpoints/latest/validation.json").read_text())["loss"]
    assert decided == own
    assert "validation was not set until step 5 and is {'own': 'tiny', 'other': 'places/" in said
    assert f"validation loss {own:.4f} on own, {other:.4f} on other (nats per token)" in said
    assert any("changed" in record for record in records_of(sets))


def test_the_loss_of_a_set_is_that_of_a_run_with_this_set_alone(trained):
    workplace, _ = trained
    run_dir = workplace.add_run("alone", train={"validation": {"other": TWO["other"]}})
    succeeded(workplace.torchrun(2, "alone"))
    found = validations_of(run_dir)[-1]
    wanted = validations_of(workplace.runs_dir / "sets")[-1]
    for metric in ("validation_loss", "validation_perplexity", "validation_bits_per_byte"):
        assert found[metric] == pytest.approx(wanted[f"{metric}/other"])


def test_a_comparison_has_columns_of_the_sets(trained):
    workplace, _ = trained
    comparison = compare(find_results(workplace.runs_dir, ("plain", "sets")))
    rows = {row.name: row.values for row in comparison.rows}
    last = validations_of(workplace.runs_dir / "sets")[-1]
    key = "validation_perplexity/other"
    assert rows["sets"][key] == last[key] and rows["plain"][key] is None
    heads = [column.whole_head for column in table_of(comparison).columns]
    assert {"other loss", "other perplexity", "other bits per byte", "val. perplexity"} <= {*heads}
    assert "val. loss: of the first validation set, own" in comparison.notes
    assert not any("measured on different tokens" in note for note in comparison.notes)
    alone = table_of(compare(find_results(workplace.runs_dir, ("plain",))))
    assert not any("perplexity" in column.head for column in alone.columns)
