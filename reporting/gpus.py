"""`gpus.json`: GPUs with their peak speeds and the MFUs known of them, and prices of machines."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from basics.json_files import FrozenConfig
from settings.machine import Precision

GPT2_SMALL_FLOPS_PER_TOKEN = 854.44e6  # all MFUs here are of this model
# The steps of smaller models wait for the start of kernels: no MFU is expected of them.
SMALLEST_FLOPS_PER_TOKEN = GPT2_SMALL_FLOPS_PER_TOKEN / 10
EXPECTED_SHARE = 0.8  # of the best MFU, on a GPU without a public figure for several
MAKERS = re.compile(r"^((NVIDIA|AMD|Tesla|Instinct|GeForce) )*", re.IGNORECASE)


class Mfu(FrozenConfig):
    """An MFU of training GPT-2 small; where it is from, unless it is a public one of such GPUs."""

    share: float
    origin: str = ""

    def __str__(self) -> str:
        share = f"{self.share:.1%}" if self.share < 0.1 else f"{self.share:.0%}"
        return f"{share} ({self.origin})" if self.origin else share


class Gpu(FrozenConfig):
    """A GPU: its name in tables, the GiB that PyTorch sees, dense peaks, and MFUs.

    `peak_tflops` is bf16 (fp16 on GPUs without it) with float32 accumulation, without sparsity.
    `low_mfu` is the original system's (eager, fp16), as it or we measured it. `high_mfu` is the
    best figure for plain PyTorch, of this trainer or a public one, `public_mfu` the best public one
    on two, four or eight such GPUs. `own_mfu` is this trainer's on one.

    Source: NVIDIA's and AMD's data sheets for the peaks; `benchmarks/README.md` for the MFUs, "One
    H200" and "Public figures that `lab plan` uses", from tokens a second and
    `ModelConfig.flops_per_token`.
    """

    name: str
    pattern: str  # regular expression for a whole name: see `find_gpu`
    memory_gib: float
    peak_tflops: float
    peak_tflops_tf32: float
    peak_tflops_fp32: float
    memory_tb_per_second: float | None = None  # 10^12 bytes; of those that benchmarks ask for
    has_bf16: bool = True
    low_mfu: Mfu = Mfu(share=0.05, origin="assumed")
    high_mfu: Mfu = Mfu(share=0.40, origin="assumed")
    public_mfu: Mfu | None = None
    own_mfu: Mfu | None = None
    note: str = ""

    def peak(self, precision: Precision) -> float:
        """Return the peak in FLOP/s."""
        peaks = {"fp32": self.peak_tflops_fp32, "tf32": self.peak_tflops_tf32}
        return 1e12 * peaks.get(precision, self.peak_tflops)

    def mfu(self, flops_per_second: float) -> float:
        """Return the share of the peak in 16 bits that one process reaches, in any precision."""
        return flops_per_second / self.peak("bf16")

    @property
    def expected_mfu(self) -> float:
        """Estimate the MFU of this trainer on these GPUs where it has not been measured."""
        return self.public_mfu.share if self.public_mfu else EXPECTED_SHARE * self.high_mfu.share


class Price(FrozenConfig):
    """A price in US$ per hour of all GPUs of a machine: when, of which kind, and from where."""

    gpu: str  # a name in `GPUS`
    num_gpus: int = Field(ge=1)
    usd_per_hour: float = Field(gt=0)
    month: str = Field(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")
    kind: Literal["on demand", "spot"]  # a spot machine may be taken away at any time
    source_kind: Literal["provider's page", "marketplace", "published by users"]
    provider: str
    source: str  # the page or the public copy of it that was read
    note: str = ""


class _File(FrozenConfig):
    gpus: list[Gpu]
    about_prices: str
    preset_prices: list[Price]  # of the machines of every plan
    other_prices: list[Price]  # of a comparison only


_FILE = _File.model_validate_json(Path(__file__).with_name("gpus.json").read_bytes())
GPUS, ABOUT_PRICES = _FILE.gpus, _FILE.about_prices
PRESET_PRICES, OTHER_PRICES = _FILE.preset_prices, _FILE.other_prices


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by its driver's name or a common name; None if it is unknown.

    A pattern describes a whole name without its maker and with spaces for hyphens, so that no
    variant is taken for the plain card: neither an "A100X", nor a "4090 D", nor a part of a GPU
    ("H100 80GB HBM3 MIG 1g.10gb").
    """
    model = MAKERS.sub("", re.sub(r"[-_\s]+", " ", name.strip()))
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, model, re.IGNORECASE)), None)
