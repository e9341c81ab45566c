"""What ``areal doctor`` finds."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class Check:
    """One thing that was looked at. ``fix`` says what to do, if anything."""

    name: str
    status: Literal["ok", "warning", "error"]
    detail: str
    fix: str = ""
