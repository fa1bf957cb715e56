import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from basics.gpu_readings import GpuReading
from processes import launch
from processes.launch import Process, gpu_uuids
from reporting import machine_meter
from reporting.machine_meter import MachineMeter, gpu_values
from reporting.metrics_file import OF_MACHINE
from tests.support.runs import summary_of
from tests.support.stand_ins import H100, FakeNvml
from tests.support.workplace import forked, read_lines, succeeded

HOST = {"host_ram_gib", "host_load", "disk_free_gib"}
GPU = GpuReading(memory_used_gib=20.004, use_percent=97, temperature_c=61, power_w=651.257,
                 throttle_reasons=("sw power cap", "hw thermal slowdown"))


@pytest.fixture
def meter(tmp_path, monkeypatch):
    """A meter of two GPUs that reads only if it is asked."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({"GPU-0": H100, "GPU-1": H100}))
    found = MachineMeter(tmp_path, ["GPU-0", "GPU-1"], seconds=1e6)
    yield found
    found._ends = True
    found._is_asked.set()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "machine meter"]


def ended():
    for thread in threads():
        thread.join(timeout=20)
    return not threads()


def test_a_reading_has_the_host_and_every_gpu_and_is_recorded_once(meter):
    meter.start(earlier_kwh=2.5)
    meter.renew()
    reading = meter.pop_reading()
    assert set(reading) == set(OF_MACHINE) - {"mfu"}
    assert reading["gpu_memory_gib"] == [20, 20] and reading["gpu_use_percent"] == [97, 97]
    assert reading["gpu_temperature_c"] == [61, 61] and reading["gpu_power_w"] == [651.25] * 2
    assert reading["gpu_throttling"] == ["sw power cap, hw thermal slowdown"] * 2
    assert reading["energy_kwh"] == meter.energy_kwh == 2.5
    assert 0 < reading["host_ram_gib"] < 1e5 and reading["disk_free_gib"] > 0
    assert reading["host_load"] >= 0
    meter.stop()
    assert ended() and set(meter.pop_reading()) == set(reading)  # a last one
    assert meter.pop_reading() == {} and meter.pop_failure() == ""


def test_without_gpus_only_the_host_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # to import it is an error
    meter = MachineMeter(tmp_path, [], seconds=1e6)
    meter.start()
    meter.stop()
    assert ended() and set(meter.pop_reading()) == HOST
    assert meter.energy_kwh is None and meter.throttling() is None and meter.pop_failure() == ""


def test_a_driver_that_hangs_holds_nobody_up(meter, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(machine_meter, "ANSWER_SECONDS", 0.05)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(
        {"GPU-0": {"nvmlDeviceGetPowerUsage": goes_on.wait}}))
    meter.start()
    try:
        meter.renew()
        meter.stop()
        assert meter.pop_reading() == {} and meter.energy_kwh is None
        assert threads() and all(thread.daemon for thread in threads())  # the process can exit
    finally:
        goes_on.set()
    assert ended()


def test_a_failure_is_told_once_and_readings_go_on(meter, monkeypatch):
    def fail(_):
        raise OSError("Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(machine_meter.psutil, "disk_usage", fail)
        meter.start()
        meter.renew()
        assert meter.pop_reading() == {} and meter.pop_failure() == "OSError: Stale file handle"
        meter.renew()
        assert meter.pop_failure() == ""
    meter.stop()
    assert ended() and HOST < set(meter.pop_reading())


def test_slowdowns_of_any_gpu_are_known_and_power_caps_are_none(tmp_path, monkeypatch):
    for masks, reason in (((0x1, 0x4), None), ((0x80, 0x68), "hw thermal slowdown")):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({
            f"GPU-{n}": {"nvmlDeviceGetCurrentClocksEventReasons": mask}
            for n, mask in enumerate(masks)}))
        meter = MachineMeter(tmp_path, ["GPU-0", "GPU-1"], seconds=1e6)
        meter.start()
        meter.stop()
        assert ended() and meter.throttling() == reason


def test_what_no_gpu_tells_has_no_key():
    silent = GpuReading()
    assert gpu_values([silent, silent]) == gpu_values([]) == {}
    assert gpu_values([silent, GPU]) == {
        "gpu_memory_gib": [None, 20.0], "gpu_use_percent": [None, 97],
        "gpu_temperature_c": [None, 61], "gpu_power_w": [None, 651.26],
        "gpu_throttling": ["", "sw power cap, hw thermal slowdown"]}


def test_counters_are_added_to_what_earlier_launches_used(tmp_path):
    meter = MachineMeter(tmp_path, ["GPU-0", "GPU-1"])
    meter._joules = 3.6e6  # of earlier launches: 3.6 MJ are 1 kWh
    for counters, kwh in (([5e6, None], None), ([5e6, 7e6], 1.0), ([5e6, None], 1.0),
                          ([8.6e6, 10.6e6], 3.0), ([], 3.0), ([0.0, 0.0], 3.0)):  # set to 0
        meter._add_energy(counters)
        assert meter.energy_kwh == (None if kwh is None else pytest.approx(kwh))


def test_the_driver_is_asked_for_the_gpus_that_the_run_uses(monkeypatch):
    monkeypatch.setattr(launch.torch.cuda, "get_device_properties",
                        lambda index: SimpleNamespace(uuid="cdab"[index]))
    monkeypatch.setattr(launch.torch.version, "cuda", "13.0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    process = Process(0, 0, 2, launch.torch.device("cuda", 0))
    assert gpu_uuids(process) == ["GPU-c", "GPU-d"]
    assert gpu_uuids(replace(process, device=launch.torch.device("cpu"))) == []
    monkeypatch.setattr(launch.torch.version, "cuda", None)  # PyTorch for AMD
    assert gpu_uuids(process) == []


def with_gpus(workplace, *arguments):
    """Train with two GPUs of a stand-in, each reading adds 1 kWh; return the output."""
    return succeeded(forked(
        "tests/support/torchrun_workers.py",
        ["train-with-gpus", str(workplace.root), *workplace.arguments("tiny", *arguments)],
        num_processes=1)).stdout


def test_a_run_records_its_gpus_and_its_energy_over_launches(workplace):
    run_dir = workplace.add_run()
    workplace.add_dataset()
    with_gpus(workplace, "--max-steps", "6")
    before = summary_of(run_dir)["energy_kwh"]
    assert before >= 1.0  # from the first reading to the last
    output = with_gpus(workplace)
    after = summary_of(run_dir)["energy_kwh"]
    assert after >= before + 1.0
    assert f"energy: {after:,.3f} kWh, of the GPUs of rank 0's machine" in output
    records = [r for r in read_lines(run_dir / "metrics.jsonl") if "train_loss" in r]
    readings = [record for record in records if "gpu_memory_gib" in record]
    assert [reading["gpu_memory_gib"] for reading in readings] == [[20, 20]] * len(readings)
    assert HOST < set(readings[0]) and readings[-1]["energy_kwh"] >= before
    assert readings[0] is records[0] and len(readings) >= 2  # the first of each launch
    assert all(0 < record["mfu"] < 1 for record in records)
