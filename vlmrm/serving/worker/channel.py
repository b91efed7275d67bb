"""Messages between the service and a worker: JSON trees that may hold bytes, over a socket, without pickle.

A message is two lengths (8 bytes each, big endian), JSON, and the bytes that it refers to as {"$bytes": [start, end]};
a dictionary that looks like that is escaped as {"$dict": {...}}. Only the standard library is used.
"""

import contextlib
import ctypes
import json
import re
import signal
import socket
import struct
import threading

LENGTHS = struct.Struct(">QQ")


def pack(message):
    """Return a tree of dicts, lists, numbers, texts, None and bytes as one bytes object."""
    blobs, ends = [], [0]
    head = json.dumps(_encode(message, blobs, ends), allow_nan=False).encode()
    return b"".join([LENGTHS.pack(len(head), ends[-1]), head, *blobs])


# Not nested in `pack`: a recursive closure is a reference cycle, which keeps the blobs until the collector runs.
def _encode(value, blobs, ends):
    if isinstance(value, (bytes, bytearray, memoryview)):
        blobs.append(value)
        ends.append(ends[-1] + len(value))
        return {"$bytes": ends[-2:]}
    if isinstance(value, dict):
        items = {name: _encode(item, blobs, ends) for name, item in value.items()}
        return {"$dict": items} if _is_marked(items) else items
    if isinstance(value, (list, tuple)):
        return [_encode(item, blobs, ends) for item in value]
    return value


def unpack(packed):
    """Return the tree that `pack` was given; raises ValueError for a message that is cut off."""
    view = memoryview(packed)
    lengths = LENGTHS.unpack(view[: LENGTHS.size]) if len(view) >= LENGTHS.size else (0,)
    if len(view) != LENGTHS.size + sum(lengths):
        raise ValueError("a message is cut off")
    body = LENGTHS.size + lengths[0]
    return _decode(json.loads(bytes(view[LENGTHS.size : body])), view[body:])


def _decode(value, body):
    if isinstance(value, dict):
        if _is_marked(value):
            [(mark, content)] = value.items()
            if mark == "$bytes":
                start, end = content
                return bytes(body[start:end])
            value = content
        return {name: _decode(item, body) for name, item in value.items()}
    return [_decode(item, body) for item in value] if isinstance(value, list) else value


def _is_marked(value):
    return list(value) in (["$bytes"], ["$dict"])


class Channel:
    """A worker's end of the socket; any thread may send."""

    def __init__(self, descriptor):
        self._socket = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()

    def send(self, message):
        packed = pack(message)
        with self._sending:
            self._socket.sendall(packed)

    def receive(self):
        """Return the next message; None once the service has closed its end, even in the middle of a message."""
        lengths = self._read(LENGTHS.size)
        if lengths is None:
            return None
        head, body = map(self._read, LENGTHS.unpack(lengths))
        return None if head is None or body is None else _decode(json.loads(head), memoryview(body))

    def _read(self, count):
        data = bytearray(count)
        view = memoryview(data)
        while view:
            read = self._socket.recv_into(view)
            if not read:
                return None
            view = view[read:]
        return data


def die_with_parent():
    """Have Linux kill this process when its parent ends in whatever way, so that no orphan keeps the GPU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def give_memory_back():
    """Have glibc return to the system what this process has freed: by itself it keeps most of that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# An absolute path of two parts or more, not the tail of a URL: its last part is what a reader needs.
PATH = re.compile(r"(?<![\w.:/~\-])~?(?:/[\w.@+\-]+)+/([\w.@+\-]+)")
SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)


def redact_paths(text):
    """Return `text` with each absolute path cut to its last part."""
    return PATH.sub(r"\1", text)


def redact_secrets(text, secrets):
    """Return `text` with *** in place of each of `secrets`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def redact(value, secrets):
    """Strip absolute paths and `secrets` from the texts of a JSON tree; leave bytes as they are."""
    if isinstance(value, str):
        return redact_paths(redact_secrets(value, secrets))
    if isinstance(value, dict):
        return {name: redact(item, secrets) for name, item in value.items()}
    return [redact(item, secrets) for item in value] if isinstance(value, list) else value


def find_secrets(options):
    """Return the texts of options with names that say that they are secret, at any depth."""
    if isinstance(options, dict):
        named = {value for name, value in options.items() if SECRET.search(str(name)) and isinstance(value, str)}
        return (named - {""}).union(*map(find_secrets, options.values()))
    return set().union(*map(find_secrets, options)) if isinstance(options, (list, tuple)) else set()
