"""`lab sweep`: with a stand-in for the trainer, and once with the real one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from basics.errors import print_line
from basics.files import lock_directory
from lab.compare import charts as comparison_charts
from lab.sweep import definition, execution, progress, report, shares
from processes import distributed
from run_config import load_run
from settings.weights import Grow
from tests.support import stub_trainer
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.runs import contents, summary_of, wait_for
from tests.support.workplace import PROJECT_DIR, draw_bare, read_lines, start_forked

STUB = Path(stub_trainer.__file__)
SETTINGS = {"min_train_tokens": 1000, "gradient_accumulation_steps": None, "learning_rate": 0.02}


def changing(*changes):
    """Return the options of these changes."""
    return [part for change in changes for part in ("--change", change)]


class Sweeps:
    """Runs `lab sweep` in process, with a stand-in for the trainer."""

    def __init__(self, workplace):
        self.workplace, self.dir = workplace, workplace.root / "sweeps"
        self.tiny = self.dir / "tiny"

    def command(self, *arguments):
        return [
            "sweep",
            "tiny",
            *arguments,
            "--runs-dir",
            str(self.workplace.runs_dir),
            "--sweeps-dir",
            str(self.dir),
            "--datasets-dir",
            str(self.workplace.datasets_dir),
        ]

    def run(self, *arguments):
        return run_lab(*self.command(*arguments))

    def cells(self, *arguments):
        """Run to the end; return the cells of `table.md` by the change."""
        succeeded(self.run(*arguments))
        return self.table()

    def table(self):
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in (self.tiny / "table.md").read_text().splitlines()
            if line.startswith("|")
        ]
        return {row[0]: row[1:] for row in rows[2:]}

    def launches(self):
        """Return the directories of the runs that were started, in their order."""
        path = self.tiny / "launches"
        return path.read_text().split() if path.exists() else []

    def train_json(self, run):
        return json.loads((self.tiny / run / "train.json").read_text())


@pytest.fixture
def sweeps(workplace, monkeypatch):
    workplace.add_run(train=SETTINGS)
    monkeypatch.setattr(execution, "SCRIPT", STUB)
    return Sweeps(workplace)


def test_each_variant_is_trained_with_each_seed_and_compared(sweeps, capfd):
    """With --json, standard output has the document and nothing else."""
    changes = changing("drop_rate=0,learning_rate=0.01", "drop_rate=0.5")
    result = succeeded(sweeps.run(*changes, "--seeds", "2", "--json"))
    assert not capfd.readouterr().out and "[1/6] baseline, seed 42" in result.stderr
    assert sweeps.launches() == [
        f"{name}-seed-{seed}"
        for seed in (42, 43)
        for name in ("baseline", "drop_rate-0_learning_rate-0.01", "drop_rate-0.5")
    ]
    document = checked(result.stdout)
    baseline, changed, worse = document.variants
    assert (baseline.difference, worse.against_noise) == (None, "worse")
    assert worse.changes == {"drop_rate": 0.5} and len(worse.runs) == 2
    assert changed.difference == pytest.approx(changed.loss - baseline.loss)
    low, high = changed.interval
    assert low < changed.difference < high < 0
    seeds, loss, *_, verdict, tokens, seconds, usd = sweeps.table()[
        "drop_rate=0,learning_rate=0.01"
    ]
    assert (seeds, verdict, seconds, usd) == ("2/2", "better", "100", "-")
    assert float(loss) == pytest.approx(changed.loss, abs=1e-4) and int(tokens) < 1000
    assert sweeps.table()["drop_rate=0.5"][4:6] == ["worse", "not reached"]


def test_intervals_and_verdicts_take_the_noise_of_the_variants_own_seeds():
    losses = {
        "baseline": (4.0, 4.0),
        "noisy": (3.9, 3.7),
        "quiet": (3.9, 3.899),
        "high": (4.4, 4.4),
        "short": (3.9, None),
        "other tokens": (1.0, 2.0),
    }
    variants = [{"name": name} if name != "baseline" else {} for name in losses]
    sweep = SimpleNamespace(names=list(losses), variants=variants)
    outcomes = {
        (name, seed): SimpleNamespace(
            run=SimpleNamespace(changes=changes),
            loss=loss,
            state="finished",
            result=SimpleNamespace(validation_slice=name == "other tokens", records=()),
        )
        for (name, pair), changes in zip(losses.items(), variants, strict=True)
        for seed, loss in enumerate(pair)
    }
    entries = {entry.name: entry for entry in report.entries_of(sweep, outcomes)}
    assert {name: entry.verdict for name, entry in entries.items()} == {
        "baseline": "",
        "noisy": "inside",
        "quiet": "better",
        "high": "worse",
        "short": "lower, noise unknown",
        "other tokens": "",
    }
    half = 12.706 * 0.1  # t with one degree of freedom, standard error
    assert entries["noisy"].difference.interval == pytest.approx((-0.2 - half, -0.2 + half))
    assert entries["short"].difference.interval is None


def test_runs_differ_only_in_the_change_and_the_seed(sweeps):
    succeeded(sweeps.run("--change", "weight_decay=0", "--seeds", "2"))
    base, changed, second = map(
        sweeps.train_json, ("baseline-seed-42", "weight_decay-0-seed-42", "weight_decay-0-seed-43")
    )
    own = json.loads((sweeps.workplace.runs_dir / "tiny/train.json").read_text())
    assert base == own | {"random_seed": 42, "sample_prompts": []}
    assert changed == base | {"weight_decay": 0.0}
    assert second == changed | {"random_seed": 43}
    compared = run_lab("compare", "--runs-dir", str(sweeps.tiny), "--csv")
    assert "weight_decay-0-seed-42, weight_decay-0-seed-43" in succeeded(compared).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--change", "learning_rat=1"],
            'unknown key "learning_rat"; the nearest known one is "lea',
        ),
        (["--change", "drop_rate=2"], "drop_rate should be less than 1, found 2"),
        (["--change", "n_heads=3"], "emb_dim 16 is not divisible by n_heads 3"),
        (["--change", "learning_rate=fast"], 'found "fast"'),
        (["--change", "drop_rate=0", "--change", "learning_rate=NaN"], "finite number"),
        (["--change", "drop_rate"], "wanted KEY=VALUE"),
        (["--change", "drop_rate=0,drop_rate=0.1"], "each key once"),
        (["--change", "random_seed=1"], "use --seeds N"),
        (["--change", "validation_interval=null"], "validation_interval goes together with"),
        (
            ["--change", "validation_interval=null,validation_batches=null,checkpoint_interval=5"],
            "a sweep compares validation losses",
        ),
        (["--change", "grow.at=2"], "grow.at should be less than 1, found 2"),
        (["--change", "grow.from_layers=1"], '"grow.at" is missing'),
        (["--change", "grow.at=0.5,n_layers=1"], "from_layers 1, and model.json has n_layers 1"),
        (["--change", "dataset.at=0.5"], "dataset is no object, so dataset.at is no key"),
        (["--change", "max_cost_usd=3"], "max_cost_usd needs the machine's price; set"),
        (
            ["--change", "max_hours=1", "--change", "max_cost_usd=3", "--usd-per-hour", "1"],
            "has max_hours and max_cost_usd, but losses are compared at equal hours or at equal",
        ),
        (["--change", "init_from=tiny"], "no checkpoint yet; train tiny first"),
        (["--change", "init_from=tiny@latest"], "latest: no checkpoint yet; train tiny first"),
        (["--range", "learning_rate=0.1"], "wanted KEY=VALUE,VALUE"),
        (["--range", "learning_rate=0.1,-1"], "learning_rate should be greater than 0"),
        (["--change", "vocab_size=null"], '"vocab_size" is missing'),
        ([], "no such sweep yet; name at least one --change"),
        (["--change", "drop_rate=0", "--name", "../x"], "of letters, digits, '.', '_' and '-', at"),
        (["--change", "drop_rate=0", "--budget-usd", "3"], "needs the machine's price"),
        (["--change", 'stop_if_behind={"loss":1},reference=demo'], "stop the baseline too; drop"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(sweeps, arguments, words):
    before = contents(sweeps.workplace.root)
    assert words in error_line(sweeps.run(*arguments))
    assert contents(sweeps.workplace.root) == before


def test_runs_may_start_from_the_best_weights_of_a_run(sweeps):
    best = sweeps.workplace.runs_dir / "tiny/checkpoints/best"
    best.mkdir(parents=True)
    sweeps.workplace.add_run("tuned", train=SETTINGS | {"init_from": "tiny"})
    arguments = sweeps.command(*changing("drop_rate=0", "init_from=tiny"))[2:]
    for _ in range(2):  # the second time the files that are there fit
        result = succeeded(run_lab("sweep", "tuned", *arguments))
        assert "init_from=tiny: is the baseline" in result.stdout
    for run in ("baseline-seed-42", "drop_rate-0-seed-42"):
        train = json.loads((sweeps.dir / "tuned" / run / "train.json").read_text())
        assert train["init_from"] == str(best)


def test_values_are_json_or_text_and_null_takes_a_key_out(sweeps):
    first = 'sample_prompts=["a,b","c"],init=torch,clipping_max_norm=null'
    second = "precision=null,global_batch_size=4,validate_on=all"
    succeeded(sweeps.run(*changing(first, second)))
    _, first, second = sweeps.launches()
    train = sweeps.train_json(first)
    assert train["sample_prompts"] == ["a,b", "c"] and "clipping_max_norm" not in train
    assert json.loads((sweeps.tiny / first / "model.json").read_text())["init"] == "torch"
    train = sweeps.train_json(second)
    assert train["sample_prompts"] == []  # a sweep prints no samples
    assert "precision" not in train and train["global_batch_size"] == 4


def test_a_part_of_an_object_can_be_changed(sweeps):
    grow, both = 'grow={"from_layers":1,"at":0.5}', "learning_rate=0.02,grow.at=0.7"
    succeeded(sweeps.run(*changing(grow, both), "--prune"))
    _, first, second = map(sweeps.train_json, sweeps.launches())
    assert first["grow"] == {"from_layers": 1, "at": 0.5}
    assert second["grow"] == {"at": 0.7}  # the base has none
    assert second["learning_rate"] == 0.02
    assert "stop_if_behind" not in first  # few layers are behind at first
    grows = SETTINGS | {"grow": {"from_layers": 1, "at": 0.5}}
    sweeps.workplace.add_run("grows", train=grows)
    base = load_run(sweeps.workplace.runs_dir, "grows")
    _, config = definition.changed(base, {"grow.at": 0.25})
    assert config.grow == Grow(from_layers=1, at=0.25)
    assert definition.changed(base, {"grow": None})[1].grow is None


def test_a_range_is_a_variant_for_each_value_and_charts_are_drawn_when_asked_for(
    sweeps, monkeypatch
):
    for module in (report, comparison_charts):
        monkeypatch.setattr(module, "draw_by_hand", draw_bare)
    sweeps.tiny.mkdir(parents=True)
    (sweeps.tiny / "old.png").touch()  # of an earlier command
    cells = sweeps.cells("--range", "learning_rate=0.005,0.02,0.04", "--charts")
    assert list(cells) == ["baseline", "learning_rate=0.005", "learning_rate=0.04"]
    charts = ["loss-curves.png", "differences.png"]
    assert {path.name for path in sweeps.tiny.glob("*.png")} == set(charts)
    text = (sweeps.tiny / "table.md").read_text()
    assert re.findall(r"!\[.*\]\((.*)\)", text) == charts


@pytest.mark.parametrize(
    ("limit", "value", "options", "at"),
    [
        ("max_hours", 80 / 3600, [], {"seconds": 60}),
        ("max_cost_usd", 0.8, ["--usd-per-hour", "36"], {"usd": 0.6}),
    ],
)
def test_runs_that_end_at_a_limit_are_compared_at_equal_hours_or_dollars(
    sweeps, limit, value, options, at
):
    """Steps take 25 s, or 30 s without `compile`; the limit is 80 s, or US$0.80."""
    sweeps.workplace.add_run("limited", train=SETTINGS | {limit: value})
    arguments = sweeps.command(*changing("compile=false", f"{limit}=2"), *options, "--json")
    result = succeeded(run_lab("sweep", "limited", *arguments[2:]))
    document = checked(result.stdout)
    states = [variant.runs[0].state for variant in document.variants]
    assert states == ["at its limit", "at its limit", "finished"]
    assert document.compared_at == pytest.approx(at)
    baseline, slow, longer = document.variants
    assert slow.difference == pytest.approx(0.6 - 2 / 4)  # of the loss, which falls with the steps
    assert longer.loss == pytest.approx(baseline.loss) == pytest.approx(slow.loss - 0.1)
    assert slow.against_noise == "not lower, noise unknown"
    folder = sweeps.dir / "limited"
    assert json.loads((folder / "table.json").read_text()) == json.loads(result.stdout)
    trained = (folder / "launches").read_text()
    succeeded(run_lab("sweep", "limited", *arguments[2:]))
    assert (folder / "launches").read_text() == trained  # a larger limit would be another sweep


def test_the_same_command_trains_nothing_again_and_other_changes_are_added(sweeps):
    first = sweeps.cells("--change", "drop_rate=0")
    num_launches = len(sweeps.launches())
    assert sweeps.cells("--change", "drop_rate=0.0") == sweeps.cells() == first
    assert len(sweeps.launches()) == num_launches
    cells = sweeps.cells("--change", "weight_decay=0", "--seeds", "2")
    assert list(cells) == ["baseline", "drop_rate=0", "weight_decay=0"]
    assert cells["drop_rate=0"][0] == "2/2"
    assert sweeps.launches()[num_launches:] == [
        "weight_decay-0-seed-42",
        "baseline-seed-43",
        "drop_rate-0-seed-43",
        "weight_decay-0-seed-43",
    ]
    assert sweeps.cells("--seeds", "1") == cells  # seeds are not taken back


def test_a_base_that_leaves_keys_to_muons_defaults_is_changed_and_continued(sweeps):
    shutil.rmtree(sweeps.workplace.runs_dir / "tiny")
    sweeps.workplace.add_run(train=SETTINGS | {"optimizer": "muon", "learning_rate": None})
    changes = ("weight_decay=0.1", "init=gpt2", "beta2=0.999")  # AdamW's defaults, not Muon's
    first = sweeps.cells(*changing(*changes))
    assert list(first) == ["baseline", *changes]
    assert sweeps.cells() == sweeps.cells("--change", "beta2=0.95") == first
    changed = sweeps.train_json("weight_decay-0.1-seed-42")
    assert changed["weight_decay"] == 0.1 and "beta2" not in changed


@pytest.mark.parametrize(
    ("path", "key", "message"),
    [
        ("runs/tiny/train.json", "learning_rate", "learning_rate is 0.02, but would be 0.5 now"),
        (
            "sweeps/tiny/drop_rate-0-seed-42/train.json",
            "weight_decay",
            "weight_decay is 0.5, but would be 0.1 now",
        ),
        (
            "sweeps/tiny/drop_rate-0-seed-42/model.json",
            "drop_rate",
            "drop_rate is 0.5, but would be 0.0 now",
        ),
        ("sweeps/tiny/sweep.json", "base", "sweep.json: "),
    ],
)
def test_a_changed_base_and_edited_or_damaged_files_are_refused(sweeps, path, key, message):
    changes = changing("drop_rate=0")
    succeeded(sweeps.run(*changes))
    file = sweeps.workplace.root / path
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 0.5}))
    before = contents(sweeps.workplace.root)
    assert message in error_line(sweeps.run(*changes))
    assert contents(sweeps.workplace.root) == before


def test_a_sweep_of_another_run_is_refused(sweeps):
    succeeded(sweeps.run(*changing("drop_rate=0")))
    sweeps.workplace.add_run("other", train=SETTINGS)
    result = run_lab("sweep", "other", "--name", "tiny", *sweeps.command()[2:])
    assert "is a sweep of tiny, not of other" in error_line(result)


def test_a_locked_plan_is_waited_for_and_then_refused(sweeps, monkeypatch):
    monkeypatch.setattr(definition, "LOCK_SECONDS", 0.2)
    sweeps.tiny.mkdir(parents=True)
    descriptor = lock_directory(sweeps.tiny)
    try:
        line = error_line(sweeps.run("--change", "drop_rate=0"))
    finally:
        os.close(descriptor)
    assert "tiny: locked by another process" in line and not list(sweeps.tiny.iterdir())


def test_a_run_that_another_command_trains_is_left_to_it_and_taken_over_when_it_is_free(
    sweeps, monkeypatch
):
    monkeypatch.setattr(execution, "OTHERS_SECONDS", 0.2)
    succeeded(sweeps.run("--change", "weight_decay=0"))
    definition.open_sweep(
        load_run(sweeps.workplace.runs_dir, "tiny"), sweeps.tiny, [{"drop_rate": 0.0}], 2
    )
    descriptor = execution.claim(sweeps.tiny / "drop_rate-0.0-seed-42")

    def print_and_release(line):
        print_line(line)
        if line.startswith("waiting for 1 run"):
            os.close(descriptor)

    monkeypatch.setattr(execution, "print_line", print_and_release)
    result = succeeded(sweeps.run())
    assert "waiting for 1 run that other commands train\n" in result.stdout
    assert sweeps.launches()[2:] == [  # the second seeds first
        "baseline-seed-43",
        "weight_decay-0-seed-43",
        "drop_rate-0.0-seed-43",
        "drop_rate-0.0-seed-42",
    ]
    assert sweeps.table()["drop_rate=0.0"][0] == "2/2"


def test_a_claim_ends_when_the_command_and_its_launch_have_ended(tmp_path):
    lock = execution.claim(tmp_path)
    assert execution.claim(tmp_path) is None
    process = execution.start(["sleep", "600"], shares.Share(), None, lock)
    os.close(lock)  # as if the command were killed
    assert execution.claim(tmp_path) is None
    process.kill()
    process.wait()
    os.close(execution.claim(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [execution.CLAIM]


def given(run_dir):
    return json.loads((run_dir / "given.json").read_text())


def test_runs_at_once_have_cores_and_threads_of_their_own_and_so_they_stay(sweeps, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: None)
    monkeypatch.setattr(distributed, "num_gpus", lambda: 0)
    result = succeeded(sweeps.run(*changing("weight_decay=0"), "--parallel", "2"))
    assert "[1/2] baseline, seed 42 (cores 0 to 2)\n" in result.stdout
    assert "seed 42 (cores 3 to 5)\n" in result.stdout
    for run in ("baseline-seed-42", "weight_decay-0-seed-42"):
        seen = given(sweeps.tiny / run)
        assert seen["OMP_NUM_THREADS"] == "3" and seen["options"]["--nproc-per-node"] == "1"
    succeeded(sweeps.run("--change", "drop_rate=0"))  # one after the other, with as many threads
    assert given(sweeps.tiny / "drop_rate-0-seed-42")["OMP_NUM_THREADS"] == "3"
    line = error_line(sweeps.run("--parallel", "auto", "--nproc-per-node", "2"))
    assert "each run of this sweep has 1 process, since losses are compared" in line


def test_runs_at_once_have_gpus_of_their_own(sweeps, monkeypatch):
    monkeypatch.setattr(distributed, "num_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-abc,2")
    arguments = ["--change", "weight_decay=0", "--nproc-per-node", "2", "--usd-per-hour", "36"]
    line = error_line(sweeps.run(*arguments, "--parallel", "3"))
    assert "3 runs of 2 processes at once need 6 GPUs, and there are 4; set" in line
    succeeded(sweeps.run(*arguments, "--parallel", "auto"))
    seen = [given(sweeps.tiny / run) for run in ("baseline-seed-42", "weight_decay-0-seed-42")]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["7,5", "GPU-abc,2"]
    assert {one["options"]["--usd-per-hour"] for one in seen} == {"18.0"}  # half of the machine
    assert {one["DDP_TRAIN_SHARES"] for one in seen} == {"2"}  # bills are of the whole one


def test_the_screen_shows_the_runs_that_are_being_trained_and_the_table(sweeps):
    succeeded(sweeps.run("--change", "drop_rate=0"))
    sweep = definition.Sweep(load_run(sweeps.workplace.runs_dir, "tiny"), sweeps.tiny)
    sweep.update(num_seeds=2)
    outcomes = {run.run_dir: execution.Outcome.read(run) for run in sweep.runs}
    run = sweep.runs[2]
    launch = execution.LaunchedRun(run, shares.Share("GPU 3"), process=None, lock=0, began=0.0)
    shown = execution.Execution(Path(), outcomes=outcomes, launches=[launch], num_elsewhere=1)
    record = {"global_step": 1, "tokens": 500, "seconds": 50.0, "train_loss": 4.5}
    (run.run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run.run_dir / "summary.json").write_text('{"status": "running", "num_steps": 4}')
    first, *lines = progress.screen(sweep, shown, 160).splitlines()
    assert first == "GPU 3: baseline, seed 43: step 2 of 4, training loss 4.5000"
    assert any(line.startswith("baseline ") and "1/2" in line for line in lines)


@pytest.mark.parametrize(
    ("parallel", "processes", "threads", "wanted"),
    [
        ("auto", 1, 1, [{0}, {1}, {2}]),
        ("auto", 1, 2, [{0, 1}]),
        ("auto", 4, 1, [{0, 1, 2}]),  # more processes than cores
        (2, 1, 2, [{0, 1}, {0, 2}]),  # more threads than cores: those of the first run again
    ],
)
def test_cores_are_shared_out(parallel, processes, threads, wanted):
    found = shares.shares_of_cores(parallel, processes, threads, [0, 1, 2])
    assert [set(share.cores) for share in found] == wanted


def test_a_run_that_is_behind_is_pruned_and_stays_so(sweeps):
    another_curve = "min_train_tokens=3000,drop_rate=0.6"
    arguments = changing("drop_rate=0.5", "learning_rate=0.01", another_curve)
    arguments += ["--seeds", "2", "--prune", "--parallel", "2"]
    result = succeeded(sweeps.run(*arguments, "--json"))
    assert set(sweeps.launches()[:2]) == {"baseline-seed-42", "baseline-seed-43"}
    document = checked(result.stdout)
    states = [[run.state for run in variant.runs] for variant in document.variants]
    assert states == [["finished"] * 2, ["pruned"] * 2, ["finished"] * 2, ["finished"] * 2]
    row = sweeps.table()["drop_rate=0.5"]
    assert row[:3] == ["0/2", "-", "-"] and row[4] == "2 of 2 pruned"
    assert any(note.startswith("drop_rate=0.5, seed 42: pruned: ") for note in document.notes)
    assert "reference" not in sweeps.train_json("baseline-seed-42")
    trained = sweeps.launches()
    succeeded(sweeps.run(*arguments))
    succeeded(sweeps.run())
    assert sweeps.launches() == trained


def test_with_one_seed_the_limit_is_a_loss(sweeps):
    succeeded(sweeps.run("--change", "weight_decay=5", "--prune"))
    limited = sweeps.train_json("weight_decay-5-seed-42")
    assert limited["reference"] == "baseline"
    assert limited["stop_if_behind"] == {"loss": 0.1, "reports": 2}


def test_without_a_loss_of_the_baseline_nothing_is_pruned(sweeps):
    sweeps.workplace.add_run("diverging", train=SETTINGS | {"weight_decay": 9})
    arguments = sweeps.command("--change", "weight_decay=0", "--prune")
    result = succeeded(run_lab("sweep", "diverging", *arguments[2:]))
    assert "nothing is pruned: no baseline has finished" in result.stdout
    changed = json.loads((sweeps.dir / "diverging/weight_decay-0-seed-42/train.json").read_text())
    assert "stop_if_behind" not in changed


def test_a_run_that_fails_is_a_line_of_the_table(sweeps):
    failing = ("weight_decay=9", "weight_decay=8", "weight_decay=7")
    cells = sweeps.cells(*changing(*failing, "drop_rate=0"))
    assert {change: row[4] for change, row in cells.items()} == {
        "baseline": "-",
        "weight_decay=9": "diverged",
        "weight_decay=8": "failed (status 2)",
        "weight_decay=7": "failed (status 1)",
        "drop_rate=0": "lower, noise unknown",
    }
    num_launches = len(sweeps.launches())
    succeeded(sweeps.run())  # what diverged does so again: only the others are repeated
    assert sweeps.launches()[num_launches:] == ["weight_decay-8-seed-42", "weight_decay-7-seed-42"]


def test_without_a_baseline_nothing_is_compared(sweeps):
    sweeps.workplace.add_run("failing", train=SETTINGS | {"weight_decay": 8})
    result = run_lab("sweep", "failing", *sweeps.command("--change", "drop_rate=0")[2:])
    assert result.exit_code == 2
    assert "sweep stopped: baseline, seed 42, failed with status 2; the same" in result.stdout
    assert (sweeps.dir / "failing/launches").read_text().split() == ["baseline-seed-42"]


def test_improvements_are_stacked(sweeps):
    arguments = changing("drop_rate=0", "clipping_max_norm=0.5")
    arguments += ["--range", "learning_rate=0.01,0.012", "--seeds", "2", "--stack"]
    result = succeeded(sweeps.run(*arguments))
    assert "stack: drop_rate=0,learning_rate=0.01\n" in result.stdout
    assert sweeps.table()["clipping_max_norm=0.5"][4] == "worse"
    row = sweeps.table()["drop_rate=0,learning_rate=0.01"]
    assert row[4] == "better" and float(row[2]) == pytest.approx(-0.2, abs=0.02)
    num_launches = len(sweeps.launches())
    assert "stack: nothing new to train" in succeeded(sweeps.run(*arguments)).stdout
    assert len(sweeps.launches()) == num_launches


@pytest.mark.parametrize(
    ("changes", "words", "num_variants"),
    [
        (["drop_rate=0", "drop_rate=0.5"], "stack: nothing new to train: no two changes", 3),
        (["drop_rate=0", "learning_rate=0.01"], "stack: drop_rate=0,learning_rate=0.01; with", 4),
        (["use_amp=false,drop_rate=0", "precision=bf16,learning_rate=0.01"], "be trained: ", 3),
    ],
)
def test_what_is_stacked_with_one_seed(sweeps, changes, words, num_variants):
    result = succeeded(sweeps.run(*changing(*changes), "--stack"))
    assert words in result.stdout and len(sweeps.table()) == num_variants
    assert "noise: not known with one finished seed" in result.stdout


@pytest.mark.parametrize(
    "budget", [["--budget-hours", "0.05"], ["--budget-usd", "1.8", "--usd-per-hour", "36"]]
)
def test_no_run_is_started_after_the_budget(sweeps, budget):
    changes = ["--change", "drop_rate=0", "--change", "weight_decay=0"]
    result = succeeded(sweeps.run(*changes, *budget))  # 180 s; each run takes 100 s
    assert "sweep stopped: budget: it was spent before weight_decay=0, seed 42;" in result.stdout
    assert sweeps.launches() == ["baseline-seed-42", "drop_rate-0-seed-42"]
    assert sweeps.table()["weight_decay=0"][4] == "not started"
    succeeded(sweeps.run(*changes, *budget[:1], "3.1", *budget[2:]))
    assert sweeps.launches()[2:] == ["weight_decay-0-seed-42"]


def test_the_running_run_is_stopped_at_the_limit(sweeps, monkeypatch):
    """A run that waits for a signal gets it from the budget, and continues later."""

    def spent(launch):
        return 3600.0 if (launch.run.run_dir / "waits").exists() else 0.0

    monkeypatch.setattr(execution.LaunchedRun, "seconds", property(spent))
    sweeps.workplace.add_run("waiting", train=SETTINGS | {"weight_decay": 6})
    arguments = sweeps.command("--change", "weight_decay=0")[2:]
    result = succeeded(run_lab("sweep", "waiting", *arguments, "--budget-hours", "0.5"))
    assert "budget: spent during baseline, seed 42, which was stopped" in result.stdout
    runs = sweeps.dir / "waiting"
    assert json.loads((runs / "baseline-seed-42/summary.json").read_text())["status"] == "stopped"
    succeeded(run_lab("sweep", "waiting", *arguments))
    assert len(read_lines(runs / "baseline-seed-42/metrics.jsonl")) == stub_trainer.STEPS


def started(sweeps, *arguments):
    """Start a sweep in a process of its own."""
    code = (
        "import sys, types, lab.sweep.execution, lab.__main__\n"
        # It asks for GPUs only, and would import torch for that.
        "sys.modules['processes.distributed'] = types.SimpleNamespace(num_gpus=lambda: 0)\n"
        "from pathlib import Path\n"
        f"lab.sweep.execution.SCRIPT = Path({str(STUB)!r})\n"
        "lab.__main__.main()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *sweeps.command(*arguments)],
        cwd=PROJECT_DIR,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_stops_all_runs_at_once_and_they_go_on_later(sweeps):
    changes = ["--change", "weight_decay=6", "--change", "weight_decay=6,drop_rate=0"]
    arguments = [*changes, "--parallel", "2"]
    process = started(sweeps, *arguments)
    names = ["weight_decay-6-seed-42", "weight_decay-6_drop_rate-0-seed-42"]
    for name in names:
        wait_for(sweeps.tiny / name / "waits")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "sweep stopped: SIGINT; the same command" in output
    for name in names:
        summary = json.loads((sweeps.tiny / name / "summary.json").read_text())
        assert summary["status"] == "stopped"
    succeeded(sweeps.run(*arguments))
    assert {row[0] for row in sweeps.table().values()} == {"1/1"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_stops_the_run_and_the_sweep_and_the_command_continues_both(sweeps, number):
    arguments = ["--change", "weight_decay=6", "--change", "drop_rate=0"]
    process = started(sweeps, *arguments)
    waiting = sweeps.tiny / "weight_decay-6-seed-42"
    wait_for(waiting / "waits")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"sweep stopped: {number.name}; the same command, or one with" in output
        assert sweeps.table()["weight_decay=6"][4] == "stopped"
    wait_for(waiting / "summary.json")
    assert json.loads((waiting / "summary.json").read_text())["status"] == "stopped"
    cells = sweeps.cells(*arguments)
    assert sweeps.launches() == [
        "baseline-seed-42",
        "weight_decay-6-seed-42",
        "weight_decay-6-seed-42",
        "drop_rate-0-seed-42",
    ]
    assert cells["weight_decay=6"][0] == cells["drop_rate=0"][0] == "1/1"


class ForkedLaunch:
    """A launch of the real trainer under torchrun's agent, forked with torch loaded."""

    def __init__(self, command, share, output, lock):
        folder = output and Path(output.name).parent
        if folder:
            (folder / "stderr").symlink_to(output.name)
        self._process, _ = start_forked(
            Path(command[1]).name,
            command[2:],
            num_processes=1,
            environment=share.environment,
            folder=folder,
        )
        os.sched_setaffinity(self._process.pid, share.cores)

    def poll(self):
        return self.returncode

    @property
    def returncode(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self._process.pid, number)


def test_runs_at_once_end_as_those_one_after_the_other_and_a_failed_one_stops_none(
    workplace, monkeypatch
):
    """With the real trainer, which takes what a sweep passes to it."""
    monkeypatch.setattr(execution, "start", ForkedLaunch)
    workplace.add_dataset()
    workplace.add_run(train={"gradient_accumulation_steps": None, "min_train_tokens": 320})
    arguments = workplace.arguments("sweep", "tiny", "--usd-per-hour", "36", "--json")
    arguments += ["--sweeps-dir", str(workplace.root / "sweeps")]
    changes = ["--change", "learning_rate=0.03", "--change", "start_train_token=9999"]
    result = succeeded(run_lab(*arguments, *changes, "--parallel", "2", "--name", "at-once"))
    document = checked(result.stdout)
    assert [variant.runs[0].state for variant in document.variants] == [
        "finished",
        "finished",
        "failed (status 1)",  # of the agent that is forked
    ]
    for variant, rate in zip(document.variants, (0.01, 0.03), strict=False):
        summary = summary_of(Path(variant.runs[0].run))
        assert summary["train"]["learning_rate"] == rate and summary["status"] == "finished"
        assert variant.loss == summary["validation_loss"] and variant.usd > 0
    # One after the other, with as many threads each.
    plan = json.loads((workplace.root / "sweeps/at-once/sweep.json").read_text())
    other = workplace.root / "sweeps/one-by-one"
    other.mkdir()
    (other / "sweep.json").write_text(json.dumps(plan | {"changes": plan["changes"][:1]}))
    succeeded(run_lab(*arguments, "--name", "one-by-one"))
    for run in ("baseline-seed-42", "learning_rate-0.03-seed-42"):
        weights = [
            (other.parent / name / run / "checkpoints/latest/model.safetensors").read_bytes()
            for name in ("at-once", "one-by-one")
        ]
        assert weights[0] == weights[1]


def test_losses_on_other_validation_tokens_are_not_compared(sweeps):
    cells = sweeps.cells("--change", "start_val_token=5")
    assert cells["start_val_token=5"][2:6] == ["-", "-", "other validation tokens", "-"]
