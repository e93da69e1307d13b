"""Signatures of a bucket's objects, with a key that the driver makes and its learners are given.

An object ends with an HMAC-SHA256 over the run, the driver's start, its name and its content. So
what somebody without the key writes, or copies from another place, run or start, is refused.
"""

import hmac
import json
import os
import secrets
from pathlib import Path

from adloco_jax.elastic.messages import Refused
from adloco_jax.errors import ConfigError

_MARK = b"\nADLOCO_KEY:"  # between the content and the 64 digits of its HMAC
NUM_BYTES = len(_MARK) + 64
_SHORTEST = 32  # characters of a key


def given_key() -> str:
    """Return the environment's `ADLOCO_KEY`, empty if there is none; ConfigError if it is short."""
    key = os.environ.get("ADLOCO_KEY", "")
    if 0 < len(key) < _SHORTEST:
        raise ConfigError(
            f"ADLOCO_KEY: has {len(key)} characters, expected at least {_SHORTEST};"
            " unset it for the driver, which makes a key, and copy its command for learners"
        )
    return key


def find_key(path: Path) -> str:
    """Return the environment's key, else that in a file of the run's folder, else a new one."""
    key = given_key()
    if key:
        return key
    return path.read_text("utf-8") if path.exists() else secrets.token_hex(32)


def keep_key(path: Path, key: str) -> None:
    """Write a key to the run's folder, for the user alone, unless the environment has it."""
    if given_key() or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)

    def open_for_owner(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    with open(path, "x", encoding="utf-8", opener=open_for_owner) as file:
        file.write(key)


class Signatures:
    """Signs and checks the objects of a run with its key.

    A signed object is its content, a mark, and 64 hexadecimal digits: `NUM_BYTES` more.
    """

    def __init__(self, key: str):
        """Store the key; `run` and `start` are set when they are known."""
        self._key = key.encode()
        self.run = ""  # id of the run
        self.start = ""  # id of the driver's start

    def signed(self, name: str, data: bytes) -> bytes:
        """Return an object's content with its signature."""
        return data + self._signature(name, data)

    def opened(self, name: str, data: bytes) -> bytes:
        """Return the content of an object; raise Refused if it is not signed as it must be."""
        content, signature = data[:-NUM_BYTES], data[-NUM_BYTES:]
        if not hmac.compare_digest(signature, self._signature(name, content)):
            raise Refused(f"{name}: damaged, or not signed with this run's ADLOCO_KEY")
        return content

    def _signature(self, name: str, content: bytes) -> bytes:
        """Return the mark and the digits that follow an object's content.

        They depend on the run and the driver's start, except where a reader does not know these
        before: `run.json` says itself which run it is of, a driver's heartbeat which start. Files
        are the same for every start.
        """
        is_description = name == "run.json"
        run = "" if is_description else self.run
        is_of_any_start = is_description or name.startswith(("driver/", "files/"))
        start = "" if is_of_any_start else self.start
        digest = hmac.new(self._key, json.dumps([run, start, name]).encode() + b"\n", "sha256")
        digest.update(content)
        return _MARK + digest.hexdigest().encode()


class Unneeded(Signatures):
    """Signs nothing, where whoever writes an object is known (`served`)."""

    def __init__(self):
        """Begin without a key."""
        super().__init__("")

    def signed(self, name: str, data: bytes) -> bytes:
        """Return an object's content as it is."""
        return data

    def opened(self, name: str, data: bytes) -> bytes:
        """Return an object's content as it is."""
        return data
