"""What others wrote, such as the text of an exception, without what is nobody's business.

Needs nothing but the standard library, as a worker may run in any environment.
"""

import re

# An absolute path of two parts or more, not the tail of a URL: its last part is what a reader needs.
PATH = re.compile(r"(?<![\w.:/~\-])~?(?:/[\w.@+\-]+)+/([\w.@+\-]+)")
SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)


def without_paths(text):
    """`text` with the last part alone of each absolute path."""
    return PATH.sub(r"\1", text)


def without_secrets(text, secrets):
    """`text` with stars for each of `secrets`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def discreet(value, secrets):
    """A tree of JSON whose texts hold neither absolute paths nor `secrets`; bytes stay as they are."""
    if isinstance(value, str):
        return without_paths(without_secrets(value, secrets))
    if isinstance(value, dict):
        return {name: discreet(one, secrets) for name, one in value.items()}
    return [discreet(one, secrets) for one in value] if isinstance(value, list) else value


def secrets_in(options):
    """The texts of options whose names say that they are secret, at any depth."""
    if isinstance(options, dict):
        found = {one for name, one in options.items() if isinstance(one, str) and one and SECRET.search(str(name))}
        return found.union(*map(secrets_in, options.values()))
    return set().union(*map(secrets_in, options)) if isinstance(options, (list, tuple)) else set()
