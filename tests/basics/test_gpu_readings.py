import sys

import pynvml
import pytest
import torch

from basics.gpu_readings import GpuReading, nvml_failure, read_gpus
from tests.support.fake_nvml import H100, FakeNvml


@pytest.fixture
def install(monkeypatch):
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_all_that_a_gpu_tells_is_read(install):
    install(FakeNvml({"GPU-1": H100}))
    assert read_gpus() == [GpuReading(
        name="NVIDIA H100 80GB HBM3", uuid="GPU-1", memory_used_gib=20, memory_total_gib=80,
        use_percent=97, temperature_c=61, power_w=651.25, power_limit_w=700, energy_joules=9000.5,
        sm_clock_mhz=1755, max_sm_clock_mhz=1980,
        throttle_reasons=("sw power cap", "hw thermal slowdown"), uncorrected_ecc_errors=0,
        driver_version="580.65.06")]
    assert nvml_failure() is None


def test_the_gpus_of_a_run_are_read_in_its_order(install):
    install(FakeNvml({f"GPU-{n}": H100 | {"nvmlDeviceGetTemperatureV": n} for n in range(4)}))
    assert [gpu.temperature_c for gpu in read_gpus()] == [0, 1, 2, 3]
    assert [gpu.temperature_c for gpu in read_gpus(["GPU-3", "GPU-1"])] == [3, 1]


def test_what_a_gpu_does_not_tell_is_none_and_zero_is_a_value(install):
    install(FakeNvml({"GPU-1": {"nvmlDeviceGetPowerUsage": pynvml.NVMLError_NoPermission(),
                                "nvmlDeviceGetCurrentClocksEventReasons": 1,  # idle
                                "nvmlDeviceGetTotalEnergyConsumption": 0,
                                "nvmlDeviceGetTemperatureV": 0}}))
    assert read_gpus() == [GpuReading(uuid="GPU-1", driver_version="580.65.06", throttle_reasons=(),
                                      energy_joules=0, temperature_c=0)]


@pytest.mark.parametrize("lacks", [True, False])
def test_old_drivers_and_packages_are_asked_in_their_words(install, lacks):
    new = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV")
    answers = {key: value for key, value in H100.items() if key not in new}
    install(FakeNvml({"GPU-1": answers | {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x20,
                                          "nvmlDeviceGetTemperature": 55}},
                     lacks=new if lacks else ()))
    (gpu,) = read_gpus()
    assert (gpu.throttle_reasons, gpu.temperature_c) == (("sw thermal slowdown",), 55)


def test_a_lost_gpu_keeps_its_place(install):
    install(FakeNvml({"GPU-1": "lost", "GPU-2": H100}))
    lost, found = read_gpus()
    assert lost == GpuReading(driver_version="580.65.06") and found.uuid == "GPU-2"
    assert read_gpus(["GPU-2", "GPU-1", "GPU-3"]) == [found, lost, lost]


def test_without_a_driver_or_its_package_there_are_no_gpus(install):
    install(FakeNvml({"GPU-1": H100}, init=pynvml.NVMLError_DriverNotLoaded()))
    assert read_gpus() == [] and nvml_failure() == "Driver Not Loaded"
    install(None)
    assert read_gpus() == [] and "pynvml" in nvml_failure()


@pytest.mark.gpu
def test_pytorchs_id_is_the_drivers():
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    (gpu,) = read_gpus([uuid])
    assert gpu.uuid == uuid and gpu.name == torch.cuda.get_device_name(0)
    assert 0 < gpu.memory_used_gib < gpu.memory_total_gib and gpu.temperature_c > 0
