"""Start of the generation process: nothing heavy until the parent's end is watched for."""

from __future__ import annotations

import socket

from areal_core.child import serve_parent


def main(socket_descriptor: int, segment: int) -> None:
    """Serve until the parent says stop, or is gone. Never returns.

    Args:
        socket_descriptor: of the connection to the parent.
        segment: descriptor of the shared weights.
    """

    def serve(sock: socket.socket) -> None:
        from areal_local.serving import Server

        Server(sock, segment).serve()

    serve_parent(socket_descriptor, serve)
