"""A connection of two nodes that have the same key: whole messages, each with a proof of who wrote it.

Both ends prove that they know the key before anything else is read. What passes is not encrypted: no message
holds a key, and the network between the nodes is to be trusted not to listen.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
from contextlib import suppress

from buckeye.errors import BuckeyeError

_MAGIC = b"buckeye-node-1\n"
_NONCE, _PROOF = 32, 32
_LENGTH = struct.Struct("!I")
_MOST = 16 << 20
_GREETING_SECONDS = 10.0


class LostNodeError(BuckeyeError):
    """The other end is gone, silent, or no node of this run."""


class Channel:
    """One end of a connection. `send` may be called by several threads, `receive` by one."""

    def __init__(self, connection: socket.socket, session: bytes, *, mine: bytes, theirs: bytes) -> None:
        self._socket = connection
        self._session, self._mine, self._theirs = session, mine, theirs
        self._sent = self._received = 0
        self._buffer = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float) -> None:
        """How long the other end may be silent, or not take what is sent."""
        self._socket.settimeout(seconds)

    def send(self, message: bytes) -> None:
        """Raises LostNodeError if the other end does not take it within the socket's timeout."""
        with self._sending:
            proof = self._proof(self._mine, self._sent, message)
            self._sent += 1
            try:
                self._socket.sendall(_LENGTH.pack(len(message)) + proof + message)
            except OSError as error:
                raise LostNodeError(_reason(error)) from None

    def receive(self) -> list[bytes]:
        """Wait for something to come, and return the messages that are whole by then. Raises LostNodeError at
        the end of the connection, and for what nobody with the key has written."""
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise LostNodeError(_reason(error)) from None
        if not data:
            raise LostNodeError("the connection was closed")
        self._buffer += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` is told so."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next(self) -> bytes | None:
        head = _LENGTH.size + _PROOF
        if len(self._buffer) < head:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MOST:
            raise LostNodeError("it said something that is no message")
        if len(self._buffer) < head + length:
            return None
        proof, message = self._buffer[_LENGTH.size : head], self._buffer[head : head + length]
        self._buffer = self._buffer[head + length :]
        if not hmac.compare_digest(proof, self._proof(self._theirs, self._received, message)):
            raise LostNodeError("it said something that is not of its key")
        self._received += 1
        return message

    def _proof(self, side: bytes, number: int, message: bytes) -> bytes:
        return _hmac(self._session, side + number.to_bytes(8, "big") + message)


def greet(connection: socket.socket, key: str, *, timeout: float) -> Channel:
    """The channel of whoever has opened the connection. Afterwards nothing may take longer than `timeout`
    seconds. Raises LostNodeError for one who is no head of a run, or has another key."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        hello = _exactly(connection, len(_MAGIC) + _NONCE)
        if not hello.startswith(_MAGIC):
            raise LostNodeError("this is no run of several nodes, or one of another version of Buckeye")
        nonces = hello[len(_MAGIC) :] + (own := secrets.token_bytes(_NONCE))
        connection.sendall(own + _hmac(key.encode(), b"node" + nonces))
        answer = _exactly(connection, _PROOF)  # closed instead, if it has another key
    except OSError as error:
        raise LostNodeError(_reason(error)) from None
    if not hmac.compare_digest(answer, _hmac(key.encode(), b"head" + nonces)):
        raise LostNodeError("it has another key")
    return _channel(connection, key, nonces, timeout, mine=b"n", theirs=b"h")


def welcome(connection: socket.socket, key: str, *, timeout: float) -> Channel:
    """The channel of whoever was connected to; otherwise as `greet`."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        own = secrets.token_bytes(_NONCE)
        connection.sendall(_MAGIC + own)
        answer = _exactly(connection, _NONCE + _PROOF)
        nonces = own + answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _hmac(key.encode(), b"node" + nonces)):
            raise LostNodeError("it has another key")
        connection.sendall(_hmac(key.encode(), b"head" + nonces))
    except OSError as error:
        raise LostNodeError(_reason(error)) from None
    return _channel(connection, key, nonces, timeout, mine=b"h", theirs=b"n")


def derived_key(key: str, purpose: str) -> str:
    """Another key, which every node can compute and from which nobody learns the first."""
    return _hmac(key.encode(), b"for " + purpose.encode()).hex()


def _channel(
    connection: socket.socket, key: str, nonces: bytes, timeout: float, *, mine: bytes, theirs: bytes
) -> Channel:
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection, _hmac(key.encode(), b"session" + nonces), mine=mine, theirs=theirs)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise LostNodeError("it closed the connection: its key is another one, or it has ended")
        data += chunk
    return data


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return error.strerror or str(error) or type(error).__name__
