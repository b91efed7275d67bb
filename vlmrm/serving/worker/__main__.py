"""A worker: loads one reward and scores what the service sends, until the service closes the channel.

    PYTHON vlmrm/serving/worker DESCRIPTOR

It runs in any Python environment, without vlmrm. The reward's class is made with the options of the configuration and
called with a list of items; it returns for each a dictionary with `score`, or `error`, and anything else in a
dictionary `extra`. In place of that call it may have two methods: `prepare(items)`, in threads beside the one that
computes, and `compute(prepared)`.
"""

import contextlib
import importlib
import math
import os
import queue
import sys
import threading
import time
import traceback

# The service runs this folder, not a module of vlmrm, which this environment need not have.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from channel import Channel, die_with_parent, find_secrets, give_memory_back, redact, redact_secrets, unpack

HEARTBEAT_S = 1.0
LONG_S = 1.0  # of a batch, after which memory is given back: that takes some hundredths of a second


def main(descriptor):
    die_with_parent()
    channel = Channel(descriptor)
    start = channel.receive()
    if start is None:
        return
    sys.path[:0] = start.get("path", [])
    secrets = find_secrets(start["options"])
    try:
        module, _, name = start["engine"].rpartition(".")
        engine = getattr(importlib.import_module(module), name)(**start["options"])
    except Exception as error:
        # By name, as vlmrm's own class may not be importable here. A wrong configuration stays wrong: no restart.
        permanent = any(kind.__name__ in ("ConfigError", "CheckpointError") for kind in type(error).__mro__)
        broken = {"kind": "broken", "error": describe(error, secrets), "permanent": permanent}
        channel.send({"reply": start["ask"], "result": broken})
        return
    info = redact(getattr(engine, "info", {}), secrets)
    sleeps, prepares = hasattr(engine, "sleep") and hasattr(engine, "wake"), hasattr(engine, "prepare")
    ready = {"kind": "ready", "info": info, "sleeps": sleeps, "prepares": prepares}
    channel.send({"reply": start["ask"], "result": ready})
    threading.Thread(target=send_heartbeats, args=[channel], daemon=True).start()
    # The main thread computes, as some libraries ask for it.
    batches = queue.SimpleQueue()
    threading.Thread(target=receive, args=[engine, channel, batches], daemon=True).start()
    while (batch := batches.get()) is not None:
        message, prepared = batch
        started = time.monotonic()
        channel.send({"kind": "begun", "id": message["id"]})
        done = run(engine, message, prepared, secrets)
        try:
            channel.send({"reply": message["ask"], "result": done})
        except (TypeError, ValueError) as error:  # `extra` holds something that no message can carry
            described = describe(error, secrets, message.get("requests", ()))
            channel.send({"reply": message["ask"], "result": {"kind": "failed", "error": described}})
        del batch, message, prepared, done  # before the next comes
        if time.monotonic() - started > LONG_S:
            give_memory_back()


def receive(engine, channel, batches):
    """Receive batches, and prepare each beside the others, while the main thread computes those prepared before."""
    try:
        with contextlib.suppress(OSError):  # the service has gone
            while (message := channel.receive()) is not None:
                if "ask" not in message:  # nobody waits for an answer any more: the service has given up this process
                    continue
                threading.Thread(target=prepare, args=[engine, channel, batches, message], daemon=True).start()
    finally:
        batches.put(None)


def prepare(engine, channel, batches, message):
    """Prepare a batch and pass it on; None, which ends the process, of a reward that exits."""
    batch = None
    try:
        try:
            prepared = read_items(message.pop("jobs", ()))
            message["count"] = len(prepared)
            if hasattr(engine, "prepare") and prepared:
                prepared = engine.prepare(prepared)
        except Exception as error:
            prepared = error
        batch = message, prepared
    finally:
        if hasattr(engine, "prepare"):  # else the service had better wait for more to compute
            with contextlib.suppress(OSError):
                channel.send({"kind": "prepared", "id": message["id"]})
        batches.put(batch)


def read_items(jobs):
    """Return the items of packed jobs, with the number of the job in `group`: requests may use the same names."""
    return [
        item if item.get("group") is None else {**item, "group": f"{number}: {item['group']!r}"}
        for number, job in enumerate(jobs)
        for item in unpack(job)["items"]
    ]


def send_heartbeats(channel):
    """Send a sign of life every second: a stopped or swapped-out process cannot."""
    while True:
        threading.Event().wait(HEARTBEAT_S)
        try:
            channel.send({"kind": "beat"})
        except OSError:
            return


def run(engine, message, prepared, secrets):
    """Score the items of a message, or call the method that it names, such as `sleep`; an error is one of all."""
    started = time.monotonic()
    try:
        if "control" in message:
            getattr(engine, message["control"])()
            return {"kind": "done"}
        if isinstance(prepared, Exception):
            raise prepared
        outcomes = list(engine.compute(prepared) if hasattr(engine, "prepare") else engine(prepared))
        if len(outcomes) != message["count"]:
            raise ValueError(f"the reward returned {len(outcomes)} outcomes for {message['count']} items")
        outcomes = [validate(outcome, secrets) for outcome in outcomes]
    except Exception as error:
        return {"kind": "failed", "error": describe(error, secrets, message.get("requests", ()))}
    seconds = time.monotonic() - started
    counts = {str(name): float(count) for name, count in getattr(engine, "computed", {}).items()}
    return {"kind": "scored", "outcomes": outcomes, "computed": counts, "seconds": seconds}


def validate(outcome, secrets):
    """Return an outcome of finite numbers; another score becomes an error, another number of `extra` None."""
    unknown = outcome.keys() - {"score", "error", "extra"}
    if unknown:
        raise ValueError(f"the reward returned the key {min(unknown)}: put all but score and error under extra")
    extra = {"extra": _finite(outcome["extra"])} if outcome.get("extra") else {}
    if outcome.get("error") is not None:
        return {"error": redact(str(outcome["error"]), secrets), **extra}
    number = float(outcome["score"])
    return {"score": number, **extra} if math.isfinite(number) else {"error": f"its score is {number}", **extra}


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(error, secrets, requests=()):
    """Return an exception as a line for clients, and log it with its traceback and requests; both without secrets."""
    explained = any(kind.__name__ == "VlmrmError" for kind in type(error).__mro__)  # its message needs no traceback
    trace = f"{type(error).__name__}: {error}\n" if explained else traceback.format_exc()
    sys.stderr.write((f"request_id={','.join(requests)} " if requests else "") + redact_secrets(trace, secrets))
    return redact(f"{type(error).__name__}: {error}", secrets)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service has gone
        main(int(sys.argv[1]))
