"""Types of keys of `train.json`."""

from typing import Annotated, TypeVar

from pydantic import Field

Value = TypeVar("Value")
Count = Annotated[int, Field(ge=1, le=2**40)]
SAME_LOSS = "same loss"
SameLoss = Annotated[Value, SAME_LOSS]  # of a key that changes no loss beyond rounding
