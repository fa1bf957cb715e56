"""The wheel works without a checkout: in an empty folder, with only its own files."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.workplace import PROJECT_DIR, TINY_MODEL, TINY_TRAIN

UV = os.environ.get("UV") or shutil.which("uv")


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_the_installed_commands_work_in_an_empty_folder(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(PROJECT_DIR, source, ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "tests", "datasets", "checkpoints", "sweeps"))
    subprocess.run([UV, "build", "--wheel", "--quiet", "--out-dir", tmp_path, source], check=True)
    wheel, = tmp_path.glob("*.whl")
    site, folder = tmp_path / "site", tmp_path / "folder"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        entry_points = archive.read(next(
            name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    shutil.rmtree(source)
    folder.mkdir()
    commands = dict(line.split(" = ") for line in entry_points.splitlines() if " = " in line)

    def call(command, *arguments):
        module, function = commands[command].split(":")
        # As the script that an installer writes; the packages are those of this environment.
        code = (f"import sys; from {module} import {function} as run\n"
                f"assert run.__code__.co_filename.startswith({str(site)!r})\nsys.exit(run())")
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""})
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    (folder / "text").mkdir()
    for number in range(9):
        (folder / f"text/{number}.txt").write_text(f"document {number}, " * 40)
    call("ddp-train-prepare", "text", "datasets/mine", "--tokenizer", "bytes",
         "--validation-fraction", "0.3")
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/model.json").write_text(json.dumps(TINY_MODEL | {"vocab_size": 257}))
    (folder / "runs/mine/train.json").write_text(json.dumps(TINY_TRAIN | {"dataset": "mine"}))
    assert "mine finished at step 24 of 24" in call("ddp-train", "mine")
    assert "mine" in call("lab", "list")
    assert "0.25M" in call("lab", "plan", "demo")
    assert (folder / "runs/demo/train.json").is_file()
