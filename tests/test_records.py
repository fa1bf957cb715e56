"""What a run prints and records: losses, time and dollars, speed, its machine, samples, its end."""

import errno
import json
import math
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist

from basics import device as device_module
from basics.errors import UserError
from basics.failpoints import VARIABLE
from basics.json_files import to_json
from gpt import GPTModel
from processes import distributed
from processes.command_line import Options
from processes.distributed import Process, gpu_uuids
from processes.run_lock import write_heartbeat
from processes.startup_agreement import Agreement
from reporting import loss_window, machine_meter, metrics_file
from reporting.clock import PhaseClock
from reporting.estimate import Pace
from reporting.gpus import GPUS, find_gpu
from reporting.loss_window import LossWindow
from reporting.machine_meter import MachineMeter
from reporting.metrics_file import read_metrics, remove_metrics_from, spent_before
from reporting.run_log import Report, RunLog, SetResult
from reporting.speed import CARDS_GIB, FAR_BELOW, Speed, checkpoint_bytes, usable_gib
from run_config import ModelConfig, TrainConfig, load_run
from tests.support.models import ONE_PROCESS
from tests.support.runs import (
    OF_MACHINE,
    SETTINGS,
    last_line_of_ours,
    summary_of,
    wait_until,
    weights_of,
    with_fault,
)
from tests.support.stand_ins import H100, FakeNvml, FakeTime
from tests.support.workplace import (
    PROJECT_DIR,
    TINY_MODEL,
    TINY_TRAIN,
    Workplace,
    forked,
    read_lines,
    start_forked,
    succeeded,
)
from tokens.batch_plan import BatchPlan
from trainer.resuming import ResumePoint
from trainer.samples import Samples
from trainer.startup import book_earlier_launches

CPU = torch.device("cpu")


# The log and the records, also on a full disk


@pytest.fixture
def run_dir(workplace):
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS)


def test_a_log_on_a_full_disk_ends_no_run(workplace, run_dir, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("stdout", "stderr"):
        (folder / name).symlink_to("/dev/full")
    process, _ = start_forked(
        "ddp_train.py", workplace.arguments("tiny"), num_processes=2, folder=folder
    )
    process.join(timeout=200)
    assert process.exitcode == 0
    summary = summary_of(run_dir)
    assert (summary["status"], summary["global_step"]) == ("finished", 11)


def test_a_log_that_nobody_reads_any_more_ends_no_run(workplace, run_dir, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", open(writer, "w"))
    run, clock = load_run(workplace.runs_dir, "tiny"), PhaseClock()
    plan = BatchPlan(1, 1, 2, 16, 1000)
    pace = Pace(run, plan, clock)
    pace.begin(run.stages(plan.num_steps))
    log = RunLog(run, plan, "gpt2", None, clock=clock, pace=pace, is_active=True)
    log.report_validation(Report(4, 160, math.nan, {}), [SetResult("", 3.5)], 1.0)
    with pytest.raises(BrokenPipeError):
        sys.stdout.close()
    assert '"validation_loss": 3.5' in run.metrics_path.read_text()


def test_records_refused_by_a_full_disk_warn_once_and_are_written_later(workplace, run_dir):
    faults = ";".join(f"record:full:hit={hit}" for hit in (2, 3, 5))
    result = succeeded(with_fault(workplace, faults))
    assert result.stdout.count("warning: metrics.jsonl could not be written (No space left") == 2
    steps = [record["global_step"] for record in read_lines(run_dir / "metrics.jsonl")]
    assert steps == [4, 4, 9, 9, 11, 11]


def test_unwritten_records_are_status_4_and_the_next_launch_finishes(workplace, run_dir):
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: "summary:full"})
    assert result.returncode == 4 and "summary.json could not be written" in last_line_of_ours(
        result
    )
    assert summary_of(run_dir)["status"] == "failed"
    weights = weights_of(run_dir)
    assert with_fault(workplace, "record:full").returncode == 0  # nothing was left to be recorded
    assert summary_of(run_dir)["status"] == "finished" and weights_of(run_dir) == weights


@pytest.mark.parametrize(
    "read", [read_metrics, lambda path: remove_metrics_from(path, 3), partial(spent_before, [])]
)
def test_records_that_a_failing_disk_does_not_give_are_an_error_and_stay(
    tmp_path, monkeypatch, read
):
    path, text = tmp_path / "metrics.jsonl", '{"global_step": 4, "seconds": 9.0}\n'
    path.write_text(text)
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(metrics_file, "read_regular_file", failing)
    with pytest.raises(UserError, match="jsonl: cannot be read") as caught:
        read(path)
    assert caught.value.status == 1 and path.read_text() == text


NOT_WRITTEN = [
    {"layer_grad_norm": 1.0},
    {"layer_grad_norm": None},
    {"layer_grad_norm": [[1.0]]},
    {"layer_update_ratio": [True]},
    {"layer_activation_norm": [1e101]},
    {"layer_attention_entropy": [math.nan]},
    {"token_loss_max": [1.0]},
    {"gpu_throttling": "sw power cap"},
    {"gpu_throttling": [None]},
    {"gpu_throttling": ["\x1b[2J"]},
]


def test_what_a_run_writes_is_read_and_other_lists_are_skipped(tmp_path):
    """tests/faults/test_hostile.py has other numbers."""
    path, wanted = (
        tmp_path / "metrics.jsonl",
        {
            "global_step": 1,
            "another_key": "x",
            "layer_grad_norm": [1.0, None, -2],
            "logit_max": None,
            "mfu": 0.41,
            "gpu_power_w": [650.2, None],
            "gpu_throttling": ["", "hw slowdown"],
        },
    )
    path.write_text("".join(json.dumps(wanted | values) + "\n" for values in [{}, *NOT_WRITTEN]))
    assert read_metrics(path) == [wanted]


# Windows of losses: what is read when, and by how many windows a report may be late


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_late_window_is_read_when_the_next_one_is_closed_or_somebody_waits(group, monkeypatch):
    monkeypatch.setitem(loss_window.LAG, "cpu", 1)  # as on a GPU
    window, found = LossWindow(CPU), []
    for number, num_steps, waits in ((1, 10, False), (2, 10, False), (3, 3, True)):
        for _ in range(num_steps):
            window.add(torch.tensor(float(number)), torch.tensor(2.0))
        closed = window.close(number * 10, number / 10, PhaseClock(), waits=waits)
        found.append([(one.global_step, one.numbers["train_loss"]) for one in closed])
    assert found == [[], [(10, 1.0)], [(20, 2.0), (30, 3.0)]]
    assert closed[-1].learning_rate == 0.3
    assert window.pop_loss_since_checkpoint() == pytest.approx((10 * 3.0 + 3 * 3.0) / 23)


def test_losses_are_averaged_over_processes_and_without_skipped_steps(group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda losses: losses.mul_(3))  # the other has twice
    window = LossWindow(CPU)
    for loss, norm in ((2.0, 1.0), (4.0, math.inf), (4.0, math.inf), (6.0, 3.0)):
        window.add(torch.tensor(loss), torch.tensor(norm))
    (closed,) = window.close(4, 0.1, PhaseClock(), waits=True)
    assert [closed.numbers[key] for key in ("train_loss", "train_loss_max", "grad_norm")] == [
        6.0,
        9.0,
        2.0,
    ]
    assert closed.numbers["skipped_steps"] == window.longest_skipped == 2


def test_speed_and_slowest_step_are_those_of_the_windows_own_steps(group, monkeypatch):
    """Whenever a window is read, and whatever is done between two windows."""
    monkeypatch.setitem(loss_window.LAG, "cpu", 1)
    now, window, found = FakeTime(), LossWindow(CPU), []
    monkeypatch.setattr(device_module.time, "perf_counter", now)
    window.add(torch.tensor(1.0), torch.tensor(1.0))  # it compiles
    for last_step, seconds, paused in (
        (4, (0.5, 0.5, 0.25, 0.75), 100),
        (8, (0.25, 0.25, 0.25, 0.25), 0),
        (13, (1.0, 29.0, 2.0), 1000),  # after a checkpoint and a validation
    ):
        if paused:
            now.seconds += paused
            window.restart_timing()
        for each in seconds:
            now.seconds += each
            window.add(torch.tensor(1.0), torch.tensor(math.nan))  # skipped steps count too
        found += window.close(last_step, 0.1, PhaseClock(), waits=last_step == 13)
    slowest = [(one.numbers["slowest_step"], one.numbers["slowest_step_seconds"]) for one in found]
    assert slowest == [(4, 0.75), (8, 0.25), (12, 29.0)]
    assert [one.steps_per_second for one in found] == [2.0, 4.0, 3 / 32]


# Seconds and dollars by phase


def test_time_is_booked_to_its_phase(now):
    clock = PhaseClock(since=90.0)
    now.seconds = 102.0
    clock.enter("training")
    now.seconds = 110.0
    with clock.phase("validation") as validation:
        now.seconds = 115.0
        with clock.phase("waiting"):
            now.seconds = 116.0
    now.seconds = 120.0
    booked = {"startup": 12, "training": 12, "validation": 5, "waiting": 1}
    assert {phase: spent for phase, spent in clock.read().items() if spent} == booked
    assert validation.seconds == clock.longest["validation"] == 5 and clock.usd() == {}
    for measured, counted in ((4.0, 4), (9.0, 12)):  # more than there is: part was in another phase
        clock.count_diagnostics(measured)
        assert clock.read()["diagnostics"] == 12 - clock.read()["training"] == counted


@pytest.mark.parametrize(
    ("at_checkpoint", "recorded", "price", "says", "usd"),
    [
        # US$ of the checkpoint's hour; hours and US$ of all; after half an hour more: US$ of
        # training, and of what is lost
        (10.0, (1.0, 10.0), 40.0, "", (30.0, 0.0)),
        (10.0, (1.5, 16.0), 40.0, "", (30.0, 6.0)),
        (None, (1.5, 0.0), 40.0, "1.5 hours are counted at US$40.00 an hour too", (60.0, 20.0)),
        (None, (1.5, 15.0), 40.0, "", (20.0, 15.0)),  # the price came after the checkpoint
        (10.0, (1.0, 10.0), None, "at that of the earlier ones, US$10.00 an hour", (15.0, 0.0)),
    ],
)
def test_all_launches_have_a_price(now, at_checkpoint, recorded, price, says, usd):
    clock = PhaseClock()
    clock.resume({"training": 3600.0}, {} if at_checkpoint is None else {"training": at_checkpoint})
    clock.count_lost(recorded[0] * 3600, recorded[1])
    line = clock.set_price(price)
    assert says in line and bool(says) == bool(line)
    with clock.phase("training"):
        now.seconds += 1800
    assert clock.read()["training"] == 5400 and clock.read_this_launch()["training"] == 1800
    assert (clock.usd()["training"], clock.usd()["lost"]) == pytest.approx(usd)


def test_time_that_only_a_heartbeat_tells_is_lost_and_has_the_present_price(now):
    clock = PhaseClock()
    clock.resume({"training": 3600.0}, {"training": 10.0})
    clock.count_lost(3600.0, 10.0)
    clock.set_price(40.0)
    clock.count_lost(5400.0)
    now.seconds += 10
    assert clock.read()["lost"] == 1800 and clock.usd()["lost"] == 20
    assert clock.total_seconds() == 5410 == sum(clock.read().values())


@pytest.mark.parametrize(("price", "usd"), [(40.0, 30.0), (None, 15.0)])
def test_earlier_launches_are_booked_in_the_order_that_gives_all_a_price(
    workplace, run_dir, now, price, usd
):
    """Records of an hour for US$10, and a heartbeat half an hour later, which has no dollars."""
    run = load_run(workplace.runs_dir, "tiny").priced(price)
    write_heartbeat(run.heartbeat_path, phase="training", step=3, seconds=5400.0, parent=0)
    clock, agreement = PhaseClock(), Agreement.in_one_process()
    records = [{"seconds": 3600.0, "usd": 10.0}]
    book_earlier_launches(run, ResumePoint(), records, Options("tiny"), clock, agreement)
    assert clock.total_seconds() == clock.read()["lost"] == 5400
    assert clock.usd()["lost"] == pytest.approx(usd)


def test_the_launchers_seconds_are_counted_once(now, monkeypatch):
    monkeypatch.setenv("DDP_TRAIN_SPENT_SECONDS", "")
    starter = PhaseClock()
    with starter.phase("download"):
        now.seconds += 60
    now.seconds += 3
    starter.export_to_children()
    worker = PhaseClock()
    worker.import_from_parent()
    assert worker.read()["download"] == 60 and worker.read()["startup"] == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = PhaseClock()
    restarted.import_from_parent()
    assert restarted.read()["download"] == 0


# The machine while a run trains

HOST = {"host_ram_gib", "host_load", "disk_free_gib"}


def has_gpus(monkeypatch, *gpus):
    """Have the driver tell of these GPUs."""
    found = {f"GPU-{number}": gpu for number, gpu in enumerate(gpus)}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(found))


@pytest.fixture
def meter(tmp_path, monkeypatch):
    """A meter of two GPUs that reads at its start and its end only."""
    has_gpus(monkeypatch, H100, H100)
    monkeypatch.setattr(machine_meter, "READING_SECONDS", 1e6)
    found = MachineMeter(tmp_path, ["GPU-0", "GPU-1"])
    yield found
    found._ends.set()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "machine meter"]


def ended():
    for thread in threads():
        thread.join(timeout=20)
    return not threads()


def test_a_driver_that_hangs_holds_nobody_up(meter, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(machine_meter, "LAST_SECONDS", 0.05)
    has_gpus(monkeypatch, {"nvmlDeviceGetPowerUsage": goes_on.wait})
    meter.start()
    try:
        meter.stop()
        assert meter.pop_reading() == {} and meter.energy_kwh is None
        assert threads() and all(thread.daemon for thread in threads())  # the process can exit
    finally:
        goes_on.set()
    assert ended()


def test_a_failure_is_told_once_and_readings_go_on(meter, monkeypatch):
    def fail(_):
        failures.append(1)
        raise OSError("Stale file handle")

    failures = []
    monkeypatch.setattr(machine_meter, "READING_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(machine_meter.psutil, "disk_usage", fail)
        meter.start()
        wait_until(lambda: len(failures) > 1)
        assert meter.pop_reading() == {} and meter.pop_failure() == "OSError: Stale file handle"
        wait_until(lambda: len(failures) > 3)
        assert meter.pop_failure() == ""
    meter.stop()
    assert ended() and HOST < set(meter.pop_reading())


@pytest.mark.parametrize(
    ("masks", "reasons"),
    [
        ((0x1, 0x4), None),
        ((0x80, 0x64), "hw power brake slowdown, hw thermal slowdown, sw thermal slowdown"),
    ],
)
def test_slowdowns_of_any_gpu_are_known_and_power_caps_are_none(meter, monkeypatch, masks, reasons):
    has_gpus(monkeypatch, *({"nvmlDeviceGetCurrentClocksEventReasons": mask} for mask in masks))
    meter.start()
    meter.stop()
    assert ended() and meter.throttling() == reasons


def test_energy_is_added_to_what_earlier_launches_used_and_a_lost_gpu_has_empty_places(
    meter, monkeypatch
):
    meter._joules = 3.6e6  # of earlier launches: 3.6 MJ are 1 kWh
    for joules, kwh in (
        ([5e6, 7e6], 1.0),
        ([8.6e6, 10.6e6], 3.0),
        ([0.0, 0.0], 3.0),  # set to 0
        ([0.0, 3.6e6], 4.0),
    ):
        counters = [{"nvmlDeviceGetTotalEnergyConsumption": 1000 * counter} for counter in joules]
        has_gpus(monkeypatch, *counters)
        assert meter._read()["energy_kwh"] == pytest.approx(kwh)
    has_gpus(monkeypatch, "lost", H100)
    assert meter._read()["gpu_power_w"] == [None, 651.25]
    has_gpus(monkeypatch, "lost", "lost")
    assert meter._read().keys() - {"energy_kwh"} == HOST


def test_the_driver_is_asked_for_the_gpus_that_the_run_uses(monkeypatch):
    monkeypatch.setattr(
        distributed.torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid="cdab"[index]),
    )
    monkeypatch.setattr(distributed.torch.version, "cuda", "13.0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    process = Process(0, 0, 2, distributed.torch.device("cuda", 0))
    assert gpu_uuids(process) == ["GPU-c", "GPU-d"]
    assert gpu_uuids(replace(process, device=CPU)) == []
    monkeypatch.setattr(distributed.torch.version, "cuda", None)  # PyTorch for AMD
    assert gpu_uuids(process) == []


def test_a_run_records_its_gpus_and_its_energy_over_launches(workplace, run_dir):
    energy = []
    for arguments in (("--max-steps", "6"), ()):  # of a stand-in each reading adds 1 kWh
        command = workplace.arguments("tiny", *arguments)
        worker = ["train-with-gpus", str(workplace.root), *command]
        succeeded(forked("tests/support/torchrun_workers.py", worker, num_processes=1))
        energy.append(summary_of(run_dir)["energy_kwh"])
    assert energy[0] >= 1.0 and energy[1] >= energy[0] + 1.0
    records = [r for r in read_lines(run_dir / "metrics.jsonl") if "train_loss" in r]
    readings = [record for record in records if "gpu_memory_gib" in record]
    assert readings[0] is records[0] and len(readings) >= 2  # the first of each launch
    of_gpus = {
        "gpu_memory_gib": [20, 20],
        "gpu_use_percent": [97, 97],
        "gpu_temperature_c": [61, 61],
        "gpu_power_w": [651.25, 651.25],
        "gpu_throttling": ["sw power cap, hw thermal slowdown"] * 2,
    }
    for reading in readings:
        assert reading.keys() >= OF_MACHINE and reading == reading | of_gpus
    assert readings[-1]["energy_kwh"] >= energy[0]
    assert all(0 < record["mfu"] < 1 for record in records)


# The speed beside that of the GPU

GOOD = Speed(
    tokens_per_second=2_800_000,
    num_processes=8,
    flops_per_token=854.44e6,
    device_name="NVIDIA H100 80GB HBM3",
    precision="bf16",
    attention_kernel="flash",
    is_compiled=True,
    waiting_share=0.0,
    microbatch_tokens=32768,
    throttling=None,
)
SLOW = replace(GOOD, tokens_per_second=500_000)
# The names that drivers give them, and people.
NAMES = {
    "A100-40": [
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "A100-SXM4-40GB",
        "A100 SXM4 40 GB",
    ],
    "A100-80": [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe",
        "a100",
        "A100 80GB",
        "A100-SXM-80GB",
    ],
    "GH200": ["NVIDIA GH200 480GB", "NVIDIA GH200 120GB"],
    "H100": ["NVIDIA H100 80GB HBM3", "h100", "H100 SXM", "H100 80GB SXM5"],
    "H100-NVL": ["NVIDIA H100 NVL"],
    "H100-PCIe": ["NVIDIA H100 PCIe", "H100 PCIe 80GB"],
    "H200": ["NVIDIA H200"],
    "H200-NVL": ["NVIDIA H200 NVL"],
    "B200": ["NVIDIA B200"],
    "B300": ["NVIDIA B300 SXM6 AC"],
    "MI300X": ["AMD Instinct MI300X"],
    "L40S": ["NVIDIA L40S"],
    "L40": ["NVIDIA L40"],
    "L4": ["NVIDIA L4"],
    "A10": ["NVIDIA A10"],
    "RTX-6000-Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "RTX-5090": ["NVIDIA GeForce RTX 5090"],
    "RTX-4090": ["NVIDIA GeForce RTX 4090", "RTX 4090", "4090"],
    "RTX-3090": ["NVIDIA GeForce RTX 3090", "GeForce RTX 3090"],
    "V100": ["Tesla V100-SXM2-16GB"],
    "V100-32": ["Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"],
    "V100-PCIe": ["Tesla V100-PCIE-16GB"],
    "V100-PCIe-32": ["Tesla V100-PCIE-32GB"],
    "T4": ["Tesla T4"],
}
UNKNOWN_NAMES = [  # other memory, speed or parts than the plain card; "" and "NVIDIA" are damaged
    "AMD EPYC",
    "NVIDIA Titan",
    "NVIDIA RTX A1000",
    "NVIDIA A100X",
    "NVIDIA A100-SXM-64GB",
    "GRID A100D-40C",
    "NVIDIA A10G",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H100 64GB HBM2",
    "NVIDIA H800",
    "NVIDIA H20",
    "NVIDIA GB200",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA L40G",
    "NVIDIA L20",
    "NVIDIA T400 4GB",
    "NVIDIA T4G",
    "Tesla V100S-PCIE-32GB",
    "NVIDIA V100-SXM2-64GB",
    "AMD Instinct MI300A",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "Quadro RTX 6000",
    "NVIDIA RTX A6000",
    "NVIDIA RTX 5000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "",
    "NVIDIA",
]


def test_gpus_are_found_by_their_drivers_names_and_no_other_is_guessed():
    assert set(NAMES) == {gpu.name for gpu in GPUS}
    for name, devices in NAMES.items():
        assert {find_gpu(device).name for device in (name, *devices)} == {name}
    assert {find_gpu(device) for device in UNKNOWN_NAMES} == {None}


def test_cuda_takes_a_part_of_a_cards_memory():
    assert all(
        0.83 * card < usable_gib(reported) < reported - 1 < card - 1
        for card, reported in CARDS_GIB.items()
    )


def test_flops_and_checkpoints_of_gpt2_small_are_the_published_ones():
    run = load_run(PROJECT_DIR / "runs", "original")
    assert run.model.flops_per_token == pytest.approx(854.44e6, rel=1e-5)
    assert "493,000 tokens/s" in (line := replace(SLOW, tokens_per_second=493_000).line())
    assert "5.3% MFU" in line
    for optimizer, num_floats in (
        ("adamw", 3 * 163_009_536),
        ("muon", 3 * 163_009_536 - 12 * 12 * 768**2),
    ):  # one moment each
        train = run.config.model_copy(update={"optimizer": optimizer})
        assert checkpoint_bytes(run.model, train) == 4 * num_floats


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "none found"),
        ({"waiting_share": 0.3}, "waiting for data 30% of the time"),
        ({"is_compiled": False}, "the model is not compiled"),
        ({"attention_kernel": "math"}, "PyTorch's math attention kernel"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"throttling": "sw thermal slowdown"}, "the GPU is throttled (sw thermal slowdown)"),
        ({"microbatch_tokens": 1024}, "a small microbatch of 1,024 tokens"),
        ({"drop_rate": 0.1}, "dropout 0.1, whose masks have kernels of their own"),
        (
            {"is_compiled": False, "waiting_share": 0.5},
            "waiting for data 50% of the time, the model is not compiled",
        ),  # the strongest first
    ],
)
def test_a_speed_below_half_of_the_best_has_its_reason_and_no_other(changes, reason):
    assert "30.2% MFU; H100 should reach up to 41%" in GOOD.line()
    assert replace(SLOW, **changes).line().endswith(f"likely reason: {reason}")
    limit = 8 * 989e12 * 0.41 * FAR_BELOW / 854.44e6
    assert "reason" not in replace(GOOD, tokens_per_second=limit * 1.01, **changes).line()
    assert "reason" in replace(GOOD, tokens_per_second=limit * 0.99, **changes).line()


def test_a_small_model_is_not_compared_with_what_gpt2_small_reaches():
    line = replace(SLOW, flops_per_token=854.44e5 - 1).line()
    assert line.endswith(" (how fast so small a model should be on H100 is not known)")
    assert "MFU" in replace(SLOW, flops_per_token=854.44e5).line()


# Samples; tests/lab/test_generate.py tests how tokens are sampled

PROMPTS = ["def ", ""]
SAMPLED = {"sample_prompts": PROMPTS, "min_train_tokens": 12 * 64}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A trained run with samples."""
    workplace = Workplace(tmp_path_factory.mktemp("sampled"))
    workplace.add_run(train=SAMPLED)
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny"))
    return workplace


def test_each_validation_writes_a_line_per_prompt_and_training_stays_the_same(sampled):
    lines = read_lines(sampled.runs_dir / "tiny/samples.jsonl")
    assert [(line["global_step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (4, 9, 11) for prompt in PROMPTS
    ]
    assert len({line["text"] for line in lines}) > 3  # the model learns between them
    shown = succeeded(sampled.torchrun(1, "tiny", "--fresh")).stdout.split("sample:\n")[1]
    assert shown.startswith(PROMPTS[0])
    plain = sampled.add_run("plain", train=SAMPLED | {"sample_prompts": []})
    assert "sample:" not in succeeded(sampled.torchrun(1, "plain")).stdout
    assert weights_of(plain) == weights_of(sampled.runs_dir / "tiny")
    assert not (plain / "samples.jsonl").exists()


def test_a_killed_run_has_the_samples_of_each_step_once(sampled, workplace):
    run_dir = workplace.add_run(train=SAMPLED)
    workplace.add_dataset()
    assert workplace.torchrun(1, "tiny", **{VARIABLE: "save.validation:kill:hit=2"}).returncode
    steps = {line["global_step"] for line in read_lines(run_dir / "samples.jsonl")}
    assert steps == {4, 9}  # before the validation, without which both are repeated
    succeeded(workplace.torchrun(1, "tiny"))
    expected = read_lines(sampled.runs_dir / "tiny/samples.jsonl")
    assert read_lines(run_dir / "samples.jsonl") == expected


def test_samples_that_fail_do_not_stop_a_run(workplace):
    workplace.add_run(
        train=SAMPLED | {"min_train_tokens": 5 * 64}, model={"vocab_size": 300}
    )  # with an unknown tokenizer
    workplace.add_dataset()
    result = succeeded(workplace.torchrun(1, "tiny"))
    assert result.stdout.count("warning: no samples: tokenizer") == 1


def test_slow_samples_do_not_look_like_a_hang(tmp_path):
    watchdog, clock, log = MagicMock(), PhaseClock(), MagicMock()
    launch = SimpleNamespace(
        clock=clock,
        config=TrainConfig(**TINY_TRAIN | {"sample_prompts": ["a"]}),
        data=SimpleNamespace(tokenizer_name="bytes", tokenizer_path=None),
        process=ONE_PROCESS,
        run=SimpleNamespace(samples_path=tmp_path / "samples.jsonl"),
        watchdog=watchdog,
    )
    state = SimpleNamespace(model=GPTModel(ModelConfig(**TINY_MODEL)))
    Samples(launch, state, log).validation(Report(3, 64, 5.0, {}))
    assert watchdog.heartbeat.call_count > 10 and clock.read()["validation"] > 0
    assert not log.warn.called and state.model.training


def test_nan_never_enters_json():
    values = {"a": float("nan"), "b": {"c": float("inf"), "d": 1.5}, "e": 3}
    assert json.loads(to_json(values)) == {"a": None, "b": {"c": None, "d": 1.5}, "e": 3}


def test_the_seconds_and_dollars_of_a_record_are_of_one_moment(workplace, run_dir, group):
    clock = PhaseClock(since=0.0)
    clock._now, clock.usd_per_hour = count(1.0).__next__, 3600.0  # it moves whenever it is read
    run = load_run(workplace.runs_dir, "tiny")
    plan = BatchPlan(1, 1, 2, 16, 1000)
    log = RunLog(run, plan, None, None, clock=clock, pace=Pace(run, plan, clock), is_active=True)
    log.record(4, {})
    log.write_status("running", None)
    (record,) = read_lines(run.metrics_path)
    assert record["usd"] == record["seconds"] > 0
    summary = summary_of(run_dir)
    assert summary["usd"]["total"] == sum(summary["seconds"].values())
    window = LossWindow(CPU)
    window.add(torch.tensor(3.0), torch.tensor(1.0))
    (closed,) = window.close(4, 0.1, clock, waits=True)
    assert closed.usd == closed.seconds
