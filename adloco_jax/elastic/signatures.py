"""Signatures of a bucket's objects, with a key that driver and learners share: `ADLOCO_KEY`.

An object ends with an HMAC-SHA256 over the run, its name (with the driver's generation) and its
content. So what somebody without the key writes, or copies from another name or run, is refused.
"""

import hmac
import json
import os

from adloco_jax.elastic.formats import Refused
from adloco_jax.errors import ConfigError

_MARK = b"\nADLOCO_KEY:"  # between the content and the 64 digits of its HMAC
NUM_BYTES = len(_MARK) + 64
_SHORTEST = 32  # characters of a key


class Unsigned(Refused):
    """Error: an object has no signature with this process's key, or this process has no key."""


class Signatures:
    """Signs and checks the objects of a run, unless the environment has no `ADLOCO_KEY`."""

    def __init__(self):
        """Read the key; raise ConfigError if it is short."""
        self._key, self.run = os.environ.get("ADLOCO_KEY", "").encode(), ""
        if 0 < len(self._key) < _SHORTEST:
            raise ConfigError(
                f"ADLOCO_KEY: has {len(self._key)} characters, expected at least {_SHORTEST};"
                " adloco key prints one"
            )

    def signed(self, name: str, data: bytes) -> bytes:
        """Return an object's content with its signature, if there is a key."""
        return data + self._signature(name, data) if self._key else data

    def opened(self, name: str, data: bytes) -> bytes:
        """Return the content of an object; raise Unsigned if it is not signed as it must be."""
        content, signature = data[:-NUM_BYTES], data[-NUM_BYTES:]
        if not self._key and not signature.startswith(_MARK):
            return data
        if not self._key:
            raise Unsigned(f"{name}: signed; set ADLOCO_KEY to the key of the run")
        if not hmac.compare_digest(signature, self._signature(name, content)):
            raise Unsigned(f"{name}: not signed with this ADLOCO_KEY")
        return content

    def _signature(self, name: str, content: bytes) -> bytes:
        run = "" if name == "run.json" else self.run  # the file says itself which run it is of
        digest = hmac.new(self._key, json.dumps([run, name]).encode() + b"\n", "sha256")
        digest.update(content)
        return _MARK + digest.hexdigest().encode()

    def __str__(self) -> str:
        """Say whether objects are signed."""
        if self._key:
            return "objects are signed: learners need this ADLOCO_KEY"
        return (
            "objects are not signed: whoever can write to the bucket can steer learners"
            " (adloco key)"
        )
