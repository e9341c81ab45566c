"""Places for errors that are found after loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core import ConfigError
from areal_core.api.load import error_places


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("actor:\n  path: m\ntrackers:\n  - name: x\n")
    return path


@pytest.mark.parametrize(
    ("key", "overrides", "place"),
    [
        ("actor.path", [], "{}:2"),
        ("actor.backend", [], "{}:1"),
        ("actor.path", ["actor.path=n"], "override 'actor.path=n'"),
        ("trackers[0].name", [], "{}:4"),
        ("seed", [], "{}"),
    ],
)
def test_error_places_when_a_check_names_a_key_adds_its_place(
    run_yaml: Path, key: str, overrides: list[str], place: str
) -> None:
    with pytest.raises(ConfigError) as caught, error_places(run_yaml, overrides):
        raise ConfigError("is odd", key=key)

    assert str(caught.value) == f"{place.format(run_yaml)}: {key}: is odd"


def test_error_places_when_the_place_is_known_keeps_it(run_yaml: Path) -> None:
    error = ConfigError("is odd", key="seed", where="elsewhere:1")

    with pytest.raises(ConfigError) as caught, error_places(run_yaml):
        raise error

    assert caught.value is error
