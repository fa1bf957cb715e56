"""`lab plan RUN --budget USD --save`: the length that a budget buys, at a measured speed."""

import json

import pytest

from basics.gpu_readings import GpuReading
from lab.plan import length
from processes.run_lock import release_run
from reporting.speed import flops_per_token
from run_config import load_run
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.workplace import TINY_TRAIN

STEP = 2 * 2 * 2 * 16  # tokens of a step on two processes
LAUNCH = {"steps": 49, "tokens": 49 * STEP, "seconds": 4.9}  # 10 steps a second


@pytest.fixture(autouse=True)
def released(monkeypatch):
    monkeypatch.setattr(length, "read_gpus", list)
    yield
    release_run()


def add_run(workplace, *, file="microbatch-search.json", train=None, **changes):
    """Write a run with a file of a speed: 10 steps a second on two processes."""
    run_dir = workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    record = {"tokens_per_second": 10.0 * STEP, "machine": {"device": "A100", "processes": 2},
              "model": run.model.model_dump(), "train": run.train.model_dump()} | changes
    (run_dir / file).write_text(json.dumps(record))
    return run_dir


def save(workplace, *arguments):
    return run_lab("plan", "tiny", "--runs-dir", str(workplace.runs_dir), "--save", *arguments)


@pytest.mark.parametrize("speed", [
    {}, {"file": "summary.json", "tokens_per_second": 1.0, "this_launch": LAUNCH}])
def test_the_length_is_what_the_budget_buys_at_the_measured_speed(workplace, speed):
    """Each 5 steps a validation of 6 sequences takes a third of the work of 6 on one process."""
    run_dir = add_run(workplace, **speed)
    result = succeeded(save(workplace, "--budget", "10", "--usd-per-hour", "3600"))  # 10 seconds
    tokens = json.loads((run_dir / "train.json").read_text())["min_train_tokens"]
    steps, rest = divmod(tokens, STEP)
    assert rest == 0
    model = load_run(workplace.runs_dir, "tiny").model
    work = 10 * STEP / 2 * flops_per_token(model)  # FLOPs of a process in a second

    def seconds(steps):
        return steps / 10 + -(-steps // 5) * 6 * 16 * flops_per_token(model) / 3 / work

    assert seconds(steps) <= 10 < seconds(steps + 1)
    file = speed.get("file", "microbatch-search.json")
    assert result.output == (
        f"saved in {run_dir / 'train.json'}: min_train_tokens {tokens} ({steps} steps)\n"
        f"<0.01 hours, US${seconds(steps):.2f} at 3600 an hour: training and validation, without"
        f" start-up and checkpoints\nmeasured: 1,280 tokens/s on 2x A100 ({file})\n")


def test_all_other_text_of_the_file_stays(workplace):
    rest = ' "microbatch_size": 2, "gradient_accumulation_steps": 2, "checkpoint_interval": 5,' \
        ' "precision": "fp32", "usd_per_hour": 3600.0}'
    run_dir = add_run(workplace)
    for before, after in (
            ('{ "dataset" : "tiny",\n\n  "min_train_tokens" :1536 ,',
             '{ "dataset" : "tiny",\n\n  "min_train_tokens" :12800 ,'),
            ('{\n\t"dataset": "tiny",', '{\n\t"min_train_tokens": 12800,\n\t"dataset": "tiny",')):
        (run_dir / "train.json").write_text(before + rest)
        succeeded(save(workplace, "--budget", "10.01"))
        assert (run_dir / "train.json").read_text() == after + rest
        release_run()


NOT_MEASURED = ("no speed was measured with its settings on this machine; run ddp_train.py tiny"
                " --find-max-microbatch --save")


@pytest.mark.parametrize("changes", [
    {"file": "elsewhere.json"}, {"train": None}, {"model": {}}, {"machine": "A100"},
    {"tokens_per_second": None}, {"tokens_per_second": 1e300},
    {"machine": {"device": "A100", "processes": 10**400}}, {"machine": {"processes": 2}},
    {"file": "summary.json", "this_launch": LAUNCH | {"steps": 48}},
    {"file": "summary.json", "this_launch": LAUNCH | {"seconds": 0}},
    *({"train": TINY_TRAIN | change} for change in (
        {"microbatch_size": 4}, {"optimizer": "muon"}, {"compile": True}, {"precision": None})),
], ids=str)
def test_without_a_speed_of_such_a_run_nothing_is_written(workplace, changes):
    recorded = changes.pop("train", TINY_TRAIN)
    run_dir = add_run(workplace, **changes)
    for path in run_dir.glob("*[hy].json"):
        values = json.loads(path.read_text())
        trained = recorded and values["train"] | recorded
        path.write_text(json.dumps(values | {"train": trained}))
    before = workplace.files()
    assert NOT_MEASURED in error_line(save(workplace, "--budget", "10", "--usd-per-hour", "3600"))
    assert workplace.files() == before


@pytest.mark.parametrize(("gpus", "is_here"), [(["A100", "A100"], True), (["H100"], False),
                                               (["A100"], False), ([None], True)])
def test_a_speed_of_other_gpus_than_this_machine_has_is_not_used(workplace, monkeypatch, gpus,
                                                                 is_here):
    add_run(workplace)
    monkeypatch.setattr(length, "read_gpus", lambda: [GpuReading(name=name) for name in gpus])
    result = save(workplace, "--budget", "10", "--usd-per-hour", "3600")
    assert is_here or NOT_MEASURED in error_line(result)
    assert (result.exit_code == 0) == is_here


def test_a_run_that_has_begun_keeps_its_length(workplace):
    run_dir = add_run(workplace, train={"min_train_tokens": 100 * STEP - 5, "usd_per_hour": 3600.0,
                                        "validation_interval": None, "validation_batches": None,
                                        "checkpoint_interval": 5})
    checkpoint = run_dir / "checkpoints/20261123Z120000-iteration-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    before = workplace.files()
    assert ("has checkpoints, so its length cannot become 200 steps; to start over with that, move"
            " checkpoints/ away") in error_line(save(workplace, "--budget", "20.01"))
    assert workplace.files() == before
    release_run()
    assert "12800 (100 steps)" in succeeded(save(workplace, "--budget", "10.01")).output


OPTIONS = "--save needs --budget, --usd-per-hour needs --save; neither goes with --machine, "


@pytest.mark.parametrize(("arguments", "message"), [
    (["--budget", "9"], "--save needs the machine's price; set usd_per_hour, or pass"),
    (["--budget", "0.0001", "--usd-per-hour", "36"], "buys no step, which costs US$0.0"),
    ([], OPTIONS), (["--budget", "9", "--json"], OPTIONS),
    (["--budget", "9", "--machine", "a=1xH100@2"], OPTIONS),
])
def test_what_cannot_be_saved_is_one_line(workplace, arguments, message):
    add_run(workplace)
    before = workplace.files()
    assert message in error_line(save(workplace, *arguments))
    assert workplace.files() == before
