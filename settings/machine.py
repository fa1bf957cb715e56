"""How the machine computes a step."""

from typing import Literal, Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig
from settings.keys import SameLoss

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


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
    activation_checkpointing: SameLoss[bool] = False
    deterministic: SameLoss[bool] = False

    @model_validator(mode="after")
    def _formats_and_kernels_fit(self) -> Self:
        if not self.use_amp and self.precision in ("bf16", "fp16"):
            raise ValueError(f'use_amp is false but precision is "{self.precision}": drop one')
        if self.deterministic and self.attention == "cudnn":
            raise ValueError('attention "cudnn" is not deterministic: drop it, or deterministic')
        return self
