"""Tools for tests."""

import asyncio
import threading

RELEASE = threading.Event()


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def echo(text: str) -> str:
    """Say it back.

    Args:
        text: what to say.
    """
    return text


async def wait(text: str) -> dict:
    """Say it back after a while.

    Args:
        text: what to say.
    """
    await asyncio.sleep(0)
    return {"text": text}


def hang(text: str) -> str:
    """Never answer.

    Args:
        text: ignored.
    """
    RELEASE.wait(60)
    return text


async def hang_async() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


def leave(how: str) -> str:
    """End in a bad way.

    Args:
        how: which one.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "stop":
        raise StopIteration
    if how == "timeout":
        raise TimeoutError("the database is slow")
    raise ValueError("no such record")


def undocumented(a):
    return a


class NotAFunction:
    """Nothing."""


class Other:
    @staticmethod
    def add(a: int) -> int:
        """Another add.

        Args:
            a: a number.
        """
        return a
