"""Which server a request goes to."""

from __future__ import annotations

import pytest

from areal_vllm.routing import Replica, Router


def replicas(count: int) -> list[Replica]:
    return [Replica(f"host:{number}", state="ready") for number in range(count)]


def test_choose_when_loads_differ() -> None:
    servers = replicas(3)
    router = Router(servers)
    for server, load in zip(servers, (30, 10, 20), strict=True):
        router.begin(server, load)

    assert router.choose(5) is servers[1]


def test_choose_when_all_are_idle() -> None:
    servers = replicas(3)
    router = Router(servers)

    chosen = {router.choose(5).address for _ in range(3)}  # type: ignore[union-attr]

    assert len(chosen) == 3


def test_choose_when_many_requests_come_spreads_tokens_evenly() -> None:
    servers = replicas(4)
    router = Router(servers)
    for number in range(1000):
        server = router.choose(1 + number % 97)
        assert server is not None
        router.begin(server, 1 + number % 97)

    loads = [server.outstanding for server in servers]

    assert max(loads) - min(loads) <= 97


def test_choose_when_an_episode_has_a_home() -> None:
    servers = replicas(3)
    router = Router(servers)
    home = router.choose(10, "episode")
    assert home is not None
    router.begin(home, 10)

    assert all(router.choose(10, "episode") is home for _ in range(9))


def test_choose_when_the_home_is_overloaded() -> None:
    servers = replicas(2)
    router = Router(servers)
    home = router.choose(10, "episode")
    assert home is not None
    other = next(server for server in servers if server is not home)
    router.begin(other, 100)
    router.begin(home, 211)

    moved = router.choose(10, "episode")

    assert moved is other
    router.begin(other, 1000)
    # It stays where its newest tokens are.
    assert router.choose(10, "episode") is home


def test_choose_when_the_home_has_little_to_do_though_another_has_nothing() -> None:
    servers = replicas(2)
    router = Router(servers)
    home = router.choose(10, "episode")
    assert home is not None
    router.begin(home, 80)

    assert router.choose(10, "episode") is home


def test_choose_when_the_home_is_down() -> None:
    servers = replicas(2)
    router = Router(servers)
    home = router.choose(10, "episode")
    assert home is not None
    router.drop(home, "gone")

    assert router.choose(10, "episode") is next(server for server in servers if server is not home)


@pytest.mark.parametrize("state", ["down", "stale"])
def test_choose_when_none_is_ready(state: str) -> None:
    router = Router([Replica("host:1", state=state), Replica("host:2", state=state)])  # type: ignore[arg-type]

    assert router.choose(1, "episode") is None


def test_choose_when_the_only_one_is_to_be_avoided() -> None:
    servers = replicas(1)

    assert Router(servers).choose(1, avoid={servers[0]}) is servers[0]


def test_choose_when_there_are_more_episodes_than_are_remembered() -> None:
    router = Router(replicas(2), most_sessions=2)
    for name in "abc":
        router.choose(1, name)

    assert list(router._homes) == ["b", "c"]


def test_choose_when_an_old_episode_is_in_use_expected_another_one_forgotten() -> None:
    router = Router(replicas(2), most_sessions=2)
    for name in "abac":
        router.choose(1, name)

    assert list(router._homes) == ["a", "c"]


def test_end_when_called_twice() -> None:
    server = replicas(1)[0]
    router = Router([server])
    attempt = router.begin(server, 7)
    router.begin(server, 5)

    router.end(attempt)
    router.end(attempt)

    assert server.outstanding == 5 and not server.idle.is_set()
