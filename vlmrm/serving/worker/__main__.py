"""A worker: loads one reward and scores what the service sends, until the service closes the channel.

    PYTHON vlmrm/serving/worker DESCRIPTOR

It runs in any Python environment, without vlmrm. The reward's class is made with the options of the configuration and
called with a list of items; it returns for each a dictionary with `score`, or `error`, and anything else in a
dictionary `extra`. In place of that call it may have two methods: `prepare(items)`, in a thread beside the one that
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
from channel import Channel, die_with_parent, find_secrets, redact, redact_secrets, unpack

HEARTBEAT_S = 1.0


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
        channel.send({"kind": "broken", "id": start["id"], "error": describe(error, secrets), "permanent": permanent})
        return
    info = redact(getattr(engine, "info", {}), secrets)
    sleeps = hasattr(engine, "sleep") and hasattr(engine, "wake")
    channel.send({"kind": "ready", "id": start["id"], "info": info, "sleeps": sleeps})
    threading.Thread(target=send_heartbeats, args=[channel], daemon=True).start()
    # The main thread computes, as some libraries ask for it; one batch waits here at most, prepared.
    batches = queue.Queue(1)
    threading.Thread(target=prepare_batches, args=[engine, channel, batches], daemon=True).start()
    while (batch := batches.get()) is not None:
        message, prepared, preparing = batch
        if hasattr(engine, "prepare") and message.get("items"):  # else the service had better wait for more to compute
            channel.send({"kind": "begun", "id": message["id"]})
        done = run(engine, message, prepared, secrets)
        response = {**done, "id": message["id"], "preparing": preparing}
        try:
            channel.send(response)
        except (TypeError, ValueError) as error:  # `extra` holds something that no message can carry
            described = describe(error, secrets, message.get("requests", ()))
            channel.send({"kind": "failed", "id": message["id"], "error": described})


def prepare_batches(engine, channel, batches):
    """Receive batches and prepare them, while the main thread computes those before."""
    prepare = getattr(engine, "prepare", None)
    try:
        while (message := channel.receive()) is not None:
            started = time.monotonic()
            try:
                prepared = message["items"] = read_items(message.pop("jobs", ()))
                if prepare is not None and prepared:
                    prepared = prepare(prepared)
            except Exception as error:
                prepared = error
            batches.put((message, prepared, time.monotonic() - started))
    except OSError:  # the service has gone
        pass
    finally:  # also of a reward that exits: the process then ends, and does not wait for ever
        batches.put(None)


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
        if len(outcomes) != len(message["items"]):
            raise ValueError(f"the reward returned {len(outcomes)} outcomes for {len(message['items'])} items")
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
