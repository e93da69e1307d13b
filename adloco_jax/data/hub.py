"""Documents through Hugging Face `datasets`: parquet files, and data sets of the hub, streamed."""

import glob
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from adloco_jax.data.sources import Intake
from adloco_jax.errors import ConfigError, DataError

_BATCH_ROWS = 256


def parquet_documents(files: Sequence[Path], intake: Intake, *, text_column: str) -> Iterator[str]:
    """One document per row; empty texts are none.

    The column is read to its end before any of its rows is used.

    Raises:
      DataError: While reading, naming the file and, from 1, the row, if a file is damaged or has no
        such column of strings, or a row has no text; unless it may be left out.
    """
    for file in files:
        if record := intake.open(file, lambda file: _check_parquet(file, text_column)):
            batches = _batches(_open_parquet(file, text_column), str(file))
            yield from _texts(batches, str(file), text_column, record, intake)


def hub_parts(path: str, name: str, split: str) -> list[tuple[str, Iterable[dict]]]:
    """The files of a data set on the hub, each a name and the data set cut down to it.

    Raises:
      ConfigError: If there is no such data set, configuration or split, or no network.
    """
    datasets = _datasets()
    try:
        dataset = datasets.load_dataset(path, name or None, split=split, streaming=True)
    except OSError as error:
        raise ConfigError(
            f"path={path}: no file or folder of that name here, and the Hugging Face hub gave no "
            "data set for it (wrong or private name, or no network); correct the name, log in, or "
            "download its files and give their path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"path={path}, name={name}, split={split}: {_line(error)}") from error
    count = dataset.num_shards
    stem = "/".join(part for part in (path, name, split) if part)
    return [
        (f"{stem}/{i:05d}-of-{count:05d}", dataset.shard(num_shards=count, index=i))
        for i in range(count)
    ]


def hub_documents(
    name: str, part: Iterable[dict], intake: Intake, *, text_column: str
) -> Iterator[str]:
    """One document per row of a part; empty texts are none.

    Its record has bytes and SHA-256 of the texts taken, each closed by a NUL: there is no file.

    Raises:
      DataError: While reading, if the connection ends, or a row without text may not be left out.
    """
    record = {"name": name, "bytes": 0, "sha256": "", "rows": 0, "bad_rows": 0}
    intake.shards.append(record)
    texts = _texts(_batches(part, name), name, text_column, record, intake)
    yield from hashed(texts, record)


def hashed(texts: Iterable[str], record: dict) -> Iterator[str]:
    """The texts; in the end their bytes and SHA-256 stand in the record."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode()
        digest.update(content + b"\0")
        record["bytes"] += len(content)
        yield text
    record["sha256"] = digest.hexdigest()


def _check_parquet(file: Path, text_column: str) -> None:
    dataset = _open_parquet(file, text_column)
    for _ in _batches(dataset, str(file)):
        pass


def _open_parquet(file: Path, text_column: str):
    datasets = _datasets()
    try:
        dataset = datasets.load_dataset(
            "parquet", data_files=glob.escape(str(file)), split="train", streaming=True
        )
        features = dataset.features or {}
    except Exception as error:  # of pyarrow, fsspec or datasets, a different one per fault
        raise DataError(f"{file}: damaged or no parquet ({_line(error)})") from error
    if text_column not in features:
        raise DataError(
            f"{file}: no column {text_column!r} (text_column), have {', '.join(features)}"
        )
    kind = getattr(features[text_column], "dtype", "no plain column")
    if kind not in ("string", "large_string"):
        raise DataError(f"{file}: {text_column!r} must be a column of strings, have {kind}")
    return dataset.select_columns([text_column])


def _batches(dataset, where: str) -> Iterator[dict]:
    batches = dataset.iter(batch_size=_BATCH_ROWS)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # as above, and of the network
            raise DataError(f"{where}: damaged or unreachable ({_line(error)})") from error
        if batch is None:
            return
        yield batch


def _texts(
    batches: Iterable[dict], where: str, text_column: str, record: dict, intake: Intake
) -> Iterator[str]:
    number = 0
    for batch in batches:
        if text_column not in batch:
            raise DataError(
                f"{where}: no column {text_column!r} (text_column), have {', '.join(batch)}"
            )
        for text in batch[text_column]:
            number += 1
            if not isinstance(text, str):
                kind = type(text).__name__
                error = DataError(
                    f"{where}:{number}: {text_column!r} must be a string, have {kind}"
                )
                intake.leave_out(record, error)
            elif text:
                record["rows"] += 1
                yield text


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _datasets():
    """The library without bars and warnings: what goes wrong is said in one line of ours."""
    import datasets  # heavy, and not every run needs it

    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return datasets
