"""The memory of the optimizer: its state, and its temporary tensors while it takes a step."""

from __future__ import annotations

from lab.plan.setting import FLOAT32, Setting, parameters_by_group


def state_bytes(setting: Setting) -> int:
    """Return the bytes of two moments of each parameter; Muon keeps one of each matrix."""
    sizes = parameters_by_group(setting.model)
    moments = 2 * sum(sizes.values())
    if setting.train.optimizer == "muon":
        moments -= sizes["matrix"]
    return FLOAT32 * moments


def step_bytes(setting: Setting) -> int:
    """Return the most bytes of temporary tensors at once: see `optim.py`."""
    kept = FLOAT32 * sum(parameters_by_group(setting.model).values())  # weights before the step
    return _most_temporary_bytes(setting) + (kept if setting.train.diagnostics_interval else 0)


def _most_temporary_bytes(setting: Setting) -> int:
    if setting.train.optimizer != "muon":
        return 0
    C, L = setting.model.emb_dim, setting.model.n_layers
    return max(_orthogonalising_bytes(setting, 4 * L, columns=C),
               _orthogonalising_bytes(setting, 2 * L, columns=4 * C))


def _orthogonalising_bytes(setting: Setting, num_matrices: int, *, columns: int) -> int:
    """Count what Muon needs for all matrices of one shape, C x columns, beside all gradients.

    First a process holds its share of them: gradients and momenta in float32; then the input, x and
    the next x, and gram and polynomial, both C x C. Then its own updates beside the gathered ones;
    at last all updates as computed and in float32.
    """
    C, element = setting.model.emb_dim, 2 if setting.precision == "bf16" else FLOAT32
    share = -(-num_matrices // setting.num_processes)
    one, gathered = C * columns, share * setting.num_processes
    own = element * share * one
    gradients = FLOAT32 * parameters_by_group(setting.model)["matrix"]
    return gradients + max(
        own + 2 * FLOAT32 * share * one,
        3 * own + 2 * element * share * C**2,
        (own if setting.num_processes > 1 else 0) + element * gathered * one,
        (element * gathered + FLOAT32 * num_matrices) * one,
    )
