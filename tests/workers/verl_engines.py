"""Updates between checkpoint engines of verl in one process, without Ray (`tests/integrations/test_verl.py`)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import torch
import verl

from ft_transport.errors import ConfigurationError, PeerAuthenticationError, PublishError
from ft_transport.publish.verl_backend import FTTransportCheckpointEngine as Engine

Weights = dict[str, torch.Tensor]


async def update(actor: Engine, rollout: Engine, weights: Weights) -> tuple[Any, Any]:
    """Run an update as verl does. Return what each side has returned or raised."""
    _, topology = Engine.build_topology(1, 1, [actor.prepare(), rollout.prepare()])
    rollout.init_process_group(topology["source"][0])

    async def received() -> Weights:
        return {name: tensor.clone() async for name, tensor in rollout.receive_weights()}

    return await asyncio.gather(actor.send_weights(iter(weights.items())), received(), return_exceptions=True)


def check_equal(got: Weights, expected: Weights) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name


def weights_of_all_kinds() -> Weights:
    return {
        "float32": torch.randn(1000, 300),
        "transposed": torch.randn(30, 50, dtype=torch.float64).t(),
        "int64": torch.arange(7),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "nan": torch.full((5,), float("nan")),
        "parameter": torch.nn.Parameter(torch.randn(10)),
    }


async def check_kinds() -> None:
    actor, rollout = Engine(1, is_master=True), Engine(1)
    weights = weights_of_all_kinds()
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    check_equal((await update(actor, rollout, weights))[1], before)
    weights["float32"][3, 4] += 1
    weights["int64"][0] = 9
    check_equal(dict(rollout._receiver._received.tensors), before)  # the actor's memory is not that of the version
    check_equal((await update(actor, rollout, weights))[1], weights)
    assert 0 < rollout.num_bytes_fetched < 1000
    del weights["nan"]
    weights |= {"new": torch.randn(4), "scalar": torch.randn(2)}
    check_equal((await update(actor, rollout, weights))[1], weights)


async def check_cast() -> None:
    actor, rollout = Engine(1, is_master=True, rollout_dtype=torch.bfloat16), Engine(1)
    weights = {"float32": torch.randn(10), "int64": torch.arange(3)}
    sent, _ = await update(actor, rollout, weights | {"scaled": torch.ones(4).to(torch.float8_e4m3fn)})
    assert isinstance(sent, PublishError), sent
    _, got = await update(actor, rollout, weights)
    assert torch.equal(got["float32"], weights["float32"].bfloat16())
    assert torch.equal(got["int64"], weights["int64"])


async def check_token() -> None:
    os.environ["FT_TRANSPORT_TOKEN"] = "the-token-of-the-actor"
    actor, rollout = Engine(1, is_master=True), Engine(1)
    source = actor.prepare()
    assert source is not None
    assert source["token"] is None  # a token of the environment is not sent
    os.environ["FT_TRANSPORT_TOKEN"] = "another-token"
    _, got = await update(actor, rollout, {"weight": torch.ones(1)})
    assert isinstance(got, PeerAuthenticationError), got
    del os.environ["FT_TRANSPORT_TOKEN"]
    try:
        Engine(1).init_process_group(source)
    except ConfigurationError as error:
        print(error)


async def check_buckets() -> None:
    """Pass the weights on with the code by which verl's adapter for vLLM sends them to vLLM, without a device."""
    # verl's package for vLLM cannot be imported without vLLM.
    path = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", path)
    assert spec is not None
    assert spec.loader is not None
    buckets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(buckets)
    actor, rollout = Engine(1, is_master=True), Engine(1)
    rollout.init_process_group(actor.prepare())
    weights, got = weights_of_all_kinds(), {}
    socket = f"ipc://{os.getcwd()}/weights"
    receiver = buckets.BucketedWeightReceiver(socket, torch.device("cpu"), use_shm=True)
    receiving = threading.Thread(
        target=receiver.receive_weights,
        args=[lambda part, _is_last: got.update({name: each.clone() for name, each in part})],
        daemon=True,
    )
    receiving.start()
    sender = buckets.BucketedWeightSender(socket, 2, use_shm=True)
    await asyncio.gather(
        actor.send_weights(iter(weights.items())), sender.async_send_weights(rollout.receive_weights())
    )
    receiving.join(60)
    check_equal(got, weights)


async def main() -> None:
    for check in (check_kinds, check_cast, check_token, check_buckets):
        await asyncio.wait_for(check(), 60)


if __name__ == "__main__":
    asyncio.run(main())
    print("all checks passed")
