"""Options of areal-fixture."""

from __future__ import annotations

import attrs

from areal_core.config.fields import option


@attrs.define(kw_only=True)
class CountOptions:
    """Options of the reward."""

    characters: str = option("0123456789", "Characters that count.")
    enough: int = option(4, "So many of them score 1.", ge=1)


@attrs.define(kw_only=True)
class DigitsOptions:
    """Options of the dataset."""

    size: int = option(20, "Rows of a split.", ge=1)


@attrs.define(kw_only=True)
class HintedOptions:
    """Options of the workflow."""

    hint: str = option("Answer with digits.", "Text below the question.")
