"""What a plugin tells the kernel about one implementation."""

from __future__ import annotations

from typing import Any, Literal

import attrs

#: Version of the contracts in ``areal_core.api`` and ``areal_core.hookspecs``. A plugin module states the one it was
#: written for as ``AREAL_API_VERSION = "1.0"``. The major must be equal and the minor not newer than the kernel's.
API_VERSION = "1.0"

Device = Literal["any", "cpu", "cuda"]


@attrs.frozen(kw_only=True)
class Registration:
    """One named implementation. Holds strings only, so that listing plugins imports nothing heavy.

    Attributes:
        name: what a user writes in a configuration, e.g. ``"fsdp"``. Lower case, no ``@`` and no ``:``.
        target: lazy import path ``"package.module:attribute"``.
        description: one line for ``areal plugins list``.
        config: lazy import path of the attrs class that validates this plugin's own options, or None if it has none.
            The options reach an engine as ``config.options``, and any other implementation as keyword arguments.
        requires: requirement strings of distributions that must be installed, e.g. ``("flash-attn>=2.6",)``. A plugin
            whose requirement is missing is listed as broken, with the command that would install it.
        extra: the extra of the plugin's distribution that installs ``requires``, if there is one.
        device: ``"cuda"`` where the implementation cannot run without a GPU.
        metadata: anything a registry documents beyond this, e.g. ``{"backend_letters": "dtc"}`` for a train engine.
    """

    name: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z0-9][a-z0-9_.-]*"))
    target: str = attrs.field(validator=attrs.validators.matches_re(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"))
    description: str = ""
    config: str | None = None
    requires: tuple[str, ...] = ()
    extra: str | None = None
    device: Device = "any"
    metadata: dict[str, Any] = attrs.field(factory=dict, hash=False)
