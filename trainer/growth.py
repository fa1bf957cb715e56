"""Growth in depth (`grow`): first the lowest layers of the model alone, then all of them.

A layer whose two output projections are zero adds nothing to the residual stream. New layers begin
so, on top of those that are trained: they change no logit, and their projections have gradients.

Source: Bu 2025, "Deep Progressive Training: scaling up depth capacity of zero/one-layer models",
for one growth, late, from one layer.
"""

from torch import nn

from checkpointing import TrainingState
from processes.distributed import Process
from run_config import Run
from trainer.loss_functions import build_training_state


def shallow_state(run: Run, num_layers: int, process: Process) -> TrainingState:
    """Build the first layers of a run's model, with embeddings and head, as before step 0.

    They have the weights that they have in a run without growth. The same on every rank.
    """
    whole = build_training_state(run.model, run.config, process).model.state_dict()
    state = build_training_state(run.model.with_layers(num_layers), run.config, process)
    state.model.load_state_dict({name: whole[name] for name in state.model.state_dict()})
    return state


def grown_state(small: TrainingState, run: Run, process: Process) -> TrainingState:
    """Return a state with all layers of a run, which computes the same as `small`.

    What is trained keeps its weights and its optimizer state, which `small` shares from now on. New
    layers have the weights that they have in a run without growth, but output projections of zero,
    and no optimizer state yet. The same on every rank.
    """
    state = build_training_state(run.model, run.config, process)
    state.model.load_state_dict(small.model.state_dict(), strict=False)
    for block in state.model.blocks[len(small.model.blocks) :]:
        for projection in (block.attention.output, block.mlp.output):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
    parameters = dict(state.model.named_parameters())
    for name, parameter in small.model.named_parameters():
        state.optimizer.state[parameters[name]] = small.optimizer.state[parameter]
    return TrainingState(state.model, state.optimizer, small.scaler)
