"""How commands begin: Ctrl-C while they import, and what a terminal cannot show."""

import sys

import pytest

from tests.support.workplace import run_command

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


@pytest.mark.parametrize(("module", "script", "arguments"), [
    ("click", "ddp_train.py", ["tiny"]), ("torch", "ddp_train.py", ["tiny"]),
    ("click", "prepare_dataset.py", ["--help"]), ("click", "lab", ["--help"]),
    ("lab.list_runs", "lab", ["list"])])
def test_ctrl_c_while_a_command_imports_is_one_line(workplace, module, script, arguments):
    workplace.add_run()
    if script == "ddp_train.py":
        arguments = workplace.arguments(*arguments)
    result = run_command(sys.executable, "-c", CTRL_C.replace("sys.argv[0]", repr(module), 1),
                         script, *arguments)
    assert (result.returncode, result.stdout) == (130, ""), result.stderr
    assert result.stderr.strip() == "Interrupted"


def test_output_that_is_not_utf_8_is_no_error():
    code = "from basics.entry_points import begin_command as b; b(); print('a→b')"
    result = run_command(sys.executable, "-c", code, PYTHONIOENCODING="latin-1")
    assert result.stdout == "a\\u2192b\n", result.stderr
