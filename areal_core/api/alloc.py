"""Backend strings: ``fsdp:d4t2c2`` names an engine and the sizes of its mesh."""

from __future__ import annotations

import re

import attrs

from areal_core.errors import BadInputError

_LETTERS = {"d": "data", "t": "tensor", "c": "context", "p": "pipeline", "e": "expert", "et": "expert_tensor"}
_TOKEN = re.compile(r"(et|[dtcpe])(\d+)")
_BACKEND = re.compile(r"(?P<name>[a-z0-9][a-z0-9_.@-]*)(?::(?P<sizes>.*))?")


@attrs.frozen(kw_only=True)
class ParallelStrategy:
    """Sizes of a mesh; each defaults to 1.

    ``data * tensor * context * pipeline`` is the number of ranks. Experts are spread over the data and context
    (and, with ``expert_tensor`` below ``tensor``, tensor) ranks, so ``expert`` adds none.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    def __str__(self) -> str:
        sizes = ((letter, getattr(self, name)) for letter, name in _LETTERS.items())
        return "".join(f"{letter}{size}" for letter, size in sizes if size > 1) or "d1"

    def check_world_size(self, world_size: int, *, key: str = "actor.backend") -> None:
        """Raise unless the sizes multiply to ``world_size``; says which sizes would."""
        if self.world_size == world_size:
            return
        rest = self.world_size // self.data
        if world_size % rest == 0:
            fix = f"Use {attrs.evolve(self, data=world_size // rest)} for {world_size} processes"
        else:
            fix = f"{world_size} processes are not a multiple of t*c*p = {rest}"
        raise BadInputError(
            f"{key}: {self} needs {self.world_size} processes, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running. {fix}, or start {self.world_size} with "
            f"`torchrun --nproc-per-node {self.world_size} --no-python areal train ...`."
        )


@attrs.frozen
class Backend:
    """A parsed backend string: the engine's name (perhaps ``name@distribution``) and the mesh."""

    name: str
    parallel: ParallelStrategy

    def __str__(self) -> str:
        return f"{self.name}:{self.parallel}"


def parse_backend(text: str, *, key: str = "backend") -> Backend:
    """Parse ``name`` or ``name:d4t2c2p1e8et1`` (letters in any order, each at most once).

    Raises:
        BadInputError: naming ``key`` and the part that is wrong.
    """
    match = _BACKEND.fullmatch(text)
    if match is None:
        raise BadInputError(f"{key}: {text!r} is not a backend. Write a name and sizes, e.g. 'fsdp:d4t2'.")
    sizes: dict[str, int] = {}
    rest = match["sizes"] or ""
    position = 0
    while position < len(rest):
        token = _TOKEN.match(rest, position)
        if token is None:
            raise BadInputError(
                f"{key}: cannot read {rest[position:]!r} in {text!r}. Sizes are a letter and a number: "
                "d (data), t (tensor), c (context), p (pipeline), e (expert), et (expert tensor); e.g. 'fsdp:d4t2'."
            )
        name, size = _LETTERS[token[1]], int(token[2])
        if name in sizes:
            raise BadInputError(f"{key}: {token[1]!r} stands twice in {text!r}.")
        if size < 1:
            raise BadInputError(f"{key}: {token[0]!r} in {text!r} must be at least 1.")
        sizes[name] = size
        position = token.end()
    return Backend(match["name"], ParallelStrategy(**sizes))
