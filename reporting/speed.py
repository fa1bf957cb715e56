"""The speed of a launch and likely reasons for a low one; estimates of start-up and memory."""

from dataclasses import dataclass

from reporting.gpus import SMALLEST_FLOPS_PER_TOKEN, find_gpu
from run_config import ModelConfig, TrainConfig
from settings.machine import Precision

SPEED_CHECK_STEPS = 50  # global steps of a launch, after which its speed is reported
FAR_BELOW = 0.5  # of the expected MFU; below it, likely reasons are listed
MUCH_WAITING = 0.10  # share of the time spent waiting for the next microbatch
SMALL_MICROBATCH_TOKENS = 4096  # too few to fill a GPU's multiprocessors
# Common memory sizes of GPUs, and what the driver reports; the lowest where cards differ.
CARDS_GIB = {12: 11.6, 16: 15.6, 24: 23.5, 40: 39.4, 80: 79.1, 141: 139.8, 192: 191.0}
SLOW_DISK_BYTES_PER_SECOND = 100e6  # estimates a checkpoint before one is measured
DOWNLOAD_BYTES_PER_SECOND = 100e6  # an estimate: a connection of 1 Gbit/s
# Of a launch on GPUs, measured once on one H200: processes and checks; the compiled steps.
STARTUP_SECONDS, COMPILE_SECONDS = 19.0, 46.0


def checkpoint_bytes(model: ModelConfig, config: TrainConfig) -> int:
    """Return the size of a run's largest checkpoint: float32 weights, the optimizer's state."""
    return 4 * model.num_parameters + config.optimizer_state_bytes(model)


def estimated_startup_seconds(num_compilations: int) -> float:
    """Estimate the seconds until a launch trains, without downloads, and of compiling later on."""
    return STARTUP_SECONDS + num_compilations * COMPILE_SECONDS


@dataclass(frozen=True)
class Speed:
    """Speed of a launch over its first steps, and facts that may explain it."""

    tokens_per_second: float  # all processes
    num_processes: int
    flops_per_token: float
    device_name: str
    precision: Precision | None
    attention_kernel: str
    is_compiled: bool | None
    waiting_share: float  # of the time, for the next microbatch
    microbatch_tokens: int
    throttling: str | None
    drop_rate: float = 0.0

    def line(self) -> str:
        flops = self.tokens_per_second * self.flops_per_token / self.num_processes
        line = (
            f"speed: {self.tokens_per_second:,.0f} tokens/s,"
            f" {flops / 1e12:,.3g} TFLOP/s per process"
        )
        gpu = find_gpu(self.device_name)
        if gpu is None:
            return f"{line} (no MFU: the peak speed of {self.device_name} is not known)"
        if self.flops_per_token < SMALLEST_FLOPS_PER_TOKEN:
            return f"{line} (how fast so small a model should be on {gpu.name} is not known)"
        mfu = gpu.mfu(flops)
        best = gpu.high_mfu
        line += (
            f", {mfu:.1%} MFU; {gpu.name} should reach up to {best.share:.0%} with such a"
            f" model ({best.origin or 'public figures'})"
        )
        if mfu >= FAR_BELOW * best.share:
            return line
        reasons = {  # the strongest first
            f"waiting for data {self.waiting_share:.0%} of the time": self.waiting_share
            > MUCH_WAITING,
            f"the GPU is throttled ({self.throttling})": self.throttling is not None,
            f"precision {self.precision}": self.precision in ("fp32", "tf32"),
            "PyTorch's math attention kernel": self.attention_kernel == "math",
            f"a small microbatch of {self.microbatch_tokens:,} tokens": self.microbatch_tokens
            < SMALL_MICROBATCH_TOKENS,
            "the model is not compiled": not self.is_compiled,
            f"dropout {self.drop_rate:g}, whose masks have kernels of their own": self.drop_rate
            > 0,
        }
        found = ", ".join(reason for reason, applies in reasons.items() if applies)
        return f"{line}; likely reason: {found or 'none found'}"


def usable_gib(reported_gib: float) -> float:
    """Estimate the GiB of a GPU that are left for tensors, of those that the driver reports.

    A CUDA context takes 0.5 GiB, NCCL about as much; 2% are for what the allocator cannot use.
    """
    return 0.98 * reported_gib - 1.0
