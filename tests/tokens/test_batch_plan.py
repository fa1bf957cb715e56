from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basics.errors import UserError
from ddp_train import microbatch_indices
from run_config import load_run
from tokens.batch_plan import BatchPlan, plan_batches

sizes = st.integers(min_value=1, max_value=6)


def load(workplace, **changes):
    name = f"run-{len(list(workplace.runs_dir.glob('*')))}"
    workplace.add_run(name, **changes)
    return load_run(workplace.runs_dir, name)


@given(world_size=sizes, microbatch_size=sizes, accumulation=sizes, num_steps=sizes)
def test_every_split_over_processes_reads_each_microbatch_once(world_size, microbatch_size,
                                                               accumulation, num_steps):
    plan = BatchPlan(microbatch_size, accumulation, world_size, 8, num_steps)
    by_rank = [list(microbatch_indices(plan, rank, first_step=0)) for rank in range(world_size)]
    assert Counter(sum(by_rank, [])) == Counter(range(accumulation * world_size * num_steps))
    for step in range(num_steps):  # a global step's microbatches are adjacent for every split
        first, own = step * accumulation * world_size, slice(step * accumulation,
                                                              (step + 1) * accumulation)
        seen = {index for indices in by_rank for index in indices[own]}
        assert seen == set(range(first, first + accumulation * world_size))
    resumed = list(microbatch_indices(plan, 0, first_step=num_steps - 1))
    assert resumed == by_rank[0][-accumulation:]


@pytest.mark.parametrize(("file_tokens", "min_tokens", "start", "num_steps"), [
    (1025, 1024, 0, 8),   # exactly full: no extra batch
    (1153, 1025, 0, 9),   # rounded up to whole global batches
    (1025, -1, 0, 8),     # all whole batches
    (1024, -1, 0, 7),     # the eighth lacks its last target
    (1153, -1, 128, 8),
])
def test_min_train_tokens_is_rounded_up_to_whole_global_batches(workplace, file_tokens, min_tokens,
                                                                start, num_steps):
    run = load(workplace, train={"min_train_tokens": min_tokens, "start_train_token": start})
    plan = plan_batches(run, world_size=2, file_tokens=file_tokens)
    assert plan.tokens_per_step == 2 * 2 * 2 * 16
    assert plan.num_steps == num_steps


def test_too_few_tokens_are_refused(workplace):
    for file_tokens, changes, message in (
        (1024, {"min_train_tokens": 1024}, "wanted 1025 training tokens from token 0 on"),
        (50, {"min_train_tokens": -1}, "wanted 129 training tokens"),
        (1025, {"start_train_token": 1025}, "start_train_token 1025 is past the end"),
    ):
        with pytest.raises(UserError, match=message):
            plan_batches(load(workplace, train=changes), world_size=2, file_tokens=file_tokens)


BATCH_OF_24 = {"gradient_accumulation_steps": None, "global_batch_size": 24}


@pytest.mark.parametrize(("microbatch_size", "world_size", "outcome"), [
    (24, 1, 1), (6, 1, 4), (1, 8, 3), (2, 4, 3),
    (5, 1, "microbatch_size 5 x 1 processes; the nearest microbatch_size that divides is 4 or 6"),
    (50, 2, "microbatch_size 50 x 2 processes; the nearest microbatch_size that divides is 12"),
    (2, 5, "5 processes; change the number of processes, or make it 20 or 25"),
    (2, 48, "48 processes; change the number of processes, or make it 48 or 96"),
])
def test_accumulation_steps_follow_from_the_global_batch_or_the_nearest_sizes_are_named(workplace,
                                                                                        microbatch_size,
                                                                                        world_size,
                                                                                        outcome):
    run = load(workplace, train=BATCH_OF_24 | {"microbatch_size": microbatch_size})
    if isinstance(outcome, int):
        plan = plan_batches(run, world_size=world_size, file_tokens=10_000)
        assert (plan.gradient_accumulation_steps, plan.global_batch_size) == (outcome, 24)
        assert plan.num_steps == 4  # 1,536 tokens in steps of 24 x 16, whatever the split
        return
    with pytest.raises(UserError) as caught:
        plan_batches(run, world_size=world_size, file_tokens=10_000)
    wanted = f"train.json: global_batch_size 24 is not divisible by {outcome}"
    assert str(caught.value).endswith(wanted)
