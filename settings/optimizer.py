"""The optimizer, and the state that it keeps."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from basics.json_files import FrozenConfig
from settings.model import ModelConfig

Group = Literal["matrix", "embedding", "head", "vector"]  # of parameters
GROUPS: tuple[Group, ...] = get_args(Group)
GroupRate = Annotated[float | None, Field(gt=0)]  # None stands for `learning_rate`
STEP = "step"  # in an optimizer's state: the number of steps, of each parameter
MUON_DEFAULTS: dict[str, Any] = {
    "matrix_learning_rate": 0.02,
    "learning_rate": 0.02,
    "embedding_learning_rate": 0.15,
    "vector_learning_rate": 0.01,
    "weight_decay": 0.025,
    "beta1": 0.5,
    "beta2": 0.95,
    "schedule": "linear",
}
WIDTH_DEPENDENT = {"learning_rate", "embedding_learning_rate", "vector_learning_rate"}


class OptimizerConfig(FrozenConfig):
    """The keys of `train.json` about the optimizer."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=4e-4, gt=0)
    matrix_learning_rate: GroupRate = None
    embedding_learning_rate: GroupRate = None
    head_learning_rate: GroupRate = None
    vector_learning_rate: GroupRate = None
    weight_decay: float = Field(default=0.1, ge=0, le=1e3)
    decay_norms_and_biases: bool = False
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, ge=1e-30)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    clipping_max_norm: float | None = Field(default=None, gt=0)

    def optimizer_state(self, group: Group) -> tuple[str, ...]:
        """Return the names of the tensors that the optimizer keeps of each parameter of a group.

        All are float32. `STEP` is a number, (); the others have the parameter's shape.
        """
        if self.optimizer == "muon" and group == "matrix":
            return ("momentum",)
        return (STEP, "exp_avg", "exp_avg_sq")

    def optimizer_state_bytes(self, model: ModelConfig) -> int:
        """Return the bytes of a model's optimizer state, without the scalars of `STEP`."""
        of_matrices, of_others = (
            len([name for name in self.optimizer_state(group) if name != STEP])
            for group in ("matrix", "vector")
        )
        others = model.num_parameters - model.num_matrix_parameters
        return 4 * (of_matrices * model.num_matrix_parameters + of_others * others)
