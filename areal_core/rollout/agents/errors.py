"""Errors that an agent sees, in the form of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_COMPLETIONS = "max_completions"
CONTEXT_LENGTH = "context_length_exceeded"
ENGINE_ERROR = "engine_error"


class APIError(Exception):
    """A refused request.

    Args:
        message: what was wrong, and what would be right.
        status: HTTP status code.
        param: the field of the request that it is about.
        code: a short name for programs, e.g. ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.message, self.status, self.param, self.code = message, status, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        kinds = {404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_behind(error: BaseException | None) -> str | None:
    """The code of the refused request that ``error`` comes from (ours, the client's, or a library's around it)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        code = getattr(error, "code", None)
        if code in (MAX_COMPLETIONS, CONTEXT_LENGTH, ENGINE_ERROR):
            return str(code)
        error = error.__cause__ or error.__context__
    return None


def single_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, as ``asyncio.TaskGroup`` raises it; any other error is itself."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from single_errors(member)
    else:
        yield error


def no_session() -> APIError:
    return APIError("this episode has ended, or its base_url was changed", status=404, code="no_session")


def unsupported(field: str, message: str) -> APIError:
    return APIError(f"{field}: {message}", param=field, code="unsupported_parameter")


def invalid(field: str, message: str) -> APIError:
    return APIError(f"{field}: {message}", param=field, code="invalid_value")
