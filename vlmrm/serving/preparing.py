"""Processes beside the model that turn media into its input: a file that crashes its decoder so fails by itself."""

from __future__ import annotations

import math
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from vlmrm.conversation import Conversation, Image, Medium, Message, Video, VideoOptions, media_of
from vlmrm.data.media import image_size
from vlmrm.errors import MediaError, RowError
from vlmrm.rendering import ProcessedMedia, Renderer, pack_media, read_media
from vlmrm.serving.worker.channel import Channel, die_with_parent

MEMORY = 4 * 2**30  # bytes that a process may take for one image or video
LONGEST_S = 120  # for one of them
MEDIA, ERROR = b"m", b"e"  # which the file of a result holds
SENT = (str, bytes, bytearray, memoryview)
LARGE_PIXELS = 2**20  # of an image: a smaller one takes no more memory or time than the way to a process and back

Row = Conversation | RowError


class MediaProcesses:
    """Up to `count` processes for the media of a call, started when they are needed; threads may call side by side.

    Make it before this process has threads and a GPU, neither of which a fork survives, and then `start` it.
    """

    def __init__(self, count: int):
        self._forker, remote = socket.socketpair()
        if os.fork() == 0:
            _run(_fork_processes, remote)
        remote.close()
        self._asking = threading.Lock()
        self._count = count
        self._idle: queue.SimpleQueue[_MediaProcess] = queue.SimpleQueue()

    def start(self, renderer: Renderer) -> bool:
        """Have the processes work as `renderer` does; False where its code was loaded after they were made."""
        self._renderer = renderer
        channel = Channel(os.dup(self._forker.fileno()))
        try:
            channel.send(pickle.dumps(replace(renderer, store=None)))
            return channel.receive() is not None
        except (pickle.PicklingError, AttributeError, TypeError, OSError):
            return False

    def process(self, rows: Iterable[Row]) -> tuple[list[Row], dict[str, ProcessedMedia]]:
        """Return the rows, an error in place of each with a broken medium, and the media by key."""
        rows = list(rows)
        wanted: dict[str, Medium] = {}
        owners: dict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            try:
                for medium in media_of(row.messages) if isinstance(row, Conversation) else ():
                    if _is_sent(medium):
                        key = self._renderer.key(medium)
                        wanted[key] = medium
                        owners[key].append(number)
            except RowError as error:
                rows[number] = error
        media: dict[str, ProcessedMedia] = {}
        with ThreadPoolExecutor(self._count) as threads:
            results = list(threads.map(self._one, wanted, wanted.values()))
        for key, result in zip(wanted, results, strict=True):
            if isinstance(result, ProcessedMedia):
                media[key] = result
                continue
            for number in owners[key]:
                rows[number] = result
        return rows, media

    def _one(self, key: str, medium: Medium) -> ProcessedMedia | RowError:
        store = self._renderer.store
        media = None if store is None else store.get(key)
        if media is None:
            try:
                process = self._idle.get_nowait()
            except queue.Empty:
                process = self._fork()
            media = process.process(medium)
            if process.alive:
                self._idle.put(process)
            if store is not None and isinstance(media, ProcessedMedia):
                store.put(key, media)
        return media

    def _fork(self) -> _MediaProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._asking:
                socket.send_fds(self._forker, [b"f"], [theirs.fileno()])
            return _MediaProcess(ours)
        except (OSError, TypeError):
            sys.stderr.write("the process that forks those for images and videos has ended: so does the worker\n")
            os._exit(1)


class _MediaProcess:
    """A process at the other end of `end`."""

    def __init__(self, end: socket.socket):
        self._end, self._channel = end, Channel(os.dup(end.fileno()))
        self._number = self._channel.receive()["pid"]
        self.alive = True
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # of both objects, which are one socket
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", LONGEST_S, 0))

    def process(self, medium: Medium) -> ProcessedMedia | RowError:
        options = medium.options.as_dict() if isinstance(medium, Video) else {}
        try:
            self._channel.send({"kind": medium.kind, "reference": medium.reference, "options": options})
            result, files, _, _ = socket.recv_fds(self._end, 1, 1)
        except OSError:  # it was silent, or has gone
            result, files = b"", []
        if not files:
            self.alive = False
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)
            self._end.close()
            return MediaError(
                f"the process that decoded its {medium.kind} ended, or took over {LONGEST_S} s or "
                f"{MEMORY // 2**30} GiB: encode the {medium.kind} again, or send a smaller one"
            )
        with open(files[0], "rb"):  # closes it
            path = Path(f"/proc/self/fd/{files[0]}")
            return read_media(str(path)) if result == MEDIA else MediaError(path.read_text())


def _is_sent(medium: Medium) -> bool:
    """Return whether a process decodes a medium; raises MediaError for an image without a header."""
    if isinstance(medium, Image) and isinstance(medium.reference, SENT):
        return math.prod(image_size(medium.reference)) >= LARGE_PIXELS
    parts = medium.reference if isinstance(medium.reference, tuple) else (medium.reference,)
    return all(isinstance(part, SENT) for part in parts)


# In the processes ----------------------------------------------------------------------------------------------------


def _run(work: Callable[..., None], *arguments: Any) -> NoReturn:
    """End this process after `work`, with nothing of what the process that was forked would do."""
    try:
        work(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _fork_processes(remote: socket.socket) -> None:
    """Fork a process for each socket that is sent, until the worker ends."""
    die_with_parent()
    for number in map(int, os.listdir("/proc/self/fd")):  # those of the worker, its channel to the service among them
        if number > 2 and number != remote.fileno():
            with suppress(OSError):
                os.close(number)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel = Channel(os.dup(remote.fileno()))
    if (given := channel.receive()) is None:
        return
    renderer = pickle.loads(given)  # by the worker itself, of which this is a part
    channel.send("ready")
    while True:
        asked, ends, _, _ = socket.recv_fds(remote, 1, 1)
        if not asked:
            return
        if os.fork() == 0:
            _run(_process_media, ends[0], renderer)
        os.close(ends[0])


def _process_media(descriptor: int, renderer: Renderer) -> None:
    """Process what comes over a socket until it is closed."""
    die_with_parent()
    end, channel = socket.socket(fileno=descriptor), Channel(os.dup(descriptor))
    with open("/proc/self/statm", encoding="ascii") as file:
        bound = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    channel.send({"pid": os.getpid()})
    while (message := channel.receive()) is not None:
        with open(os.memfd_create("media"), "wb") as file:
            result = MEDIA
            try:
                reference, options = message["reference"], message["options"]
                image = message["kind"] == "image"
                medium = Image(reference) if image else Video(reference, VideoOptions(**options))
                [media] = renderer.process([Message("user", (medium,))])
                file.write(pack_media(media))
            except RowError as error:
                result = ERROR
                file.write(str(error).encode())
            file.flush()
            socket.send_fds(end, [result], [file.fileno()])
