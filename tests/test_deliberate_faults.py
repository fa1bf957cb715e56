"""The list of deliberate faults can be tried: each piece of code and test is where it should be."""

from tests.support.deliberate_faults import read_faults
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
    "dropout",
    "flops",
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
    "schedule",
    "second-copy",
    "seeds",
    "statistics",
    "stop-signals",
    "token-files",
    "watchdog",
    "growth",
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
