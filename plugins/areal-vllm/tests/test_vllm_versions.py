"""Which weights made which token, by what a server tells and by what is known of it."""

from __future__ import annotations

from typing import Any

import pytest

from areal_vllm.capabilities import Capabilities
from areal_vllm.logprobs import LogprobMode
from areal_vllm.protocol import Part, Span
from areal_vllm.requests import versions_of
from areal_vllm.routing import Attempt, Replica, Router


def begin(*, tells: bool, version: int | None = 3) -> tuple[Replica, Attempt]:
    """A request at a server whose weights have this version."""
    known = Capabilities(
        version="0",
        model="toy",
        root="",
        context=64,
        transport="generate" if tells else "completions",
        streams=True,
        logprob_mode=LogprobMode.FRAMEWORK,
        label=None,
        offered=frozenset({"weight_version"}),
    )
    replica = Replica("server:1", capabilities=known, state="ready", version=version)
    return replica, Router([replica]).begin(replica, 10)


def part_of(count: int, *spans: Span) -> Part:
    return Part(tokens=list(range(count)), logprobs=[0.0] * count, spans=list(spans))


def test_versions_of_when_spans_are_told_expected_one_for_each_token() -> None:
    _, attempt = begin(tells=True)

    versions = versions_of(part_of(5, Span("3", 0, 2), Span("5", 2, 5)), attempt, newest=5)

    assert versions == [3, 3, 5, 5, 5]


@pytest.mark.parametrize(
    "spans",
    [
        [Span("2", 0, 5)],  # older than at the start
        [Span("6", 0, 5)],  # newer than any
        [Span("theirs", 0, 5)],
        [Span("-3", 0, 5)],
        [Span("3", 0, 4)],  # not of all tokens
        [Span("3", 0, 3), Span("4", 2, 5)],
    ],
    ids=str,
)
def test_versions_of_when_spans_cannot_be_true_expected_none(spans: list[Span]) -> None:
    _, attempt = begin(tells=True)

    assert versions_of(part_of(5, *spans), attempt, newest=5) is None


@pytest.mark.parametrize("tells", [True, False])
def test_versions_of_when_nothing_is_told_expected_the_version_at_the_start(tells: bool) -> None:
    _, attempt = begin(tells=tells)

    assert versions_of(part_of(4), attempt, newest=9) == [3] * 4


@pytest.mark.parametrize("tells", [True, False])
def test_versions_of_when_weights_were_touched_meanwhile_expected_none(tells: bool) -> None:
    replica, attempt = begin(tells=tells)
    replica.updates, replica.version = replica.updates + 1, 4

    assert versions_of(part_of(4), attempt, newest=4) is None


def test_versions_of_when_the_server_had_unknown_weights_expected_none() -> None:
    _, attempt = begin(tells=True, version=None)

    parts: list[Any] = [part_of(4), part_of(4, Span("3", 0, 4))]
    assert [versions_of(part, attempt, newest=5) for part in parts] == [None, None]
