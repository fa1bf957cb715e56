"""The list of deliberate faults can be tried: each piece of code and test is where it should be.

And `.ci/docs`, which tries them and writes the result.
"""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.support import deliberate_faults, generated_docs
from tests.support.deliberate_faults import UNBROKEN, append_verdict, read_faults, read_verdicts
from tests.support.workplace import PROJECT_DIR

AREAS = {
    "accumulation",
    "benchmarks",
    "best",
    "budget",
    "checkpoint",
    "clipping",
    "cross-entropy",
    "data",
    "ddp",
    "doctor",
    "dropout",
    "flops",
    "growth",
    "judge",
    "lock",
    "loss-scaler",
    "manifest",
    "microbatch-search",
    "model",
    "muon",
    "optimizer",
    "plan",
    "preparation",
    "prices",
    "pruning",
    "reference",
    "reports",
    "resume",
    "sampled-softmax",
    "schedule",
    "second-copy",
    "seeds",
    "statistics",
    "stop-signals",
    "token-files",
    "watchdog",
}


def problem_of(fault):
    """Return why a fault cannot be tried; empty if it can."""
    try:
        compile(fault.broken(), fault.file, "exec")
    except (ValueError, SyntaxError) as error:
        return f"{fault.file}: {error}"
    for test in fault.selected:
        file, _, function = test.partition("::")
        path = PROJECT_DIR / file
        if not path.is_file() or f"def {function.partition('[')[0]}" not in path.read_text():
            return f"{fault.area}: there is no test {test}"
    is_complete = fault.selected and fault.effect and fault.fault != fault.code
    return "" if is_complete else f"{fault.area}: {fault.code!r}: incomplete"


def test_every_fault_can_be_tried():
    faults = read_faults()
    assert len(faults) >= 80 and {fault.area for fault in faults} == AREAS
    problems = list(filter(None, map(problem_of, faults)))
    assert not problems, "\n".join(problems)


def test_the_generated_parts_of_documents_are_current():
    generated_docs.main(["--check"])


def test_an_old_part_is_named_and_renewed(tmp_path):
    current = (PROJECT_DIR / "RELIABILITY.md").read_text()
    page = tmp_path / "RELIABILITY.md"
    page.write_text(generated_docs.renewed(current, "number-of-faults", "7"))
    with pytest.raises(SystemExit, match="number-of-faults is not current; run: .ci/docs"):
        generated_docs.main(["--check"], tmp_path)
    generated_docs.main([], tmp_path)
    assert page.read_text() == current
    page.write_text(current.replace("<!-- end: number-of-faults -->", ""))
    with pytest.raises(ValueError, match="wanted once"):
        generated_docs.main([], tmp_path)


def test_a_run_of_all_faults_is_written_once_all_are_tried(tmp_path, monkeypatch):
    """A run that was interrupted writes nothing, and one of other code does not count."""
    page, results = tmp_path / "RELIABILITY.md", tmp_path / "faults.jsonl"
    current = (PROJECT_DIR / "RELIABILITY.md").read_text()
    page.write_text(current)
    monkeypatch.setattr(generated_docs, "FAULTS_PATH", results)
    first, *others = read_faults()
    to_try = [others]

    def run(command, **_):
        assert command[-2:] == ["--results", str(results)]
        for fault in to_try[0]:
            append_verdict(results, fault.key, is_caught=fault is not others[0])
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(generated_docs, "subprocess", SimpleNamespace(run=run))
    results.write_text(json.dumps({"code": "other", "fault": first.key, "caught": True}))
    with pytest.raises(SystemExit, match=f"{len(others)} of {len(others) + 1} faults were tried"):
        generated_docs.main(["faults"], tmp_path)
    assert page.read_text() == current
    to_try[0] = [first]
    generated_docs.main(["faults"], tmp_path)
    assert f"<!-- begin: faults -->{len(others)} of {len(others) + 1}, 20" in page.read_text()


def test_a_run_of_the_faults_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    results = tmp_path / "faults.jsonl"
    faults = [fault for fault in read_faults() if fault.area == "ddp"]
    results.write_text('{"code": "')  # a kill cuts a line
    for key in (UNBROKEN, *(fault.key for fault in faults)):
        append_verdict(results, key, is_caught=True)
    assert len(read_verdicts(results)) == len(faults) + 1  # each fault has a key of its own
    monkeypatch.setattr(deliberate_faults, "PRELOADED", ())
    monkeypatch.setattr(deliberate_faults, "run_tests", lambda *_: pytest.fail("tried again"))
    monkeypatch.setattr(sys, "argv", ["", "--area", "ddp", "--results", str(results)])
    with pytest.raises(SystemExit) as ended:
        deliberate_faults.main()
    assert not ended.value.code
    assert f"{len(faults)} of {len(faults)} faults caught" in capsys.readouterr().out
