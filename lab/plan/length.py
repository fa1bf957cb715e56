"""The length of a run that a budget buys, at the speed that was measured for the run."""

from bisect import bisect_right
from contextlib import suppress
from dataclasses import replace

from basics.checkpoint_files import named_as_checkpoints
from basics.errors import UserError, one_line
from basics.gpu_readings import read_gpus
from basics.json_files import found_object, set_number
from basics.text import counted
from lab.plan.estimate import UNLIMITED_TOKENS, flops_of
from lab.plan.tables import amount
from processes.run_lock import lock_run
from reporting.speed import SPEED_CHECK_STEPS, flops_per_token
from run_config import Run
from tokens.batch_plan import plan_batches

SPEED_KEYS = ("microbatch_size", "gradient_accumulation_steps", "global_batch_size", "optimizer",
              "use_amp", "precision", "residual_dtype", "all_reduce_dtype", "compile", "attention",
              "head_chunks", "activation_checkpointing", "deterministic")  # of train.json
MAX_TOKENS, MAX_PROCESSES = 2**50, 4096


def save_length(run: Run, budget: float) -> str:
    """Write the `min_train_tokens` that a budget in US$ buys into `train.json`; return a report.

    Raises:
        UserError: the price or the speed is not known, or the run has begun with another length.
    """
    price = run.train.usd_per_hour
    if price is None:
        raise UserError(f"{run.train_path}: --save needs the machine's price; set usd_per_hour, or"
                        " pass --usd-per-hour")
    lock_run(run.run_dir)  # a launch keeps the length that it has read
    speed, world_size, measured = measured_speed(run)
    one_token = run.train.model_copy(update={"min_train_tokens": 1})
    step = plan_batches(replace(run, train=one_token), world_size=world_size,
                        file_tokens=UNLIMITED_TOKENS)
    flops_per_usd = speed / world_size * flops_per_token(run.model) * 3600 / price  # of a process

    def usd(num_steps: int) -> float:
        return flops_of(run, replace(step, num_steps=num_steps)) / flops_per_usd

    num_steps = bisect_right(range(1, MAX_TOKENS // step.tokens_per_step + 1), budget, key=usd)
    if not num_steps:
        raise UserError(f"--budget {budget:g}: buys no step, which costs US${usd(1):.2g}")
    present = -(-run.train.min_train_tokens // step.tokens_per_step)
    if num_steps != present and named_as_checkpoints(run.checkpoints_dir):
        raise UserError(f"{run.run_dir}: has checkpoints, so its length cannot become"
                        f" {counted(num_steps, 'step')}; to start over with that, move checkpoints/"
                        " away")
    tokens, cost = num_steps * step.tokens_per_step, usd(num_steps)
    set_number(run.train_path, "min_train_tokens", tokens)
    return (f"saved in {run.train_path}: min_train_tokens {tokens}"
            f" ({counted(num_steps, 'step')})\n"
            f"{amount(cost / price)} hours, US${amount(cost)} at {price:g} an hour: training and"
            f" validation, without start-up and checkpoints\nmeasured: {measured}")


def measured_speed(run: Run) -> tuple[float, int, str]:
    """Return tokens per second, on how many processes, and where: of a launch, or the search."""
    gpus = [gpu.name for gpu in read_gpus() if gpu.name]
    newest_first = sorted((run.summary_path, run.search_path), reverse=True,
                          key=lambda path: path.stat().st_mtime if path.exists() else 0)
    for path in newest_first:
        record = found_object(path)
        with suppress(LookupError, TypeError, ValueError, ArithmeticError):  # no file, or damage
            speed, machine = record["tokens_per_second"], record["machine"]
            if launch := record.get("this_launch"):  # without its first step, which compiles
                is_long = launch["steps"] >= SPEED_CHECK_STEPS - 1
                speed = is_long and launch["tokens"] / launch["seconds"]
            device, world_size = str(machine["device"]), int(machine["processes"])
            if (0 < speed < 2**53 and 1 <= world_size <= MAX_PROCESSES
                    and (not gpus or gpus.count(device) == world_size)
                    and record["model"] == run.model.model_dump()
                    and all(record["train"][key] == getattr(run.train, key) for key in SPEED_KEYS)):
                return speed, world_size, (f"{speed:,.0f} tokens/s on {world_size}x"
                                           f" {one_line(device)} ({path.name})")
    raise UserError(f"{run.run_dir}: no speed was measured with its settings on this machine; run"
                    f" ddp_train.py {run.name} --find-max-microbatch --save")
