"""Documents through Hugging Face `datasets`: parquet files, and data sets of the hub, streamed."""

import contextlib
import glob
import gzip
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adloco_jax.data.snapshot import HUB_NAME
from adloco_jax.data.sources import Intake, find_files, local_path
from adloco_jax.errors import ConfigError, DataError

MAX_LISTED_FILES = 4096  # a checkpoint has room for so many records

_BATCH_ROWS = 256
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_END_BYTES = 2**16  # read of either end of a file


class Unreachable(DataError, OSError):
    """A source that cannot be read just now; as an `OSError`, a run tries the round once more."""


class Opened(NamedTuple):
    """A data set that can be read as a stream.

    Attributes:
      open: Starts a reading of its own: a `datasets.IterableDataset` of the text column alone.
      where: The keys and values that name it, for messages; not where its files lie.
      files: A JSON record of each file in reading order: `name`, and of one on this machine its
        `bytes` and `sha256`, which is of size and both ends only: a middle that changes shows in
        the check sum that ends a `.gz`, and in no other format if the size stays.
    """

    open: Callable[[], Any]
    where: str
    files: Sequence[dict]


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


def open_stream(path: str, name: str, split: str, *, text_column: str) -> Opened:
    """Finds a data set for a run; reads no more of it than its columns.

    Args:
      path: A folder in the hub's layout, or of data files; a file or glob; else a name on the hub.
      name: Configuration, `""` where there is but one.
      split: Which; files given by name or glob are the split.
      text_column: Column that holds the text.

    Raises:
      ConfigError: If there is no such data set, configuration or split, or no network.
      DataError: If files are missing or damaged, or there is no such column of strings.
    """
    datasets = _datasets()
    start = local_path(path, key="data.path")
    where = f"data.path={path}" + (f", data.name={name}" if name else "") + f", data.split={split}"
    is_folder = start.is_dir()
    is_local = is_folder or not HUB_NAME.fullmatch(path) or start.is_file()
    found, files = str(start.absolute()) if is_folder else path, None
    if is_local and not is_folder:
        if name:
            raise ConfigError(
                f"data.name={name}: files have no configurations; leave it empty, or set data.path "
                f"to their folder instead of {path}"
            )
        paths = find_files(path, key="data.path")
        found, files = _format(paths[0]), {split: [glob.escape(str(p.absolute())) for p in paths]}
    try:
        builder = datasets.load_dataset_builder(found, name or None, data_files=files)
    except Exception as error:  # of pyarrow, fsspec, the hub or datasets, a different one per fault
        if isinstance(error, OSError) and not is_local:
            raise ConfigError(
                f"{where}: no file or folder of that name here, and the Hugging Face hub gave no "
                "data set for it (wrong or private name, or no network); correct the name, log in, "
                "or download its files and give their folder"
            ) from error
        kind = ConfigError if isinstance(error, ValueError) else DataError
        raise kind(f"{where}: no such data set ({_line(error)})") from error
    names = builder.config.data_files or {}
    if split not in names:
        raise ConfigError(f"{where}: no such split, have {', '.join(map(str, names))}")

    def open_again():
        with _faults(where):
            dataset: Any = builder.as_streaming_dataset(split=split)
            return dataset if dataset.features is None else dataset.select_columns([text_column])

    with _faults(where):
        dataset: Any = builder.as_streaming_dataset(split=split)
    if dataset.features is not None:
        _check_column(dataset.features, where, text_column, key="data.text_column")
    return Opened(open_again, where, [_file_record(str(name)) for name in names[split]])


def examples(dataset: Iterable[dict], where: str) -> Iterator[dict]:
    """The examples of a stream; what goes wrong with it is an error of ours.

    Raises:
      Unreachable: If the connection, or a disk, gives no more.
      DataError: If the data are damaged.
    """
    rows = iter(dataset)
    while True:
        with _faults(where):
            row = next(rows, None)
        if row is None:
            return
        yield row


@contextlib.contextmanager
def _faults(where: str):
    """Errors of reading as ours."""
    try:
        yield
    except Exception as error:  # as in `_batches`
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise Unreachable(
                f"{where}: cannot be read ({_line(error)}); once it can, run the same command again"
            ) from error
        raise DataError(f"{where}: damaged ({_line(error)})") from error


def _format(file: Path) -> str:
    """What `datasets` calls the format of a file."""
    suffix = Path(re.sub(r"\.(gz|bz2|xz|zst)$", "", file.name)).suffix
    if suffix not in _FORMATS:
        raise DataError(
            f"{file}: data.source=hf reads {', '.join(_FORMATS)}, each also compressed; for others "
            "use data.source=text or tokens"
        )
    return _FORMATS[suffix]


def _file_record(name: str) -> dict:
    file = Path(name)
    if not file.is_file():  # on the hub: without the revision, which any change of a card moves
        return {"name": re.sub(r"@[0-9a-f]{40}/", "/", name)}
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as content:
        digest.update(content.read(_END_BYTES))
        content.seek(max(0, size - _END_BYTES))
        digest.update(content.read())
    return {"name": file.name, "bytes": size, "sha256": digest.hexdigest()}


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
    _check_column(features, str(file), text_column, key="text_column")
    return dataset.select_columns([text_column])


def _check_column(
    features: Mapping[str, object], where: str, text_column: str, *, key: str
) -> None:
    if text_column not in features:
        raise DataError(f"{where}: no column {text_column!r} ({key}), have {', '.join(features)}")
    kind = getattr(features[text_column], "dtype", "no plain column")
    if kind not in ("string", "large_string"):
        raise DataError(f"{where}: {text_column!r} must be a column of strings, have {kind}")


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
