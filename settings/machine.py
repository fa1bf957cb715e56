"""How the machine computes a step."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig
from settings.keys import SameLoss
from settings.model import ModelConfig

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
NumCandidates = Annotated[int, Field(ge=2, le=2**16)]  # entries of the vocabulary
FULL_SOFTMAX_INTERVAL = 5  # global steps; the middle one has all entries of the vocabulary


class MachineConfig(FrozenConfig):
    """The keys of `train.json` about number formats and kernels. Each changes the speed."""

    use_amp: bool = True
    precision: Precision | None = None
    residual_dtype: Literal["fp32", "bf16"] | None = None
    # Of gradients between the processes.
    all_reduce_dtype: SameLoss[Literal["fp32", "bf16"]] = "fp32"
    compile: SameLoss[bool | None] = None
    attention: SameLoss[Literal["auto", "flash", "cudnn", "math"]] = "auto"
    head_chunks: SameLoss[int | None] = Field(default=None, ge=1, le=2**16)
    sampled_softmax: NumCandidates | None = None
    activation_checkpointing: SameLoss[bool] = False
    deterministic: SameLoss[bool] = False

    @model_validator(mode="after")
    def _formats_and_kernels_fit(self) -> Self:
        if not self.use_amp and self.precision in ("bf16", "fp16"):
            raise ValueError(f'use_amp is false but precision is "{self.precision}": drop one')
        if self.deterministic and self.attention == "cudnn":
            raise ValueError('attention "cudnn" is not deterministic: drop it, or deterministic')
        return self

    def softmax_draw(self, global_step: int) -> int | None:
        """Return the number of a step's draw of candidates; None if its loss has all entries."""
        middle = FULL_SOFTMAX_INTERVAL // 2
        if self.sampled_softmax is None or global_step % FULL_SOFTMAX_INTERVAL == middle:
            return None
        num_full = (global_step + middle) // FULL_SOFTMAX_INTERVAL  # steps before this one
        return global_step - num_full

    def flops_per_token(self, model: ModelConfig) -> float:
        """Return the training FLOPs per token, with the part of the head that is computed."""
        if self.sampled_softmax is None:
            return model.flops_per_token
        left_out = 6 * (model.vocab_size - self.sampled_softmax) * model.emb_dim
        return model.flops_per_token - left_out * (1 - 1 / FULL_SOFTMAX_INTERVAL)
