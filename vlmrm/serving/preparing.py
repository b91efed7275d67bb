"""Processes beside the model that turn the images and videos of conversations into its input.

A file that crashes its decoder, or takes all of the memory that a process may have, so fails by itself; and what
decoding holds up is never the model. Results come back in shared memory that has no name, so none is left behind.
"""

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
from typing import Any, NoReturn

import torch

from vlmrm.conversation import Conversation, Image, Medium, Message, Video, VideoOptions, media_of
from vlmrm.data.media import image_size
from vlmrm.errors import MediaError, RowError
from vlmrm.rendering import ProcessedMedia, Renderer, pack_media, read_media
from vlmrm.serving.worker.channel import Channel, die_with_parent

MEMORY = 4 * 2**30  # bytes that a process may take for one image or video
LONGEST_S = 120  # for one of them
SENT = (str, bytes, bytearray, memoryview)
LARGE_PIXELS = 2**20  # of an image: a smaller one takes no more memory or time than the way to a process and back

Row = Conversation | RowError


class MediaProcesses:
    """Up to `count` processes for the media of conversations, started when they are needed.

    Make it before this process has threads and a GPU, neither of which a fork survives, and then `start` it. Processes
    are forked from one that is made here, so that they start at once and share the libraries' memory.
    """

    def __init__(self, count: int):
        self._forker, remote = socket.socketpair()
        if os.fork() == 0:
            _run(_fork_processes, remote)
        remote.close()
        self._asking = threading.Lock()
        self._threads = ThreadPoolExecutor(count)
        self._idle: queue.SimpleQueue[_MediaProcess] = queue.SimpleQueue()

    def start(self, renderer: Renderer) -> bool:
        """Have the processes work as `renderer` does, without its store.

        Returns:
            False where they cannot: its processor is of code of its own that was loaded after they were made.
        """
        self._renderer = renderer
        channel = Channel(os.dup(self._forker.fileno()))
        try:
            channel.send(pickle.dumps(replace(renderer, store=None)))
            return channel.receive() is not None
        except (pickle.PicklingError, AttributeError, TypeError, OSError):
            return False

    def process(self, rows: Iterable[Row]) -> tuple[list[Row], dict[str, ProcessedMedia]]:
        """Return the rows, an error in place of each with a broken image or video, and the media by key.

        Small images are left out, and media in memory that are no files: there is nothing to decode.
        """
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
        for key, result in zip(wanted, self._threads.map(self._one, wanted, wanted.values()), strict=True):
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
            _, files, _, _ = socket.recv_fds(self._end, 1, 1)
            answer = self._channel.receive() if files else None
        except OSError:  # it was silent, or has gone
            files, answer = [], None
        try:
            if answer is None:
                self._stop()
                return MediaError(
                    f"the process that decoded its {medium.kind} ended, or took over {LONGEST_S} s or "
                    f"{MEMORY // 2**30} GiB: encode the {medium.kind} again, or send a smaller one"
                )
            return MediaError(answer["error"]) if answer else read_media(f"/proc/self/fd/{files[0]}")
        finally:
            for file in files:
                os.close(file)

    def _stop(self) -> None:
        self.alive = False
        with suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)
        self._end.close()


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
        answer: dict[str, Any] = {}
        with open(os.memfd_create("media"), "wb") as file:
            try:
                [media] = renderer.process([Message("user", (_medium(**message),))])
                file.write(pack_media(media))
                file.flush()
            except RowError as error:
                answer = {"error": str(error)}
            socket.send_fds(end, [b"m"], [file.fileno()])
            channel.send(answer)


def _medium(kind: str, reference: Any, options: dict[str, Any]) -> Medium:
    return Image(reference) if kind == "image" else Video(reference, VideoOptions(**options))
