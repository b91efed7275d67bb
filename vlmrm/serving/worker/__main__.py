"""A worker: loads one reward and scores what the service sends, until the service closes the channel.

    PYTHON vlmrm/serving/worker DESCRIPTOR

It runs in any Python environment, without vlmrm: the reward's class is imported by its dotted path. It is made with
the options of the configuration and called with a list of items; it returns a dictionary for each, with `score`, or
with `error` where this item cannot be scored, and anything else about the item in a dictionary `extra`.
"""

import contextlib
import ctypes
import importlib
import math
import os
import signal
import sys
import threading
import traceback

# The service runs this folder, not a module of vlmrm, which this environment need not have.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from channel import Channel, find_secrets, redact, redact_secrets

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
        permanent = any(kind.__name__ == "ConfigError" for kind in type(error).__mro__)
        channel.send({"kind": "broken", "error": describe(error, secrets), "permanent": permanent})
        return
    channel.send({"kind": "ready", "info": redact(getattr(engine, "info", {}), secrets), "pid": os.getpid()})
    threading.Thread(target=send_heartbeats, args=[channel], daemon=True).start()
    while (message := channel.receive()) is not None:
        response = (control if "control" in message else score)(engine, message, secrets)
        try:
            channel.send(response)
        except (TypeError, ValueError) as error:  # `extra` holds something that no message can carry
            described = describe(error, secrets, message.get("requests", ()))
            channel.send({"kind": "failed", "id": message["id"], "error": described})


def die_with_parent():
    """Have Linux kill this process when its parent ends in whatever way, so that no orphan keeps the GPU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def send_heartbeats(channel):
    """Send a sign of life every second, which a stopped or swapped-out process cannot."""
    while True:
        threading.Event().wait(HEARTBEAT_S)
        try:
            channel.send({"kind": "beat"})
        except OSError:
            return


def control(engine, message, secrets):
    """Run the method of the engine that a message names, such as `sleep`."""
    try:
        getattr(engine, message["control"])()
    except Exception as error:
        return {"kind": "failed", "id": message["id"], "error": describe(error, secrets)}
    return {"kind": "done", "id": message["id"]}


def score(engine, message, secrets):
    """Return the outcome of each item, or one error for all where the engine raises."""
    items = message["items"]
    try:
        outcomes = list(engine(items))
        if len(outcomes) != len(items):
            raise ValueError(f"the reward returned {len(outcomes)} outcomes for {len(items)} items")
        outcomes = [validate(outcome, secrets) for outcome in outcomes]
    except Exception as error:
        return {"kind": "failed", "id": message["id"], "error": describe(error, secrets, message.get("requests", ()))}
    counts = {str(name): float(count) for name, count in getattr(engine, "computed", {}).items()}
    return {"kind": "scored", "id": message["id"], "outcomes": outcomes, "computed": counts}


def validate(outcome, secrets):
    """Return an outcome of finite numbers; a score that is not finite becomes an error, such a number of `extra` None.

    Raises:
        ValueError: for a key that is neither `score`, `error` nor `extra`.
    """
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
