"""Joining: how long a replica on the device needs until it contributes, and what the other replica notices of it.

The replicas reduce their gradients with gloo, since two processes with NCCL may not share a device.
"""

from __future__ import annotations

from typing import Final

from benchmarks.gpu.model import device, device_name, has_gpu
from benchmarks.heal import joined_by
from benchmarks.join import LONGEST, NORMAL, ratios
from benchmarks.options import Options
from benchmarks.processes import Child
from benchmarks.replicas.healing import Report, join_and_contribute, train
from benchmarks.replicas.managers import OURS, OURS_FOLLOWING, TORCHFT
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Quantity, Verdict
from benchmarks.transports import NO_TORCHFT, torchft_is_installed

_STATE_BYTES: Final = {True: 1_000_000_000, False: 240_000_000}
"""By whether there is a GPU."""
_NUM_TENSORS: Final = 16
_NUM_STEPS_BEFORE: Final = 6
_NUM_STEPS_AFTER: Final = 5
_VARIANTS: Final = (OURS, OURS_FOLLOWING, TORCHFT)

CONTRIBUTES: Final = Quantity("from the newcomer's first step until it has contributed", "ms")


def measure_joining(group: Group, options: Options) -> None:
    """Lets one replica join another one, with each manager by turns; all of the state is trained."""
    if not torchft_is_installed():
        group.notes.append(NO_TORCHFT)
        return
    num_items = _STATE_BYTES[has_gpu()] // 4 // 3 // _NUM_TENSORS
    model = Model(name="gpu", num_tensors=_NUM_TENSORS, num_items=num_items, is_warm=True, device=device())
    group.title = f"a replica of {model.state_bytes / 1e9:.2f} GB on {device_name()} joins, all of it trained"
    for round_number, variant in options.rounds("gpu joining", _VARIANTS):
        trained, joined, watch = joined_by(
            lambda address, variant=variant: Child(train, variant, model, address, _NUM_STEPS_BEFORE),  # type: ignore[misc]
            lambda address, variant=variant: Child(join_and_contribute, variant, model, address, _NUM_STEPS_AFTER),  # type: ignore[misc]
        )
        for quantity, value in _quantities(trained, joined).items():
            group.add(variant, quantity, watch.sample(round_number, value))
    group.sort(_VARIANTS)
    group.verdicts = [
        Verdict.at_most(f"{LONGEST.name}, {variant.name} / torchft", group.ratio(variant, TORCHFT, LONGEST), 1.0)
        for variant in (OURS, OURS_FOLLOWING)
    ]


def _quantities(trained: Report, joined: Report) -> dict[Quantity, float]:
    contributed = joined.contributed[0]
    found = ratios(trained, joined, joined_s=contributed.ended_s)
    return {
        CONTRIBUTES: (contributed.ended_s - joined.steps[0].began_s) * 1e3,
        **{quantity: found[quantity] for quantity in (NORMAL, LONGEST)},
    }
