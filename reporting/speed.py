"""Peak speeds of GPUs, a run's MFU, and likely reasons for a low one."""

import re
from dataclasses import dataclass

from run_config import ModelConfig, Precision, TrainConfig

SPEED_CHECK_STEPS = 50  # global steps of a launch, after which its speed is reported
FAR_BELOW = 0.5  # of the expected MFU; below it, likely reasons are listed
MUCH_WAITING = 0.10  # share of the time spent waiting for the next microbatch
SMALL_MICROBATCH_TOKENS = 4096  # too few to fill a GPU's multiprocessors
# Common memory sizes of GPUs, and what the driver reports; the lowest where cards differ.
CARDS_GIB = {12: 11.6, 16: 15.6, 24: 23.5, 40: 39.4, 80: 79.1, 141: 139.8, 192: 191.0}
SLOW_DISK_BYTES_PER_SECOND = 100e6  # estimates a checkpoint before one is measured
DOWNLOAD_BYTES_PER_SECOND = 100e6  # an estimate: a connection of 1 Gbit/s
# Estimates of a launch on GPUs, not measured on one: processes and checks; the compiled steps.
STARTUP_SECONDS, COMPILE_SECONDS = 15.0, 60.0
EXPECTED_SHARE = 0.8  # of the best MFU, on a GPU without a public figure for several
MAKERS = re.compile(r"^((NVIDIA|AMD|Tesla|Instinct|GeForce) )*", re.IGNORECASE)


@dataclass(frozen=True)
class Mfu:
    """An MFU of training a GPT-2-class model, and its origin unless it is of such GPUs."""

    share: float
    origin: str = ""

    def __str__(self) -> str:
        share = f"{self.share:.1%}" if self.share < 0.1 else f"{self.share:.0%}"
        return f"{share} ({self.origin})" if self.origin else share


ASSUMED = "assumed"
FROM_RTX = Mfu(0.65, "from RTX-3090")


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name in tables, the GiB that PyTorch sees, dense peaks in FLOP/s, and MFUs.

    `peak_flops` is bf16 (fp16 on GPUs without it) with float32 accumulation, without sparsity.
    `low_mfu` is what the original system measured (eager, fp16). `high_mfu` is the best public
    figure for plain PyTorch, `public_mfu` the best one on two, four or eight such GPUs.

    Source: NVIDIA's and AMD's data sheets for the peaks; "Public figures that `lab plan` uses" in
    `benchmarks/README.md` for the MFUs, from tokens a second and `ModelConfig.flops_per_token`.
    """

    name: str
    pattern: str  # regular expression for a whole name: see `find_gpu`
    memory_gib: float
    peak_flops: float
    peak_flops_tf32: float
    peak_flops_fp32: float
    low_mfu: Mfu = Mfu(0.05, ASSUMED)
    high_mfu: Mfu = Mfu(0.40, ASSUMED)
    public_mfu: Mfu | None = None
    has_bf16: bool = True

    def peak(self, precision: Precision) -> float:
        peaks = {"fp32": self.peak_flops_fp32, "tf32": self.peak_flops_tf32}
        return peaks.get(precision, self.peak_flops)

    def mfu(self, flops_per_second: float) -> float:
        """Return the share of the peak in 16 bits that one process reaches, in any precision."""
        return flops_per_second / self.peak_flops

    @property
    def expected_mfu(self) -> float:
        """Estimate the MFU of this trainer on one or several of these GPUs.

        It is `public_mfu`: on an H100 that is also what a count of this trainer's products and
        memory traffic gives (42% around a step), less several per cent lost between steps.
        """
        return self.public_mfu.share if self.public_mfu else EXPECTED_SHARE * self.high_mfu.share


GPUS = (
    Gpu(
        "A100-40",
        r"A100 ((SXM4?|PCIE) )?40 ?(GB)?( PCIE)?",
        39.4,
        312e12,
        156e12,
        19.5e12,
        Mfu(0.087),
        Mfu(0.54, "from A100-80"),
        Mfu(0.51, "from A100-80"),
    ),
    Gpu(
        "A100-80",
        r"A100( SXM4?| PCIE)?( 80 ?(GB)?)?( PCIE)?",
        79.2,
        312e12,
        156e12,
        19.5e12,
        Mfu(0.098),
        Mfu(0.54),
        Mfu(0.51),
    ),
    Gpu(
        "GH200",
        r"GH200( (120|480)GB)?",
        94.5,
        989e12,
        495e12,
        67e12,
        Mfu(0.053, "from H100"),
        Mfu(0.42, "from H200"),
        Mfu(0.35),
    ),
    Gpu(
        "H100",
        r"H100( SXM5?)?( 80 ?(GB)?)?( HBM3| SXM5?)?",
        79.1,
        989e12,
        495e12,
        67e12,
        Mfu(0.053),
        Mfu(0.41),
        Mfu(0.39),
    ),
    Gpu(
        "H100-NVL",
        r"H100 NVL",
        93.0,
        835e12,
        417e12,
        60e12,
        Mfu(0.053, "from H100"),
        Mfu(0.41, "from H100"),
        Mfu(0.35),
    ),
    Gpu(
        "H100-PCIe",
        r"H100( 80GB)? PCIE( 80GB)?",
        79.1,
        756e12,
        378e12,
        51e12,
        Mfu(0.053, "from H100"),
        Mfu(0.41, "from H100"),
    ),
    Gpu(
        "H200",
        r"H200( SXM5?)?",
        139.8,
        989e12,
        495e12,
        67e12,
        Mfu(0.053, "from H100"),
        Mfu(0.42),
        Mfu(0.39),
    ),
    Gpu(
        "H200-NVL",
        r"H200 NVL",
        139.8,
        835e12,
        417e12,
        60e12,
        Mfu(0.053, "from H100"),
        Mfu(0.42, "from H200"),
        Mfu(0.35, "from H100-NVL"),
    ),
    # The original's machines had 160 GiB a B200; others have about 178.
    Gpu("B200", r"B200", 160, 2250e12, 1125e12, 75e12, Mfu(0.038), public_mfu=Mfu(0.24)),
    Gpu(
        "B300",
        r"B300( SXM6( AC)?)?",
        267,
        2250e12,
        1125e12,
        75e12,
        Mfu(0.038, "from B200"),
        public_mfu=Mfu(0.24, "from B200"),
    ),
    Gpu("MI300X", r"MI300X( OAM| VF)?", 191, 1307e12, 654e12, 163e12),
    Gpu(
        "L40S",
        r"L40S",
        44.4,
        362e12,
        183e12,
        91.6e12,
        public_mfu=Mfu(0.30, "of four cards; eight reached 18%"),
    ),
    Gpu("L40", r"L40", 44.4, 181e12, 90.5e12, 90.5e12),
    Gpu("L4", r"L4", 22.0, 121e12, 60e12, 30.3e12),
    Gpu("A10", r"A10", 22.0, 125e12, 62.5e12, 31.2e12),
    Gpu("RTX-6000-Ada", r"RTX 6000 ADA( GENERATION)?", 47.4, 364e12, 182e12, 91.1e12),
    Gpu(
        "RTX-5090",
        r"(RTX ?)?5090",
        31.3,
        209.5e12,
        104.8e12,
        104.8e12,
        Mfu(0.08, "at the speed of RTX-3090"),
        FROM_RTX,
    ),
    Gpu(
        "RTX-4090",
        r"(RTX ?)?4090",
        23.5,
        165e12,
        82.6e12,
        82.6e12,
        Mfu(0.10, "at the speed of RTX-3090"),
        FROM_RTX,
        Mfu(0.57),
    ),
    Gpu(
        "RTX-3090", r"(RTX ?)?3090", 23.6, 71e12, 35.6e12, 35.6e12, Mfu(0.24), Mfu(0.65), Mfu(0.63)
    ),
    Gpu("V100", r"V100( SXM[23])?( 16GB)?", 15.8, 125e12, 15.7e12, 15.7e12, has_bf16=False),
    Gpu("V100-32", r"V100( SXM[23])? 32(GB)?", 31.7, 125e12, 15.7e12, 15.7e12, has_bf16=False),
    Gpu("V100-PCIe", r"V100 PCIE( 16GB)?", 15.8, 112e12, 14e12, 14e12, has_bf16=False),
    Gpu("V100-PCIe-32", r"V100 PCIE 32(GB)?", 31.7, 112e12, 14e12, 14e12, has_bf16=False),
    Gpu("T4", r"T4", 14.6, 65e12, 8.1e12, 8.1e12, has_bf16=False),
)


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by its driver's name or a common name; None if it is unknown.

    A pattern describes a whole name without its maker and with spaces for hyphens, so that no
    variant is taken for the plain card: neither an "A100X", nor a "4090 D", nor a part of a GPU
    ("H100 80GB HBM3 MIG 1g.10gb").
    """
    model = MAKERS.sub("", re.sub(r"[-_\s]+", " ", name.strip()))
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, model, re.IGNORECASE)), None)


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
