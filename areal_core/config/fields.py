"""Fields of configuration classes: a default, a help text, and constraints that are checked and documented alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

#: What a name that a user chooses looks like, e.g. the label of a reward: it becomes part of keys and metric names.
LABEL = r"[A-Za-z_][A-Za-z0-9_]*"

_COMPARISONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": (">=", lambda value, bound: value >= bound),
    "gt": (">", lambda value, bound: value > bound),
    "le": ("<=", lambda value, bound: value <= bound),
    "lt": ("<", lambda value, bound: value < bound),
}


class ItemError(ValueError):
    """What a validator found wrong with one item of a list or mapping; ``item`` is its index or key."""

    def __init__(self, item: str | int, message: str) -> None:
        self.item = item
        super().__init__(message)


class _Keys:
    """An attrs validator for the keys of a mapping."""

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern)

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        for key in value or ():
            if not isinstance(key, str) or not self.pattern.fullmatch(key):
                raise ItemError(
                    key, f"{key!r} cannot be a key here; use letters, digits and _, and begin with no digit"
                )


class _Bounds:
    """An attrs validator for ``ge``, ``gt``, ``le`` and ``lt``; None passes, for optional fields."""

    def __init__(self, bounds: Mapping[str, float]) -> None:
        self.bounds = bounds

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        for name, bound in self.bounds.items():
            symbol, holds = _COMPARISONS[name]
            # `not holds` rather than the opposite comparison: a NaN must fail every bound.
            if not holds(value, bound):
                raise ValueError(f"must be {symbol} {bound}, got {value!r}")


def option(
    default: Any = attrs.NOTHING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    labels: bool = False,
    validator: Callable[[Any, attrs.Attribute[Any], Any], None] | None = None,
    internal: bool = False,
) -> Any:
    """An attrs field of a configuration class.

    Args:
        default: the default; leave out for a required field.
        help: one sentence, shown in the reference and in the JSON Schema.
        factory: makes the default, for mutable ones.
        ge, gt, le, lt: bounds of a number.
        labels: the keys of this mapping are names that a user chooses: letters, digits and ``_``, no digit first.
        validator: any further attrs validator; raises ``ValueError`` with what was wrong and what would be right.
        internal: set by the program, not by a user: a key in YAML is an error.
    """
    bounds = {k: v for k, v in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if v is not None}
    validators: list[Any] = [_Bounds(bounds)] if bounds else []
    if labels:
        validators.append(_Keys(LABEL))
    if validator is not None:
        validators.append(validator)
    keywords: dict[str, Any] = {"factory": factory} if factory is not None else {"default": default}
    return attrs.field(
        **keywords,
        validator=validators or None,
        kw_only=True,
        metadata={"help": help, "internal": internal, "labels": labels, **bounds},
    )


@attrs.frozen
class PluginSlot:
    """Marks a configuration class as a place where a plugin is selected and configured.

    The class states ``PLUGIN_SLOT: ClassVar[PluginSlot]`` and has the fields ``selector`` (the plugin's name) and
    ``plugin_options`` (internal). In YAML, the section under the plugin's own name is validated by the plugin's
    class::

        rollout:
          backend: local        # the selector
          local: {max_batch_size: 64}   # areal_local's own options

    Attributes:
        registry: the registry hook, e.g. ``"areal_train_engines"``.
        selector: the field that names the plugin. A backend string such as ``fsdp:d4`` selects ``fsdp``.
    """

    registry: str
    selector: str
