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

_MARK = b"\nADLOCO_KEY:"  # between the content and the digits of its HMAC
_HMAC_DIGITS = 64  # hexadecimal ones, of an HMAC-SHA256
NUM_BYTES = len(_MARK) + _HMAC_DIGITS  # of a signature
_SHORTEST = 32  # characters of a key
_KEY_BYTES = 32  # random bytes of a new key, which is written in hexadecimal digits
_OWNER_ONLY = 0o600  # a file's mode: its owner may read and write it, nobody else


def given_key() -> str:
    """Return the secret key in the environment, `ADLOCO_KEY`; empty if there is none.

    Raises ConfigError if it has fewer than 32 characters.
    """
    key = os.environ.get("ADLOCO_KEY", "")
    if 0 < len(key) < _SHORTEST:
        raise ConfigError(
            f"ADLOCO_KEY: has {len(key)} characters, expected at least {_SHORTEST};"
            " unset it for the driver, which makes a key, and copy its command for learners"
        )
    return key


def find_key(path: Path) -> str:
    """Return the environment's `ADLOCO_KEY`, else the key in the file at `path`, else a new one.

    Nothing is written. Raises ConfigError if the environment's is too short.
    """
    key = given_key()
    if key:
        return key
    if path.exists():
        return path.read_text("utf-8")
    return secrets.token_hex(_KEY_BYTES)


def keep_key(path: Path, key: str) -> None:
    """Write a key to the file at `path`, which only the user may read.

    Nothing is written if the environment has a key, or the file is there. Raises ConfigError if
    the environment's is too short.
    """
    if given_key() or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)

    def open_for_owner(name: str, flags: int) -> int:
        """Open a file that only its owner may read, from the moment it exists."""
        return os.open(name, flags, _OWNER_ONLY)

    with open(path, "x", encoding="utf-8", opener=open_for_owner) as file:
        file.write(key)


class Signatures:
    """Signs and checks the objects of a run with its key.

    A signed object is its content, a mark, and 64 hexadecimal digits: `NUM_BYTES` more.
    """

    def __init__(self, key: str):
        """Store the key; the caller sets `run` and `start` when they are known."""
        self._key = key.encode()
        self.run = ""  # id of the run
        self.start = ""  # id of the driver's start, which is new each time it is started

    def signed(self, name: str, data: bytes) -> bytes:
        """Return an object's content with its signature; `name` is the object's."""
        return data + self._signature(name, data)

    def verified_content(self, name: str, data: bytes) -> bytes:
        """Return the content of an object; raise Refused if it is not signed as it must be."""
        content = data[:-NUM_BYTES]
        signature = data[-NUM_BYTES:]
        if not hmac.compare_digest(signature, self._signature(name, content)):
            raise Refused(f"{name}: damaged, or not signed with this run's ADLOCO_KEY")
        return content

    def _signature(self, name: str, content: bytes) -> bytes:
        """Return the mark and the digits that follow an object's content.

        They depend on the run and the driver's start, except where a reader does not know these
        yet: it learns the run from `run.json`, and the start from a driver's heartbeat. Served
        files are the same for every start.
        """
        run = self.run
        start = self.start
        if name == "run.json":
            run = ""
            start = ""
        elif name.startswith(("driver/", "files/")):
            start = ""
        digest = hmac.new(self._key, json.dumps([run, start, name]).encode() + b"\n", "sha256")
        digest.update(content)
        return _MARK + digest.hexdigest().encode()


class Unneeded(Signatures):
    """Signs nothing, where the driver knows by its connection who writes (`served`)."""

    def __init__(self):
        """Begin without a key."""
        super().__init__(key="")

    def signed(self, name: str, data: bytes) -> bytes:
        """Return an object's content as it is."""
        return data

    def verified_content(self, name: str, data: bytes) -> bytes:
        """Return an object's content as it is."""
        return data
