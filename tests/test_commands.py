"""How commands begin and end: Ctrl-C, errors as one line, memory, files, facts of the machine."""

import errno
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pynvml
import pytest
import torch
from safetensors import SafetensorError

import lab.__main__
import prepare_dataset
from basics import device, machine
from basics.entry_points import CHOSEN_BY_USER, SPIN_COUNT
from basics.errors import (
    DISK_FULL,
    FAILED,
    UserError,
    as_os_error,
    describe,
    is_out_of_gpu_memory,
    is_out_of_memory,
    says_out_of_memory,
    why_not_written,
)
from basics.files import append_whole, cache_dir, read_regular_file, replacing, write_atomically
from basics.gpu_readings import GpuReading, nvml_failure, read_gpus
from processes.command_line import check_before_torch
from processes.distributed import num_gpus
from tests.support.runs import with_deadlines
from tests.support.stand_ins import H100, FakeNvml
from tests.support.workplace import PROJECT_DIR, run_command

# Runs a command, and presses Ctrl-C as soon as it imports a module.
CTRL_C = """
import importlib.abc, os, runpy, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
how = runpy.run_path if sys.argv[1].endswith(".py") else runpy.run_module
del sys.argv[0]
how(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "script", "arguments"),
    [
        ("click", "ddp_train.py", ["tiny"]),
        ("torch", "ddp_train.py", ["tiny"]),
        ("click", "prepare_dataset.py", ["--help"]),
        ("lab.list_runs", "lab", ["list"]),
    ],
)
def test_ctrl_c_while_a_command_imports_is_one_line(workplace, module, script, arguments):
    workplace.add_run()
    if script == "ddp_train.py":
        arguments = workplace.arguments(*arguments)
    result = run_command(
        sys.executable, "-c", CTRL_C.replace("sys.argv[0]", repr(module), 1), script, *arguments
    )
    assert (result.returncode, result.stdout) == (130, ""), result.stderr
    assert result.stderr.strip() == "Interrupted"


@pytest.mark.parametrize("chosen", [None, *sorted(CHOSEN_BY_USER)])
def test_output_is_no_error_and_threads_do_not_spin_unless_a_person_wants_it(monkeypatch, chosen):
    for name in CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    code = (
        "import os; from basics.entry_points import *; begin_command(); print('a→b');"
        "print({name: os.environ[name] for name in CHOSEN_BY_USER & os.environ.keys()})"
    )
    result = run_command(
        sys.executable, "-c", code, PYTHONIOENCODING="latin-1", **{chosen: "7"} if chosen else {}
    )
    wanted = {chosen: "7"} if chosen else {"GOMP_SPINCOUNT": SPIN_COUNT}
    assert result.stdout == f"a\\u2192b\n{wanted}\n", result.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_with_closed_output_commands_work_and_write_into_no_file(tmp_path, closed):
    """As cron and daemons start them."""
    code = (
        "import subprocess, sys; from basics.entry_points import *; begin_command();"
        f" file = open({str(tmp_path / 'file')!r}, 'w'); print('said'); sys.stdout.flush();"
        "subprocess.run(['sh', '-c', 'echo said; echo said >&2'], check=True); file.close()"
    )
    shell = f'"$0" -c "$1" {closed}'
    result = run_command("sh", "-c", shell, sys.executable, code)
    assert result.returncode == 0 and "said" not in result.stdout, result.stderr
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "closed pipe"])
@pytest.mark.parametrize(
    ("begin", "arguments"),
    [
        (lab.__main__.main, ["--help"]),
        (lab.__main__.main, ["list", "--json"]),
        (lab.__main__.main, ["compare", "--published"]),
        (lab.__main__.main, ["list", "--follow"]),
        (prepare_dataset.run, ["--help"]),
        (check_before_torch, ["--help"]),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_a_closed_pipe_none(
    workplace, monkeypatch, capsys, begin, arguments, is_full
):
    workplace.runs_dir.mkdir()
    monkeypatch.chdir(workplace.root)
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    monkeypatch.setattr("processes.command_line.gc", Mock())  # it would stay disabled
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as closed_pipe:
        output = full if is_full else closed_pipe
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as ended:
            begin()
        output.flush()  # nothing is left that Python could not write at its end
    line = "Error: standard output: cannot be written: No space left on device; make room\n"
    wanted = (DISK_FULL, line) if is_full else (FAILED, "")
    assert (ended.value.code, capsys.readouterr().err) == wanted


def test_a_closed_output_ends_no_run(workplace):
    workplace.add_run(train={"min_train_tokens": 64})
    workplace.add_dataset()
    command = [sys.executable, "ddp_train.py", *workplace.arguments("tiny")]
    result = run_command("sh", "-c", '"$@" >&-', "sh", *command)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    assert (workplace.runs_dir / "tiny/checkpoints/latest").exists()


OLD_PYTHON = "import sys; sys.version_info = (3, 10, 9); sys.version = '3.10.9 (x)'"


@pytest.mark.parametrize(
    ("option", "code", "said"),
    [
        ("-c", OLD_PYTHON, "this is Python 3.10.9; Python 3.11 or newer is needed"),
        ("-Sc", "import sys", "the packages are not installed (click, torch)"),
    ],
)
@pytest.mark.parametrize("script", ["ddp_train.py", "prepare_dataset.py", "lab/__main__.py"])
def test_an_old_python_and_missing_packages_are_one_line(option, code, said, script):
    run = f"import runpy; sys.path.insert(0, '.'); runpy.run_path({script!r}, run_name='__main__')"
    result = run_command(sys.executable, option, f"{code}; {run}")
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr and result.stderr.count("\n") == 1


NCCL = """NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), error: No space left"""


def test_of_an_nccl_error_the_reason_is_kept():
    for text in (NCCL, NCCL.replace("Last error:\n", "NCCL Last Error: ")):  # old and new PyTorch
        assert describe(RuntimeError(text)) == (
            "RuntimeError: Error while creating shared memory segment /dev/shm/nccl-1"
            " (size 9637888), error: No space left"
        )
    assert describe(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert describe(RuntimeError("Last error:")) == "RuntimeError: Last error:"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "; make room"),
        (errno.EIO, "; look at the disk"),
        (errno.EACCES, ""),
        (errno.EROFS, ""),
    ],
)
def test_only_a_full_disk_wants_room(number, advice):
    assert why_not_written(OSError(number, os.strerror(number))) == os.strerror(number) + advice
    for text in (f"I/O error: x (os error {number})", f"IoError(Os {{ code: {number}, kind: K }})"):
        of_a_library = as_os_error(SafetensorError(f"Error while serializing: {text}"))
        assert why_not_written(of_a_library) == os.strerror(number) + advice


NOT_STARTED = "CUBLAS_STATUS_NOT_INITIALIZED when calling `{}(handle)`"


GPU_MEMORY = (
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDA error: " + NOT_STARTED.format("cublasCreate"),
    "RuntimeError: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: cudaErrorMemoryAllocation",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
    "ncclSystemError: Failed to CUDA calloc async",
)
HOST_MEMORY = (
    MemoryError(),
    MemoryError("out of memory"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
)
NO_MEMORY = (
    "CUDA error: " + NOT_STARTED.format("cublasGemmEx"),
    "out of resource: shared memory, Required: 262144, Hardware limit: 232448.",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm, Required: 262144",
    "CUDA error: an illegal memory access was encountered",
    "a path named /memory/out",
)


@pytest.mark.parametrize(
    ("error", "of_memory", "of_gpu"),
    [
        *((RuntimeError(text), True, True) for text in GPU_MEMORY),
        *((error, True, False) for error in HOST_MEMORY),
        *((RuntimeError(text), False, False) for text in NO_MEMORY),
    ],
    ids=repr,
)
def test_errors_that_mean_that_memory_ran_out(error, of_memory, of_gpu):
    assert (is_out_of_memory(error), is_out_of_gpu_memory(error)) == (of_memory, of_gpu)
    if type(error) is RuntimeError:
        assert says_out_of_memory(str(error)) is of_memory


def test_what_led_to_an_error_counts_unless_it_is_suppressed():
    for how, counts in (("from", True), ("handling", True), ("from none", False)):
        first, error = torch.OutOfMemoryError("no text that names it"), RuntimeError("second")
        error.__context__ = first
        error.__cause__ = first if how == "from" else None
        error.__suppress_context__ = how != "handling"
        assert is_out_of_memory(error) is is_out_of_gpu_memory(error) is counts, how


# Is torchrun: starts two processes, the second of which gets a stop signal once the first one works
# or has failed; waits for it, and says whether it was ended.
TORCHRUN = """
import os, signal, sys
from basics.entry_points import _end_with_torchrun
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
reader, writer = os.pipe()
for number in range(2):
    process = os.fork()
    if not process:
        os.close(writer)
        if number == int(sys.argv[1]):
            os._exit(0)
        _end_with_torchrun(os.getppid(), signal.SIGTERM) if number else os.read(reader, 1)
        os._exit(0)
    if number == int(sys.argv[1]):
        os.waitpid(process, 0)
os.waitpid(process, 0)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("failed", "nodes", "is_ended"), [(9, 1, True), (0, 1, False), (9, 2, False)]
)
def test_a_stop_signal_ends_torchrun_unless_that_has_sent_it(failed, nodes, is_ended):
    environment = os.environ | {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": str(nodes)}
    ended = subprocess.run(
        [sys.executable, "-c", TORCHRUN, str(failed)], cwd=PROJECT_DIR, env=environment
    )
    assert ended.returncode == (7 if is_ended else 0)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_user_without_a_name_or_a_home_trains(workplace):
    """As with `docker run --user`."""
    workplace.add_dataset()
    run_dir = workplace.add_run()
    other_user = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    if subprocess.run([*other_user, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    result = subprocess.run(
        [
            *other_user,
            sys.executable,
            "ddp_train.py",
            *workplace.arguments("tiny", "--max-steps", "2"),
        ],
        capture_output=True,
        text=True,
        cwd=PROJECT_DIR,
        env={"PATH": os.environ["PATH"], "HOME": "/proc", "TMPDIR": str(workplace.root)}
        | with_deadlines(charts=200),  # drawn at the lowest priority, beside other tests
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and (run_dir / "loss-chart.png").exists()


def test_caches_are_in_a_place_of_ones_own_where_home_cannot_be_written(tmp_path, monkeypatch):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    own = temporary / f"ddp-train-{os.getuid()}"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert cache_dir("x") == home / ".cache/ddp-train/x" and not own.exists()
    shutil.rmtree(home)
    home.write_text("no directory")
    assert cache_dir("x") == own / "x" and own.stat().st_mode & 0o777 == 0o700
    assert cache_dir("x") == own / "x"  # again
    shutil.rmtree(own)
    own.symlink_to(tmp_path)  # that somebody else has made
    with pytest.raises(UserError, match="neither the home directory nor .* can be written"):
        cache_dir("x")


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_and_an_error_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]
    with replacing(path, durable=True) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_no_link_is_followed_and_no_large_file_read(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".a.json.partial").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "a.json", "näu")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "näu"
    assert names(tmp_path) == ["a.json", "victim"]
    append_whole(tmp_path / "b", "12")
    append_whole(tmp_path / "b", "3")
    assert read_regular_file(tmp_path / "b") == "123"
    with pytest.raises(OSError, match="3 bytes"):
        read_regular_file(tmp_path / "b", max_bytes=2)
    (tmp_path / "c").symlink_to(tmp_path / "b")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular_file(tmp_path / "c")


# Texts of torch.cuda.init(), what is told of them, and the remedy.
PREFIX = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before"
    " calling NumCudaDevices() that might have already set an error? Error "
)
CASES = {
    "The NVIDIA driver on your system is too old (found version 12040). Please update": (
        "The NVIDIA driver on your system is too old (found version 12040)",
        "setup_lambda.sh",
    ),
    f"{PREFIX}802: system not yet initialized": (
        "Error 802: system not yet initialized",
        "docs/troubleshooting.md",
    ),
    f"{PREFIX}999: unknown error\nand": ("Error 999: unknown error", "nvidia-smi"),
    "No CUDA GPUs are available": ("No CUDA GPUs are available", "nvidia-smi"),
}


@pytest.fixture
def devices(monkeypatch, tmp_path):
    """A machine whose GPUs PyTorch was built for, and does not find; return its /dev."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("sees_gpus", [True, False])
def test_why_pytorch_cannot_use_the_gpus_is_named_with_what_helps(devices, monkeypatch, sees_gpus):
    if sees_gpus:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    else:
        (devices / "nvidia0").touch()  # the driver's library cannot be asked
    for text, (cause, remedy) in CASES.items():
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(text)))
        with pytest.raises(UserError, match="this machine has GPUs, but PyTorch") as caught:
            num_gpus()
        assert f"use them: {cause}; " in str(caught.value) and remedy in str(caught.value)


def test_a_machine_without_gpus_and_one_that_hides_them_train_on_the_cpu(devices, monkeypatch):
    assert num_gpus() == 0
    (devices / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_gpus() == 0


def git(project, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=project, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_codes_version_is_the_commit_or_the_release_with_a_digest(tmp_path, monkeypatch):
    (tmp_path / "ddp_train.py").write_text("first")
    monkeypatch.setattr(machine, "PROJECT_DIR", tmp_path)
    assert re.fullmatch(r"[0-9.]+\+[0-9a-f]{12}", machine.code_version())
    git(tmp_path, "init", "-q"), git(tmp_path, "add", "."), git(tmp_path, "commit", "-qm", "first")
    first, commit = machine.code_version(), git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert re.fullmatch(rf"{commit}\+[0-9a-f]{{12}}", first)
    for name in ("README.md", "six.py"):  # not the code; of another package
        (tmp_path / name).write_text("")
        assert machine.code_version() == first
    (tmp_path / "ddp_train.py").write_text("second")
    assert machine.code_version() != first


@pytest.fixture
def install(monkeypatch):
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_all_that_a_gpu_tells_is_read_and_what_it_does_not_tell_is_none(install):
    install(FakeNvml({"GPU-1": H100}))
    assert read_gpus() == [
        GpuReading(
            name="NVIDIA H100 80GB HBM3",
            uuid="GPU-1",
            memory_used_gib=20,
            memory_total_gib=80,
            use_percent=97,
            temperature_c=61,
            power_w=651.25,
            energy_joules=9000.5,
            throttle_reasons=("sw power cap", "hw thermal slowdown"),
            uncorrected_ecc_errors=0,
            driver_version="580.65.06",
        )
    ]
    assert nvml_failure() is None
    install(FakeNvml({"GPU-1": {"nvmlDeviceGetPowerUsage": pynvml.NVMLError_NoPermission()}}))
    assert read_gpus() == [GpuReading(uuid="GPU-1", driver_version="580.65.06")]


def test_the_gpus_of_a_run_keep_their_order_and_a_lost_one_its_place(install):
    install(FakeNvml({"GPU-1": "lost", "GPU-2": H100}))
    lost, found = read_gpus()
    assert lost == GpuReading(driver_version="580.65.06") and found.uuid == "GPU-2"
    assert read_gpus(["GPU-2", "GPU-1", "GPU-3"]) == [found, lost, lost]


def test_without_a_driver_there_are_no_gpus(install):
    install(FakeNvml({"GPU-1": H100}, init=pynvml.NVMLError_DriverNotLoaded()))
    assert read_gpus() == [] and nvml_failure() == "Driver Not Loaded"


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    unlimited = machine.available_ram_gib()
    for name, text in {
        "memory.max": "max",
        "memory.current": "5",
        "memory.stat": "inactive_file 1\nactive_file 2\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert machine.available_ram_gib() == pytest.approx(unlimited, rel=0.2)
    (tmp_path / "memory.max").write_text(str(2**20 + 2))
    assert machine.available_ram_gib() == 2**20 / 2**30
