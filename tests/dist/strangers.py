"""Who attacks the sockets of a job, and records what its ranks send.

The protocol of ZeroMQ (ZMTP 3.1) is spoken by hand, so that every byte can be wrong.
The frames of the ranks are as docs/protocol.md says.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from random import Random

import zmq

RATE = 200  # frames and connections a second
MAX_HELD = 100  # connections that are left open

REQUEST = 0
MAGIC = b"TKVF"
TOKEN_AT = 8
BODY_AT = 32  # after magic, version, direction, token and length
JOB_MASK = (1 << 62) - 1

MORE, LONG, COMMAND = 1, 2, 4


# -- ZMTP


def greeting(mechanism: bytes = b"NULL", minor: int = 1) -> bytes:
    start = b"\xff" + bytes(8) + b"\x7f" + bytes([3, minor])
    return start + mechanism.ljust(20, b"\0")[:20] + bytes(32)


def part(data: bytes, flags: int = 0) -> bytes:
    if len(data) > 255:
        return bytes([flags | LONG]) + len(data).to_bytes(8, "big") + data
    return bytes([flags, len(data)]) + data


def message(parts: list[bytes]) -> bytes:
    last = len(parts) - 1
    return b"".join(part(each, MORE * (i < last)) for i, each in enumerate(parts))


def ready(identity: bytes = b"", kind: bytes = b"DEALER") -> bytes:
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", identity)):
        body += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return part(body, COMMAND)


def steps_of(stream: bytes) -> list[bytes]:
    """A stream, split where its sender waits for the other side's answer."""
    steps = [stream[:64]]
    at = 64
    while at + 2 <= len(stream) and stream[at] & COMMAND and len(steps) < 4:
        wide = stream[at] & LONG
        size = int.from_bytes(stream[at + 1 : at + (9 if wide else 2)], "big")
        end = at + (9 if wide else 2) + size
        steps.append(stream[at:end])
        at = end
    return [*steps[:-1], steps[-1] + stream[at:]]


# -- frames of the ranks


def integer(value: int) -> bytes:
    digits = bytearray()
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def hash64(text: str) -> int:
    result = 0xCBF29CE484222325
    for byte in text.encode():
        result = (result ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return result


def head(token: bytes, body: bytes, direction: int = REQUEST) -> bytes:
    size = struct.pack("<Q", BODY_AT + len(body))
    return MAGIC + struct.pack("<HH", 2, direction) + token + size + body


def request(token: bytes, rank: int, server: int, kind: int, rest: bytes) -> bytes:
    """A frame of the first dist_sync store, that would be right with its token."""
    job = int.from_bytes(token[:8], "little") & JOB_MASK
    fields = (job, hash64("dist_sync//0"), rank, server, 1, 0, 0, 0, 0)
    body = b"".join(map(integer, fields)) + bytes(8) + integer(1) + integer(kind)
    return head(token, body + rest)


# -- recording


class Recorder:
    """Records the TCP connections through a device from the moment it is made."""

    def __init__(self, device: str) -> None:
        """PermissionError where this user may not."""
        every_protocol = 3
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(every_protocol)
        )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        self._socket.bind((device, every_protocol))
        self._socket.settimeout(0.1)
        self._segments: dict[tuple[bytes, bytes], dict[int, bytes]] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                self._take(self._socket.recv(1 << 17))

    def _take(self, packet: bytes) -> None:
        ip_size = (packet[0] & 15) * 4
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        (total,) = struct.unpack_from("!H", packet, 2)
        tcp = packet[ip_size : total or len(packet)]
        ports, sequence, flags = tcp[:4], struct.unpack_from("!I", tcp, 4)[0], tcp[13]
        data = tcp[(tcp[12] >> 4) * 4 :]
        flow = self._segments.setdefault((packet[12:20], ports), {})
        if flags & 2:  # the connection's first
            flow[-1] = struct.pack("!I", (sequence + 1) & 0xFFFFFFFF)
        elif data:
            flow[sequence] = data

    def streams(self) -> list[bytes]:
        """Stops; what each side of each connection of ZeroMQ has sent."""
        self._stopping = True
        self._thread.join()
        self._socket.close()
        found = []
        for flow in self._segments.values():
            if -1 not in flow:
                continue
            at = struct.unpack("!I", flow[-1])[0]
            data = bytearray()
            while at in flow and len(data) < 4 << 20:
                data += flow[at]
                at = (at + len(flow[at])) & 0xFFFFFFFF
            if data.startswith(b"\xff"):
                found.append(bytes(data))
        return found


def messages_of(stream: bytes) -> list[list[bytes]]:
    """The messages of a stream with the mechanism NULL."""
    found: list[list[bytes]] = []
    parts: list[bytes] = []
    at = 64
    while at + 9 <= len(stream):
        flags = stream[at]
        size = 9 if flags & LONG else 2
        length = int.from_bytes(stream[at + 1 : at + size], "big")
        data = stream[at + size : at + size + length]
        at += size + length
        if at > len(stream):
            break
        if flags & COMMAND:
            continue
        parts.append(data)
        if not flags & MORE:
            found.append(parts)
            parts = []
    return found


# -- attacks


class Stranger:
    """Attacks in an order that the seed decides."""

    def __init__(
        self,
        mode: str,
        seed: int,
        targets: list[str],
        token: bytes,
        streams: list[bytes] | None = None,
    ) -> None:
        """`streams`: recorded; an insider uses the token."""
        self._mode = mode
        self._random = Random(seed)
        self._targets = targets
        self._token = token
        self._streams = streams or []
        self._messages = [
            found
            for stream in self._streams
            for found in messages_of(stream)
            if found[0][:8] == head(b"", b"")[:8] and mode != "curve"
        ]
        self._held: list[tuple[float, int, socket.socket]] = []  # a heap, by time
        self._context = zmq.Context()
        self._attacks: list[Callable[[], list[bytes]]] = [
            self._garbage,
            self._half_greeting,
            self._handshake_garbage,
            self._huge_length,
            self._random_parts,
            self._wrong_token,
            self._wrong_token,
            self._commands,
        ]
        if self._streams:
            self._attacks += [self._replayed_stream, self._damaged_stream] * 2
        if self._messages:
            self._attacks += [self._replayed, self._damaged] * 3
        if mode == "insider":
            self._attacks = [self._flipped, self._forged, self._forged_error]

    def attack(self, count: int) -> tuple[int, int]:
        """Sends so many; the number, and how many the ranks cut off."""
        refused = 0
        due = time.monotonic()
        for _ in range(count):
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + 1 / RATE, time.monotonic() - 1)
            target = self._random.choice(self._targets)
            if self._random.random() < 0.03:
                self._by_library(target)
                continue
            try:
                self._send(target, self._random.choice(self._attacks)())
            except OSError:
                refused += 1
        return count, refused

    def _send(self, target: str, steps: list[bytes]) -> None:
        scheme, _, where = target.partition("://")
        if scheme == "ipc":
            connection = socket.socket(socket.AF_UNIX)
        else:
            connection = socket.socket(socket.AF_INET)
        connection.settimeout(0.5)
        address, _, port = where.rpartition(":")
        try:
            connection.connect(where if scheme == "ipc" else (address, int(port)))
            connection.sendall(steps[0])
            # With the mechanism NULL, the other side's command READY belongs to it.
            awaited = 64 if self._mode == "curve" else 107
            for step in steps[1:]:
                while awaited > 0 and (answer := connection.recv(awaited)):
                    awaited -= len(answer)
                connection.sendall(step)
                awaited = 1
        except OSError:
            connection.close()
            raise
        # What is closed at once may never be read.
        stays = 0.05 if self._random.random() < 0.7 else 5.0
        heapq.heappush(
            self._held, (time.monotonic() + stays, id(connection), connection)
        )
        while len(self._held) > MAX_HELD or self._held[0][0] < time.monotonic():
            heapq.heappop(self._held)[2].close()

    def _by_library(self, target: str) -> None:
        """An honest ZeroMQ, with wrong keys or wrong frames."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 100
        if self._random.random() < 0.5:
            dealer.curve_serverkey, _ = zmq.curve_keypair()
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(target)
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart([self._bytes(200)] * 3, zmq.DONTWAIT)
        dealer.close()

    # What they send.

    def _bytes(self, limit: int) -> bytes:
        return self._random.randbytes(self._random.randrange(limit))

    def _flip(self, data: bytes, first: int, end: int) -> bytes:
        result = bytearray(data)
        bits = range(8 * first, 8 * min(end, len(data)))
        # Distinct ones: two flips of a bit would leave a token that is right.
        for bit in self._random.sample(bits, self._random.choice((1, 1, 2, 8))):
            result[bit // 8] ^= 1 << bit % 8
        return bytes(result)

    def _hello(self, rest: bytes = b"") -> list[bytes]:
        # Identities are the router's to give: a stranger may wish for any.
        chosen = self._random.random()
        if chosen < 0.7:
            return [greeting(), ready() + rest]
        return [greeting(), ready(b"\0" * (chosen < 0.85) + self._bytes(6)) + rest]

    def _garbage(self) -> list[bytes]:
        return [self._bytes(self._random.choice((10, 100, 20_000)))]

    def _half_greeting(self) -> list[bytes]:
        return [greeting()[: self._random.randrange(64)]]

    def _handshake_garbage(self) -> list[bytes]:
        mechanism = self._random.choice((b"NULL", b"PLAIN", b"CURVE", self._bytes(21)))
        start = greeting(mechanism, self._random.randrange(3))
        body = self._random.choice((b"\x05READY", b"\x05HELLO", b"\x08INITIATE", b""))
        return [start, part(body + self._bytes(500), COMMAND) + self._bytes(100)]

    def _huge_length(self) -> list[bytes]:
        size = self._random.choice((9 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
        flags = LONG | self._random.choice((0, MORE, COMMAND))
        return self._hello(bytes([flags]) + size.to_bytes(8, "big") + b"x" * 99)

    def _random_parts(self) -> list[bytes]:
        if self._random.random() < 0.01:
            return self._hello(message([b""] * 20_000))
        parts = [self._bytes(2000) for _ in range(self._random.randrange(1, 9))]
        return self._hello(message(parts))

    def _commands(self) -> list[bytes]:
        ping = b"\x04PING" + bytes(2) + self._bytes(40)
        other = self._random.choice((b"\x05ERROR\xff", b"\x09SUBSCRIBE", b"\x04PONG"))
        return self._hello((part(ping, COMMAND) + part(other, COMMAND)) * 3)

    def _wrong_token(self) -> list[bytes]:
        """Right but for the token."""
        if self._messages and self._random.random() < 0.5:
            parts = list(self._random.choice(self._messages))
            end = TOKEN_AT + 16
            parts[0] = self._flip(parts[0], TOKEN_AT, end)
            return self._hello(message(parts))
        # A token that is one bit off keeps the job's number, which is a part of it.
        token = self._flip(self._token, 8, 16)
        return self._hello(message([self._request(token)]))

    def _request(self, token: bytes) -> bytes:
        rank, server = self._random.randrange(2), self._random.randrange(2)
        return request(token, rank, server, self._random.randrange(4), self._bytes(30))

    # With what was recorded.

    def _replayed_stream(self) -> list[bytes]:
        return steps_of(self._random.choice(self._streams))

    def _damaged_stream(self) -> list[bytes]:
        stream = self._random.choice(self._streams)
        if self._mode != "curve":
            # Flips where no token protects would be an insider's.
            return steps_of(stream[: self._random.randrange(len(stream))])
        stream = stream[: self._random.randrange(1, 1 << 20)]
        damaged = self._random.random() < 0.7
        return steps_of(self._flip(stream, 0, 2000) if damaged else stream)

    def _replayed(self) -> list[bytes]:
        chosen = self._random.choices(self._messages, k=self._random.randrange(1, 4))
        return self._hello(b"".join(map(message, chosen)))

    def _damaged(self) -> list[bytes]:
        parts = list(self._random.choice(self._messages))
        how = self._random.randrange(4)
        if how == 0:
            parts[0] = self._flip(parts[0], 0, TOKEN_AT)
        elif how == 1:
            parts[0] = parts[0][: self._random.randrange(len(parts[0]))]
        elif how == 2:
            parts[0] = head(self._token, b"")[:BODY_AT] + parts[0][BODY_AT:]
        else:
            parts = [*parts, self._bytes(100)]
        return self._hello(message(parts))

    # With the token.

    def _flipped(self) -> list[bytes]:
        parts = list(self._random.choice(self._messages))
        if len(parts[0]) > BODY_AT:
            parts[0] = self._flip(parts[0], BODY_AT, len(parts[0]))
        if self._random.random() < 0.3:
            parts = parts[: self._random.randrange(1, len(parts) + 1)]
        return self._hello(message(parts))

    def _forged(self) -> list[bytes]:
        return self._hello(message([self._request(self._token)]))

    def _forged_error(self) -> list[bytes]:
        body = os.urandom(self._random.randrange(80))
        return self._hello(message([head(self._token, body)]))
