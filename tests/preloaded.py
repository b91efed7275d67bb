"""A `python` that starts in a tenth of a second with torch and vlmrm imported: a fork of a process that has them.

It takes `-c`, `-m` or a program, as Python does, and passes signals on. It is not for tests of what is imported, or of
a process that is stopped.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, struct, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    files = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number != link.fileno() and os.fstat(number):
                files.append(number)
        except OSError:
            pass
    what = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "files": files}}
    message = json.dumps(what).encode()
    socket.send_fds(link, [struct.pack("<I", len(message))], files)
    link.sendall(message)
    for number in files[1:]:
        if number > 2:
            os.close(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: link.send(bytes([number])))
    code = struct.unpack("<i", link.recv(4) or struct.pack("<i", -9))[0]
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
MODULES = ("pandas", "peft", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "vlmrm.training.main",
           "transformers.models.qwen2_5_vl.processing_qwen2_5_vl", "vlmrm.serving.engines")  # fmt: skip


_started: dict[int, tuple[str, int]] = {}  # by the process that started it: its executable and its number


def python() -> str:
    """Return the executable."""
    return start()[0]


def cpu_seconds() -> float:
    """Return what the forks of this process have taken."""
    if not (started := _started.get(os.getpid())):
        return 0.0
    ticks = Path(f"/proc/{started[1]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def start() -> tuple[str, int]:
    """Fork the process that waits, once; before a test has computed, as threads are not forked."""
    if started := _started.get(os.getpid()):
        return started
    folder = tempfile.mkdtemp(prefix="preloaded")
    address, executable = f"{folder}/socket", Path(folder, "python")
    executable.write_text(CLIENT.format(python=sys.executable, address=address))
    executable.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    pid = os.fork()
    if not pid:
        try:
            serve(listening, str(executable), os.getppid())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
    listening.close()
    return _started.setdefault(os.getpid(), (str(executable), pid))


def serve(listening: socket.socket, executable: str, parent: int) -> None:
    """Fork a process for each that asks, until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loaded = False
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in selector.select(timeout=1.0):
                if key.fileobj is listening:
                    if not loaded:
                        preload()
                        loaded = True
                    accept(listening, selector, executable)
                else:
                    answer(key, selector)


def preload() -> None:
    """Import what a training and a worker import, so that a fork need not."""
    for module in MODULES:
        __import__(module)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a fork's collection would copy every page


def accept(listening: socket.socket, selector: selectors.BaseSelector, executable: str) -> None:
    link, _ = listening.accept()
    head, files, _, _ = socket.recv_fds(link, 4, 250)
    size, message = struct.unpack("<I", head)[0], b""
    while len(message) < size:
        message += link.recv(size - len(message))
    asked = json.loads(message)
    pid = os.fork()
    if not pid:
        for key in list(selector.get_map().values()):
            with contextlib.suppress(OSError):
                os.close(key.fd)
        link.close()
        become(asked, files, executable)
    for file in files:
        os.close(file)
    process = os.pidfd_open(pid)
    selector.register(process, selectors.EVENT_READ, (pid, link))
    selector.register(link, selectors.EVENT_READ, (pid, None))


def answer(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """Pass a signal on, end a process whose client was killed, or tell how it ended."""
    pid, link = key.data
    if link is None:
        with contextlib.suppress(ProcessLookupError):
            signals = key.fileobj.recv(16)  # ty: ignore[unresolved-attribute]
            for number in signals or bytes([signal.SIGKILL]):
                os.kill(pid, number)
        if not signals:
            selector.unregister(key.fileobj)
        return
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        link.send(struct.pack("<i", os.waitstatus_to_exitcode(status)))
    selector.unregister(key.fd)
    os.close(key.fd)
    with contextlib.suppress(KeyError):
        selector.unregister(link)
    link.close()


def become(asked: dict[str, Any], files: list[int], executable: str) -> None:
    """Be the process that was asked for, and end with its code."""
    code: Any = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = [os.dup2(file, 900 + at) for at, file in enumerate(files)]
        for file in files:
            os.close(file)
        for file, number in zip(kept, asked["files"], strict=True):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        if os.environ.get("PYTHONUNBUFFERED"):
            sys.stdout.reconfigure(line_buffering=True)  # ty: ignore[unresolved-attribute]
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.executable = executable
        run(asked["argv"])
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        if isinstance(stopped.code, str):
            sys.stderr.write(f"{stopped.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def run(words: list[str]) -> None:
    while words[0] in ("-u", "-I", "-s", "-E", "-B"):
        words = words[1:]
    kind, *rest = words
    if kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv, sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        if not Path(kind).is_dir():
            sys.path.insert(0, str(Path(kind).resolve().parent))
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        runpy.run_path(kind, run_name="__main__")
