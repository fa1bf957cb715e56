"""Started by tests under torchrun: what has to be looked at inside several processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_train import Options, Trainer, build_state, prepare
from launching import Agreement, process_group, this_process
from run_config import UserError
from run_metrics import StepWindow


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])
    process = this_process()
    print_result = print if process.is_main else (lambda *_: None)
    if name in AGREEMENTS:
        check_agreement(Agreement(process.rank, process.world_size), AGREEMENTS[name])
        return
    with process_group(process):
        if name == "count-all-reduces":
            print_result(json.dumps(count_all_reduces(root, process)))
        elif name == "average-losses":
            print_result(json.dumps(average_losses(process)))


def count_all_reduces(root: Path, process) -> list[int]:
    """All-reduces of gradients after each microbatch of one global step."""
    options = Options("tiny", None, root / "datasets", root / "runs", None, None, False)
    job = prepare(options, process, lambda step, part: part())
    trainer = Trainer(job, process, build_state(job, process))
    counted, after_each = [0], []

    def hook(group, bucket):
        counted[0] += 1
        return allreduce_hook(group, bucket)

    trainer.parallel_model.register_comm_hook(dist.group.WORLD, hook)
    scale = trainer.state.scaler.scale

    def watched_scale(loss):
        after_each.append(counted[0])  # before this microbatch's backward
        return scale(loss)

    trainer.state.scaler.scale = watched_scale
    trainer.train_step(0, trainer.batches())
    return [*after_each[1:], counted[0]]


def average_losses(process) -> dict[str, float]:
    window = StepWindow(process.device)
    for step in range(4):
        window.add(torch.tensor(float(step + 10 * process.rank)), torch.tensor(2.0 * step))
    return vars(window.summarise()) | {"since_checkpoint": window.take_loss_since_checkpoint()}


def mistake(agreement: Agreement, rank: int) -> None:
    def find_mistake() -> None:
        if rank == 1:
            raise UserError("rank 1 lacks its file")

    agreement.on("second", find_mistake)


def crash(agreement: Agreement, rank: int) -> None:
    def fail() -> None:
        if rank == 1:
            raise MemoryError("no room")

    agreement.on("second", fail)


def difference(agreement: Agreement, rank: int) -> None:
    agreement.same("equal", "a")
    agreement.same("unequal", f"rank {rank}")


AGREEMENTS = {"mistake": mistake, "crash": crash, "difference": difference}


def check_agreement(agreement: Agreement, disagree) -> None:
    """Both ranks must stop, and one must tell."""
    rank = agreement._rank
    assert agreement.on("first", lambda: rank) == rank
    try:
        disagree(agreement, rank)
    except UserError as error:
        agreement.tell_once(f"Error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
