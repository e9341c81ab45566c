"""The rollout controller over vLLM servers: whole batches, in both modes, with servers that die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.rollout.controller import RolloutController

Serve = Connect = Callable[..., Any]
TURNS = 3


class Turns:
    """Asks three times, each time with all tokens so far."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory:
        responses = []
        ids = [data["token"]]
        for _ in range(TURNS):
            gconfig = GenerationHyperparameters(max_new_tokens=8, ignore_eos=True)
            responses.append(await engine.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig)))
            ids = [*ids, *responses[-1].output_tokens, 2]
        return Trajectory.from_turns(responses, reward=1.0)


class Rows:
    def __init__(self) -> None:
        self.count = 0

    def next_batch(self) -> list[dict[str, Any]]:
        self.count += 4
        return [{"token": 1 + n % 30, "_uid": f"r{n}"} for n in range(self.count - 4, self.count)]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("scale_out", [True, False])
def test_prepare_batch_when_weights_change_and_a_server_dies(
    serve: Serve, connect: Connect, staleness: int, scale_out: bool
) -> None:
    servers = [serve(scale_out=scale_out), serve(scale_out=scale_out)]
    engine = connect(*servers, rollout={"max_head_offpolicyness": staleness}, stream_interval=2, health_interval=0.2)
    rows = Rows()
    controller = RolloutController(engine, Turns(), engine.config, batch_size=4, group_size=2, seed=3)
    with controller:
        for version in range(1, 5):
            if version == 3:
                # In the middle of the batch, or between two: whichever comes.
                killer = threading.Thread(target=servers[0].kill)
                killer.start()

            result = controller.prepare_batch(rows)

            assert len(result.trajectories) == 8
            for trajectory in result.trajectories:
                assert trajectory.n_turns == TURNS and trajectory.loss_mask.sum() == TURNS * 8
                found = set(trajectory.versions[trajectory.loss_mask].tolist())
                # In synchronous mode all of them, else as old as the bound allows.
                assert found <= set(range(version - 1 - staleness, version))
            controller.pause()
            engine.pause_generation()
            engine.weights_updated(version)
            engine.set_version(version)
            controller.set_version(version)
            engine.continue_generation()
            controller.resume()
            if version == 3:
                killer.join()
    assert engine.export_stats()["dropped_servers"] == 1
    totals = controller.export_stats()
    assert totals.get("rollout/failed", 0) == 0


def test_prepare_batch_when_episodes_take_turns_keeps_each_on_its_server(serve: Serve, connect: Connect) -> None:
    servers = [serve(), serve()]
    engine = connect(*servers)
    before = [len(server.bodies()) for server in servers]
    with RolloutController(engine, Turns(), engine.config, batch_size=8, group_size=1, seed=3) as controller:
        controller.rollout_batch([{"token": n + 1, "_uid": f"r{n}"} for n in range(8)])

    homes = [
        {body["token_ids"][0] for body in server.bodies()[start:]}
        for server, start in zip(servers, before, strict=True)
    ]
    assert not homes[0] & homes[1] and homes[0] | homes[1] == set(range(1, 9))
    assert abs(len(homes[0]) - len(homes[1])) <= 2
