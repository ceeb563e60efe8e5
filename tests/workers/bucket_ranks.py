"""Checkpoints of 2 × 2 ranks in a bucket, loaded in other layouts: ``bucket_ranks.py URL REPORTS``, by `ranks`."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_layouts import LOADED_AS, SAVED_AS, SETTINGS, STEP, make_reference
from layout_matrix import LAYOUTS, Replica, differences, local_bytes, scramble
from programs import fork_writers
from torch.distributed.device_mesh import DeviceMesh

from ft_transport import CheckpointStore


def run(url: str) -> dict[str, Any]:
    reference = make_reference()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    meshes = {
        name: DeviceMesh("cpu", torch.arange(layout.size).view(layout.shape), mesh_dim_names=layout.names)
        for name, layout in {**LOADED_AS, SAVED_AS: LAYOUTS[SAVED_AS]}.items()
    }
    replica = Replica(LAYOUTS[SAVED_AS], meshes[SAVED_AS])
    replica.load(reference)
    weight = replica.state()["model"]["down.weight"].to_local()
    report: dict[str, Any] = {"state_bytes": local_bytes(reference, set()), "loaded": {}}
    with CheckpointStore(url, settings=SETTINGS) as store:
        weight.neg_()
        store.save(STEP - 1, replica.state(), wait=True)
        weight.neg_()
        store.save(STEP, replica.state(), wait=True)  # shares all files but those of the weight
        store.prune(1)
        store.verify(STEP)
        for name, layout in LOADED_AS.items():
            state = Replica(layout, meshes[name]).state()
            scramble(state)
            loaded = store.load(STEP, into=state)
            report["loaded"][name] = {
                "differences": differences(reference, {key: loaded.state[key] for key in reference}),
                "num_bytes_read": loaded.num_bytes_read,
            }
    dist.barrier()
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    fork_writers()
    result = run(sys.argv[1])
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
