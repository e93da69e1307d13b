"""A prepared folder: packed rows in `train.npy` and `heldout.npy`, described by `prepared.json`.

The sidecar is written last and holds the SHA-256 of both arrays. To start quickly, training
compares sizes and takes the hashes from the sidecar; `check.check_tokens` hashes both arrays.
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import numpy as np

from adloco_jax.data.sources import open_tokens
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError

SIDECAR = "prepared.json"
FORMAT = 1
_MAX_SIDECAR_BYTES = 2**28  # a million source files


@dataclasses.dataclass(frozen=True)
class Side:
    """One array, and the documents it was cut from.

    Attributes:
      rows: Rows in the array.
      documents: Documents, the last of which may end beyond the rows.
      tokens: Tokens of these documents, end-of-text tokens and the tail in no row included.
      text_bytes: UTF-8 bytes of these documents.
      file_bytes: Size of the array's file.
      sha256: Of the array's file, hex.
    """

    rows: int
    documents: int
    tokens: int
    text_bytes: int
    file_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """What `prepared.json` says.

    Attributes:
      format: Version of this layout.
      request: The fields of `prepare.Request`, with the tokenizer's fingerprint and the files.
      tokenizer: The name it was given.
      fingerprint: The tokenizer's, see `Tokenizer`.
      vocab_size: Largest id plus one.
      eot_id: The id that closes a document.
      row_length: Tokens in a row, L+1.
      heldout_frac: Share of the documents held out.
      train: The training rows.
      heldout: The held-out rows.
      shards: What was read, see `sources.Intake`.
      also_heldout: Documents left out of training because a held-out one is the same; 0 in folders
        of earlier versions, which kept them.
    """

    format: int
    request: dict
    tokenizer: str
    fingerprint: str
    vocab_size: int
    eot_id: int
    row_length: int
    heldout_frac: float
    train: Side
    heldout: Side
    shards: list[dict]
    also_heldout: int


def is_prepared(path: str | Path) -> bool:
    """Whether a folder has a sidecar."""
    try:
        return (Path(path).expanduser() / SIDECAR).is_file()
    except (OSError, RuntimeError):  # no path at all: opening it raises the clear error
        return False


def read_sidecar(folder: Path) -> Sidecar:
    """Read a folder's `prepared.json`.

    Raises:
      DataError: If it is missing, damaged or of another format.
    """
    path = folder / SIDECAR
    try:
        if path.stat().st_size > _MAX_SIDECAR_BYTES:
            raise DataError(f"{path}: larger than {_MAX_SIDECAR_BYTES} bytes, no sidecar")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: unreadable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged, no JSON ({error})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise DataError(f"{path}: format {version}, need {FORMAT}; prepare the data again")
    sidecar = _parse(Sidecar, {"also_heldout": 0} | content, str(path))
    if not all(isinstance(shard, dict) and "name" in shard for shard in sidecar.shards):
        raise DataError(f"{path}: damaged, not every one of shards has a name")
    return sidecar


def open_rows(folder: Path, sidecar: Sidecar) -> list[np.ndarray]:
    """Memory-map the rows to train on and those held out; size, type and shape are checked alone.

    Raises:
      DataError: If an array is missing, no regular file of the folder, or not as described.
    """
    arrays = []
    dtype = np.min_scalar_type(max(sidecar.vocab_size - 1, 0))
    for file, side in (("train.npy", sidecar.train), ("heldout.npy", sidecar.heldout)):
        file, shape = folder / file, (side.rows, sidecar.row_length)
        if not file.is_file():
            raise DataError(f"{file}: missing; prepare the data again")
        if file.resolve().parent != folder.resolve():
            raise DataError(f"{file}: a link out of the folder; put the array itself there")
        if file.stat().st_size != side.file_bytes:
            raise DataError(
                f"{file}: {file.stat().st_size} bytes, {SIDECAR} says {side.file_bytes}; damaged, "
                "prepare the data again"
            )
        rows = open_tokens(file, row_length=sidecar.row_length)
        if (rows.shape, rows.dtype) != (shape, dtype):
            raise DataError(
                f"{file}: {rows.dtype} of shape {rows.shape}, {SIDECAR} says {dtype} of {shape}; "
                "damaged, prepare the data again"
            )
        arrays.append(rows)
    return arrays


def check_fits(sidecar: Sidecar, tokenizer: Tokenizer, *, where: str, row_length: int) -> None:
    """Compare prepared rows with what the config asks for.

    Args:
      sidecar: Of the folder.
      tokenizer: The configured one.
      where: The key and value of the folder, for messages.
      row_length: `data.sequence_length` plus one.

    Raises:
      ConfigError: If the tokenizer or the rows' length is another.
    """
    if sidecar.row_length != row_length:
        raise ConfigError(
            f"{where}: rows of {sidecar.row_length} tokens, need {row_length} "
            f"(data.sequence_length={row_length - 1}); set data.sequence_length="
            f"{sidecar.row_length - 1} or prepare the data again"
        )
    have = (sidecar.fingerprint, sidecar.vocab_size, sidecar.eot_id)
    if have != (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eot_id):
        raise ConfigError(
            f"{where}: made with the tokenizer {sidecar.tokenizer} ({sidecar.vocab_size} ids, "
            f"fingerprint {sidecar.fingerprint[:12]}), data.tokenizer={tokenizer.name} has "
            f"{tokenizer.vocab_size} ids and {tokenizer.fingerprint[:12]}; set data.tokenizer to "
            "the one it was made with, or prepare the data again"
        )


def _parse(kind: Any, content: Any, where: str) -> Any:
    """A dataclass out of JSON, each field of its type; numbers are not negative."""
    values = {}
    for field in dataclasses.fields(kind):
        value: Any = content.get(field.name) if isinstance(content, dict) else None
        wanted = typing.get_origin(field.type) or field.type
        if dataclasses.is_dataclass(wanted):
            value = _parse(wanted, value, f"{where}: {field.name}")
        elif type(value) is not wanted or (wanted in (int, float) and not value >= 0):
            raise DataError(f"{where}: damaged, {field.name} is {value!r:.40}")
        values[field.name] = value
    return kind(**values)
