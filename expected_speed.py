"""What a GPU should reach with a model, and why a run may be far below it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from run_config import ModelConfig, Precision

# Of a GPU's dense bf16 peak, by what public plain-PyTorch trainers of this model class report;
# estimates: this trainer has not been measured on a GPU yet.
LOW_MFU, HIGH_MFU = 0.20, 0.45
SPEED_CHECK_STEPS = 50  # of a start, after which its speed is judged
MUCH_WAITING = 0.10  # share of the time in which the next microbatch was not there yet
SMALL_MICROBATCH_TOKENS = 4096  # too few to fill a GPU's multiprocessors
CARDS_GIB = (12, 16, 24, 40, 80, 141, 192)  # that people ask about


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name in tables, memory in GiB, and dense peak in FLOP/s.

    Source: NVIDIA's and AMD's data sheets; bf16 (fp16 on those without) with float32 accumulation,
    without sparsity.
    """

    name: str
    memory_gib: float
    peak_flops: float
    pattern: str  # in the name that a driver or a person gives it


GPUS = (
    Gpu("A100-40", 40, 312e12, r"A100.*40"),
    Gpu("A100-80", 80, 312e12, r"A100"),
    Gpu("GH200", 96, 989e12, r"GH200"),
    Gpu("H100-PCIe", 80, 756e12, r"H100.*PCI"),
    Gpu("H100", 80, 989e12, r"H100"),
    Gpu("H200", 141, 989e12, r"H200"),
    Gpu("B200", 180, 2250e12, r"B200"),
    Gpu("MI300X", 192, 1307e12, r"MI300X"),
    Gpu("L40S", 48, 362e12, r"L40S"),
    Gpu("L4", 24, 121e12, r"L4\b"),
    Gpu("A10", 24, 125e12, r"A10\b"),
    Gpu("RTX-4090", 24, 165e12, r"4090"),
    Gpu("RTX-3090", 24, 71e12, r"3090"),
    Gpu("V100", 16, 125e12, r"V100"),
    Gpu("T4", 16, 65e12, r"T4\b"),
)


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by the name that a driver or a person gives it."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, name, re.IGNORECASE)), None)


def flops_per_token(model: ModelConfig) -> float:
    """Count the FLOPs of a token in training, forward and backward: 6 N + 12 L T C.

    N are the parameters in matrix products: the embeddings are look-ups and do not count, the
    vocabulary is taken unpadded, attention as if every token saw every other.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    matmul_parameters = 12 * model.n_layers * model.emb_dim**2 + model.vocab_size * model.emb_dim
    attention = 12 * model.n_layers * model.context_length * model.emb_dim
    return 6 * matmul_parameters + attention


@dataclass(frozen=True)
class Speed:
    """How fast a start of a run was over its first steps, and what may explain it."""

    tokens_per_second: float  # all processes
    num_processes: int
    flops_per_token: float
    device_name: str
    precision: Precision
    attention_kernel: str
    is_compiled: bool
    waiting_share: float
    microbatch_tokens: int
    throttling: str | None

    def line(self) -> str:
        """Say it in a line, beside what this GPU should reach."""
        flops = self.tokens_per_second * self.flops_per_token / self.num_processes
        said = (f"speed: {self.tokens_per_second:,.0f} tokens/s,"
                f" {flops / 1e12:,.3g} TFLOP/s a process")
        gpu = find_gpu(self.device_name)
        if gpu is None:
            return f"{said} (no peak known for {self.device_name})"
        mfu = flops / gpu.peak_flops
        said += (f", {mfu:.1%} MFU; this model should reach {LOW_MFU:.0%} to {HIGH_MFU:.0%}"
                 f" on {gpu.name} (estimate)")
        if mfu >= LOW_MFU:
            return said
        return f"{said}; likely reason: {', '.join(self.likely_reasons()) or 'none found'}"

    def likely_reasons(self) -> list[str]:
        """Name what would explain a low speed, the strongest first."""
        reasons = {
            f"waiting for data {self.waiting_share:.0%} of the time":
                self.waiting_share > MUCH_WAITING,
            f"the GPU is throttled ({self.throttling})": self.throttling is not None,
            f"precision {self.precision}": self.precision in ("fp32", "tf32"),
            "PyTorch's math attention kernel": self.attention_kernel == "math",
            f"a small microbatch of {self.microbatch_tokens:,} tokens":
                self.microbatch_tokens < SMALL_MICROBATCH_TOKENS,
            "the model is not compiled": not self.is_compiled,
        }
        return [reason for reason, applies in reasons.items() if applies]


def usable_gib(card_gib: float) -> float:
    """Give what a card leaves to tensors, in GiB: its driver, CUDA and NCCL take some (estimate).

    Cards name their size roundly: one of 40 GiB has 39.4, and a CUDA context takes 0.5.
    """
    return 0.98 * card_gib - 1.0
