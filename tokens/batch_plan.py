"""Divide a run's tokens into global steps, accumulation steps, processes, microbatches, chunks."""

from dataclasses import dataclass

from basics.errors import UserError
from run_config import ModelConfig, Run, TrainConfig

CACHED_LOGITS = 2**23  # per chunk, on a CPU; larger chunks are 10% faster but take GiBs


@dataclass(frozen=True)
class BatchPlan:
    """The division of a run's tokens into global steps, accumulation steps and processes."""

    microbatch_size: int
    gradient_accumulation_steps: int
    world_size: int
    context_length: int
    num_steps: int
    epoch_tokens: int | None = None  # with `repeat_data`: after so many the data begins again

    @property
    def tokens_per_microbatch(self) -> int:
        return self.microbatch_size * self.context_length

    @property
    def global_batch_size(self) -> int:  # in sequences
        return self.microbatch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.context_length

    @property
    def num_tokens(self) -> int:
        return self.tokens_of(self.num_steps)

    def tokens_of(self, num_steps: int) -> int:
        """Return the tokens of the first `num_steps` global steps of the run."""
        return num_steps * self.tokens_per_step

    def has_no_step_after(self, global_step: int) -> bool:
        """Return whether no step is left after this one, which was beyond a run made shorter."""
        return global_step >= self.num_steps - 1


def divided(run: Run, *, world_size: int, most: int | None = None) -> Run:
    """Return the run with a microbatch that divides its global batch among the processes.

    How a global batch is divided is a matter of speed: instead of the configured `microbatch_size`,
    or of `most`, the largest smaller one is taken that divides. The validation keeps its sequences.
    A run without `global_batch_size` is returned as it is.

    Raises: UserError: there are no whole sequences for each process; names the nearest sizes.
    """
    config, batch = run.config, run.config.global_batch_size
    if batch is None:
        return run
    per_process, rest = divmod(batch, world_size)
    if rest:
        fits = max(1, per_process) * world_size
        raise UserError(
            f"{run.train_path}: global_batch_size {batch} is not divisible by {world_size}"
            f" processes; change the number of processes, or make it {fits} or {fits + world_size}"
        )
    size = largest_divisor(per_process, most or config.microbatch_size)
    if size == config.microbatch_size:
        return run
    changes: dict[str, int | None] = {"microbatch_size": size}
    if config.validation_batches:
        changes["validation_batches"] = None
        changes["validation_sequences"] = config.num_validation_sequences
    return run.decided(config.model_copy(update=changes))


def microbatch_warning(run: Run) -> str:
    """Say which microbatch `divided` has taken; an empty string if it is the configured one."""
    configured, size = run.left_open.get("microbatch_size"), run.config.microbatch_size
    if configured is None:
        return ""
    effect = "the loss is the same"
    if run.model.drop_rate:
        effect = "dropout draws other places than with the configured one, so the loss differs"
    return (
        f"{run.train_path}: microbatch_size is {size} in this launch, not {configured}, so that the"
        f" processes can divide global_batch_size {run.config.global_batch_size}; {effect}"
    )


def largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def plan_batches(run: Run, *, world_size: int, file_tokens: int) -> BatchPlan:
    """Divide a run's tokens into whole global batches.

    `min_train_tokens` is rounded up to whole global batches; -1 uses every whole batch after
    `start_train_token`. The file needs one more token than is trained on: the last target. With
    `repeat_data` the whole sequences of the file, at least one, are read again and again.

    Raises: UserError: the token file (of `file_tokens` tokens) is too short, or `global_batch_size`
        is not divisible by the processes.
    """
    run = divided(run, world_size=world_size)
    train, path, context_length = run.config, run.train_path, run.model.context_length
    accumulation_steps = train.gradient_accumulation_steps
    if train.global_batch_size is not None:
        accumulation_steps = train.global_batch_size // (world_size * train.microbatch_size)
    step_tokens = train.microbatch_size * accumulation_steps * world_size * context_length
    found, epoch_tokens = file_tokens - train.start_train_token, None
    if found <= 0:
        raise UserError(
            f"{path}: start_train_token {train.start_train_token:,} is past the end of"
            f" {train.dataset}, which has {file_tokens:,} training tokens; lower it"
        )
    usable_steps = (found - 1) // step_tokens
    if train.repeat_data and found > context_length:
        epoch_tokens = (found - 1) // context_length * context_length
        usable_steps = 2**62
    num_steps = -(-train.min_train_tokens // step_tokens)
    if train.min_train_tokens == -1:
        num_steps = usable_steps
    if not 1 <= num_steps <= usable_steps:
        other = "lower start_train_token" if train.repeat_data else "set repeat_data"
        advice = f"lower min_train_tokens, or {other}"
        if usable_steps < 1 and not train.repeat_data:  # not even one batch and its last target
            size = "microbatch_size or gradient_accumulation_steps"
            advice = f"lower {'global_batch_size' if train.global_batch_size else size}"
            if train.start_train_token:
                advice += ", or start_train_token"
        raise UserError(
            f"{path}: wanted {max(num_steps, 1) * step_tokens + 1:,} training tokens from token"
            f" {train.start_train_token:,} on (batches of {step_tokens:,}), but {train.dataset} has"
            f" {found:,}; {advice}"
        )
    return BatchPlan(
        train.microbatch_size,
        accumulation_steps,
        world_size,
        context_length,
        num_steps,
        epoch_tokens,
    )


def head_chunk_tokens(
    model: ModelConfig, config: TrainConfig, *, is_eager_on_cpu: bool
) -> int | None:
    """Return the tokens per chunk of head and loss; None to compute all tokens at once.

    Without `head_chunks`, an eager CPU uses chunks that fit in its cache.
    """
    if config.head_chunks is None:
        return max(1, CACHED_LOGITS // model.vocab_size) if is_eager_on_cpu else None
    if config.head_chunks == 1:
        return None
    return -(-config.microbatch_size * model.context_length // config.head_chunks)
