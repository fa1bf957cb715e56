"""Long runs leak nothing; every run exits cleanly: `--thorough` (2,000 steps), `--exits 100`."""

import time
from pathlib import Path

import pytest

from tests.support.workplace import children_of, ended, start_forked, succeeded

WARM_UP_STEPS = 1000  # the allocator still grows by a few MiB in the first steps
EVENTFUL = {"validation_interval": 50, "keep_checkpoints": 2}
MIB = 2**20


def held_by(pid):
    """Return what a process holds now."""
    status = dict(line.split(":", 1)
                  for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {"private bytes": int(status["RssAnon"].split()[0]) * 1024,
            "threads": int(status["Threads"]),
            "files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


@pytest.mark.thorough
def test_steps_leak_no_memory_files_or_threads(workplace, tmp_path, num_steps):
    """With validations, checkpoints and charts, after 1,000 steps of warm-up."""
    num_steps += WARM_UP_STEPS
    workplace.add_dataset(num_tokens=num_steps * 128 + 1000)
    run_dir = workplace.add_run(train=EVENTFUL | {"min_train_tokens": num_steps * 128})
    metrics_path = run_dir / "metrics.jsonl"
    process, outputs = start_forked("ddp_train.py", workplace.arguments("tiny"), num_processes=2,
                                    folder=tmp_path)
    samples: dict[int, list[dict[str, int]]] = {}  # by process
    while process.is_alive():
        reported = metrics_path.read_text().count('"train_loss"') * 10 if (
            metrics_path.exists()) else 0
        workers = children_of(process.pid)
        if WARM_UP_STEPS <= reported <= num_steps - 50 and len(workers) == 2:
            for pid in workers:
                samples.setdefault(pid, []).append(held_by(pid) | {"step": reported})
        time.sleep(0.05)
    succeeded(ended(process, outputs))
    assert len(samples) == 2
    for taken in samples.values():
        third = len(taken) // 3
        early, late = taken[:third], taken[-third:]
        assert third >= 10 and late[0]["step"] > early[-1]["step"]
        grown = max(s["private bytes"] for s in late) - max(s["private bytes"] for s in early)
        print(f"\n{grown / MIB:+.2f} MiB between the first and the last third of steps"
              f" {taken[0]['step']} to {taken[-1]['step']}")
        assert grown < 1 * MIB
        for name in ("threads", "files"):  # compare minima: some are short-lived
            assert min(s[name] for s in late) <= min(s[name] for s in early)


def test_runs_exit_cleanly(workplace, num_exits):
    workplace.add_dataset()
    for number in range(num_exits):
        workplace.add_run(f"run-{number}")
        result = succeeded(workplace.torchrun(2, f"run-{number}", "--max-steps", "2"))
        assert result.stderr == ""
    print(f"\n{num_exits} of {num_exits} runs ended cleanly")


@pytest.fixture
def num_steps(request):
    return 2000 if request.config.getoption("--thorough") else 300


@pytest.fixture
def num_exits(request):
    return request.config.getoption("--exits")
