"""Documents through Hugging Face `datasets`: parquet files, and data sets of the hub, streamed."""

import collections
import contextlib
import functools
import glob
import gzip
import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adloco_jax.data.snapshot import HUB_NAME
from adloco_jax.data.sources import Intake, find_files, local_path
from adloco_jax.errors import ConfigError, DataError, UserError

MAX_LISTED_FILES = 4096  # a checkpoint has room for so many records

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_END_BYTES = 2**16  # read of either end of a file


class Unreachable(DataError, OSError):
    """A source that cannot be read at present; as an `OSError`, a run repeats the round once."""


class Opened(NamedTuple):
    """A data set that can be read as a stream.

    Attributes:
      open: Starts an independent read: a `datasets.IterableDataset` of the text column alone.
      where: The keys and values that name it, for messages; not where its files lie.
      files: A JSON record of each file in reading order: `name`, and of a local one `bytes` and a
        `sha256` of size and both ends only. A change in the middle shows in the checksum at the
        end of a `.gz`; in another format of the same size it goes unnoticed.
    """

    open: Callable[[], Any]
    where: str
    files: Sequence[dict]


def parquet_documents(files: Sequence[Path], intake: Intake, *, text_column: str) -> Iterator[str]:
    """One document per row, except empty texts.

    The column is read to its end before any of its rows is used.

    Args:
      files: Parquet files.
      intake: Records what is read.
      text_column: Column that holds the text.

    Raises:
      DataError: While reading, naming the file and, from 1, the row, if a file is damaged or has no
        such column of strings, or a row has no text.
    """

    def rows_of(file: Path) -> Iterator[str]:
        builder = _datasets().load_dataset_builder("parquet", data_files=glob.escape(str(file)))
        return texts(_open(builder, "train", str(file), text_column), str(file), text_column)

    return intake.read(files, rows_of, check=lambda file: collections.deque(rows_of(file), 0))


def hub_parts(
    path: str, name: str, split: str, *, text_column: str
) -> list[tuple[str, Iterator[str]]]:
    """The files of a data set, each with its name and its texts.

    Args and Raises: see `open_stream`.
    """
    dataset = open_stream(path, name, split, text_column=text_column).open()
    count = dataset.num_shards
    stem = "/".join(part for part in (path, name, split) if part)
    parts = [
        (f"{stem}/{index:05d}-of-{count:05d}", dataset.shard(num_shards=count, index=index))
        for index in range(count)
    ]
    return [(part, texts(rows, part, text_column)) for part, rows in parts]


def open_stream(
    path: str, name: str, split: str, *, text_column: str, revision: str = "main"
) -> Opened:
    """Find a data set for a run, and check its columns without reading its rows.

    Args:
      path: A folder in the hub's layout, or of data files; a file or glob; else a name on the hub.
      name: Configuration, `""` if there is only one.
      split: Which part; files given by name or glob are all of this part.
      text_column: Column that holds the text.
      revision: Branch, tag or commit on the hub.

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
        at = None if is_local else revision
        builder = datasets.load_dataset_builder(found, name or None, data_files=files, revision=at)
    except Exception as error:  # deliberately broad, because each library raises its own
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

    open_again = functools.partial(_open, builder, split, where, text_column)
    open_again()
    return Opened(open_again, where, [_file_record(str(name)) for name in names[split]])


def _open(builder: Any, split: str, where: str, text_column: str) -> Any:
    """The text column of a split, as a stream."""
    with _faults(where):
        dataset = builder.as_streaming_dataset(split=split)
        if dataset.features is None:
            return dataset
        _require_column(dataset.features, where, text_column)
        kind = getattr(dataset.features[text_column], "dtype", "no plain column")
        if kind not in ("string", "large_string"):
            raise DataError(f"{where}: {text_column!r} must be a column of strings, have {kind}")
        return dataset.select_columns([text_column])


def texts(
    dataset: Iterable[dict], where: str, text_column: str, *, first: int = 1
) -> Iterator[str]:
    """The text of each example of a stream.

    Args:
      dataset: An iterable of examples.
      where: What names it, for messages.
      text_column: Column that holds the text.
      first: Number of the first example.

    Raises:
      Unreachable: If the connection is lost, or a disk cannot be read.
      DataError: If the data are damaged, a text is none, or there is no such column.
    """
    rows = iter(dataset)
    for number in itertools.count(first):
        with _faults(where):
            row = next(rows, None)
        if row is None:
            return
        _require_column(row, where, text_column)
        text = row[text_column]
        if not isinstance(text, str):
            raise DataError(
                f"{where}:{number}: {text_column!r} must be a string, have {type(text).__name__}"
            )
        yield text


@contextlib.contextmanager
def _faults(where: str) -> Iterator[None]:
    """Errors of reading as ours."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # deliberately broad, because each library raises its own
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
    if not file.is_file():  # on the hub: without the revision, which an edited card changes too
        return {"name": re.sub(r"@[0-9a-f]{40}/", "/", name)}
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as content:
        digest.update(content.read(_END_BYTES))
        content.seek(max(0, size - _END_BYTES))
        digest.update(content.read())
    return {"name": file.name, "bytes": size, "sha256": digest.hexdigest()}


def _require_column(columns: Mapping[str, object], where: str, text_column: str) -> None:
    if text_column not in columns:
        raise DataError(
            f"{where}: no column {text_column!r} (data.text_column), have {', '.join(columns)}"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _datasets():
    """The library without bars and warnings: a fault is one line of ours."""
    import datasets  # heavy, and not every run needs it

    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return datasets
