"""Options of the dataset (`train_dataset.gsm8k`) and of the reward (`reward.gsm8k`)."""

from __future__ import annotations

import attrs

from areal_core.config.fields import option


@attrs.define(kw_only=True)
class GSM8KConfig:
    """How rows are made."""

    subset: str = option("main", "Configuration of the hub's dataset: main or socratic.")
    instruction: str = option("", "Text put after each question, e.g. how to write the answer.")
    strip_calculator: bool = option(False, "SFT: remove the <<16-3=13>> marks from the reference solutions.")


@attrs.define(kw_only=True)
class GSM8KRewardConfig:
    """What counts as an answer."""

    last_number: bool = option(
        False, "Where a completion has neither #### nor \\boxed{}, take its last number instead of scoring 0."
    )
