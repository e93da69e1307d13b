"""Make rows from text: tokenise documents, hold some of them out, pack them into rows, save these.

Documents, each closed by an end-of-text token, are joined and cut every L+1 tokens, without padding
or overlap; where each begins is kept beside the rows. Chats are whole in a row, and padding fills
it. Labelled texts become one row `[label, number of tokens, tokens...]` each.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from tqdm import tqdm

from adloco_jax.data import chats, prepared, sources
from adloco_jax.data.disk import file_sha256, replaced_file, sync
from adloco_jax.data.files import local_copy
from adloco_jax.data.prepared import FORMAT, MANIFEST, FileRecord, Manifest
from adloco_jax.data.sampling import permute
from adloco_jax.data.sources import Document, Part
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.settings import DataSettings

# Most held-out rows measure reported losses; guard rows decide about merges.
MIN_HELDOUT_ROWS = 2  # one for each use
NUM_FIELDS = 2  # integers before the tokens of a labelled row: class, number of real tokens

CHUNK_CHARS = 2**20  # characters that are tokenised and saved at a time
# The names of the files that a preparation writes to `<folder>.partial`.
_OURS = re.compile(r"request\.json|whole|copy|\.lock|\d+\.npz|\..+\.partial")


def row_length(data: DataSettings, num_classes: int | None) -> int:
    """Integers in the longest row that the model reads, with L = `data.sequence_length`.

    A text has L + 1 tokens, perhaps with starts and weights (`data.prepared.DocumentRows`); a
    labelled row at most L, after its class and its length.
    """
    fields = 1 if num_classes is None else NUM_FIELDS
    return (data.sequence_length + fields) * data.row_parts


@dataclasses.dataclass(frozen=True)
class Job:
    """The description of a preparation of rows: the text, the tokenizer and the settings.

    Attributes:
      data: The config's group `data`.
      encoder: The tokenizer.
      num_classes: Number of classes of labelled texts, which are not packed into rows; else None.
      request: All settings that determine the rows, as plain JSON.
      parts: Returns the files of separate held-out text, and all others.
      where: The settings that name training text and held-out text, as "key=value", for messages.
      heldout_limit: Upper limit of rows from separate held-out text. None: all of it is read.
      cuts: Whether the text is a single document, whose end is held out.
    """

    data: DataSettings
    encoder: Tokenizer
    num_classes: int | None
    request: dict
    parts: Callable[[], tuple[list[Part], list[Part]]]
    where: tuple[str, str]
    heldout_limit: int | None = None
    cuts: bool = False

    @property
    def is_on_hub(self) -> bool:
        """Whether the text is a data set on the hub."""
        return bool(self.request["path"])

    def documents(self, part: Part, path: Path | None, where: str) -> Iterator[Document]:
        """Yield the documents of a part, whose file is at `path`; see `sources.documents_of`."""
        given = {"where": where, "num_classes": self.num_classes, "tokenizer": self.encoder}
        return sources.documents_of(part.read(path), self.data, **given)

    @property
    def row_length(self) -> int:
        """Number of tokens in a packed row."""
        return self.data.sequence_length + 1

    def lengths(self, about: np.ndarray) -> np.ndarray:
        """Uncut length in tokens, with prefix and suffix, of the labelled texts in `about`."""
        text = np.maximum(about["length"] - 1, 0)  # without the end-of-text token of packed text
        return text + len(self.encoder.prefix) + len(self.encoder.suffix)

    @property
    def key(self) -> str:
        """Hash of all settings that determine the rows; the name of their folder in the cache."""
        content = json.dumps(self.request, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()[:32]


def prepare(job: Job, folder: Path, *, note: Callable[[str], None] = print) -> Manifest:
    """Make a folder of rows, or continue an unfinished one; a finished folder is not changed.

    The rows depend on `job.request` and the text alone, not on interruptions: tokens are saved in
    `<folder>.partial`, in pieces of a million characters, and the finished folder is renamed. If
    several processes prepare the same folder, one makes it and the others wait. Memory: one piece,
    or one longer document, and 50 bytes per document. Documents are copies if all token ids agree.

    Raises:
      ConfigError: If the finished folder was made for other settings, or contains other files.
      DataError: If text is missing or damaged, or there is too little text.
      OSError: If the folder cannot be written; the same call continues once there is space.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if not partial.exists() and (found := _finished(folder, job.request)):
        return found
    partial.mkdir(parents=True, exist_ok=True)
    if others := [file.name for file in partial.iterdir() if not _OURS.fullmatch(file.name)]:
        raise ConfigError(
            f"{partial}: needed for the preparation, but holds {others[0]}; delete it, or name"
            " another folder"
        )
    lock = filelock.FileLock(partial / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        note(f"waiting for another process that prepares the same rows ({partial})")
        lock.acquire()
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if (manifest := _finished(folder, job.request)) is None:
            _discard_other(partial, job.request, note)
            kept = _Kept(partial, job.request)
            _tokenise(job, kept, partial, note)
            manifest = _write_folder(job, kept, partial / "whole")
            os.rename(partial / "whole", folder)
            sync(folder.parent)
        shutil.rmtree(partial, ignore_errors=True)  # another process may have removed it
    return manifest


def _finished(folder: Path, request: dict) -> Manifest | None:
    """Return the description of a finished folder; None if the folder is missing or empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    manifest = prepared.read_prepared(folder) if prepared.is_prepared(folder) else None
    if manifest is None or (keys := _differing(manifest.request, request)):
        have = f"was made with another setting of {keys}" if manifest else "has other files"
        raise ConfigError(f"{folder}: {have}; it is never overwritten: name another folder")
    return manifest


def request_of(folder: Path) -> dict:
    """Return the `Job.request` with which a folder was made or begun; empty if it was not."""
    if prepared.is_prepared(folder):
        return prepared.read_prepared(folder).request
    path = folder.with_name(f"{folder.name}.partial") / "request.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def _discard_other(partial: Path, request: dict, note: Callable[[str], None]) -> None:
    """Delete the pieces of an unfinished preparation if its text or settings have changed since."""
    path, pieces = partial / "request.json", [*partial.glob("*.npz")]
    there = json.loads(path.read_bytes()) if path.exists() else request
    if pieces and (keys := _differing(there, request)):
        note(f"{partial}: begun with other text or settings ({keys}); beginning again")
        for piece in pieces:
            piece.unlink()


def _differing(there: dict, wanted: dict) -> str:
    return ", ".join(key for key in there | wanted if there.get(key) != wanted.get(key))


# -- The documents of an unfinished preparation ----------------------------------------------

_DOCUMENT = np.dtype(
    [("length", "<i8"), ("num_bytes", "<i8"), ("digest", "<u8"), ("label", "<i8"), ("side", "<i8")]
    + [("counted", "<i8"), ("only_last", "?"), ("cut", "?"), ("rejected", "?"), ("bad", "?")]
)
"""The description of a document. `length` is the number of tokens, with the end of text; of a chat
the number that is saved, zero if none counts. `counted` is the number of tokens that count.
`num_bytes` is the number of UTF-8 bytes that these stand for. `digest` is a hash of the token ids,
without the end of text. `label` is the class. `side` is 1 if the document is from separate held-out
text, else 0. `only_last` and `rejected` are those of `chats.Answers`. `cut` says whether a chat was
longer, `bad` whether the document is a row without text, which `data.skip_bad` has let pass."""


class _Kept:
    """The documents that an unfinished preparation has tokenised and saved, in pieces of many.

    Attributes:
      part: Index of the file of text that is read next.
      documents: Number of documents of this file that are already saved.
      files: Records of the files that were read to their end.
      unread: Names of columns and fields of chats, as in `chats.Answers`.
      num_tokens: Number of tokens of all saved documents.
    """

    def __init__(self, partial: Path, request: dict):
        """Read the pieces that a killed preparation has saved in the folder `partial`, if any.

        Raises DataError if a piece is damaged.
        """
        self._folder, self._about = partial, [np.empty(0, _DOCUMENT)]
        self._counts: list[int] = []
        self.files: list[dict] = []
        self.unread: set[str] = set()
        self.part = self.documents = self.num_tokens = 0
        with replaced_file(partial / "request.json") as file:
            file.write(json.dumps(request).encode())
        while (path := self._path(len(self._counts))).exists():
            with self._opened(path) as content:
                self._note(content["about"], **json.loads(str(content["progress"])))

    @property
    def about(self) -> np.ndarray:
        """The description (`_DOCUMENT`) of each saved document, [N]."""
        self._about = [np.concatenate(self._about)]
        return self._about[0]

    def add(
        self,
        tokens: np.ndarray,
        answers: np.ndarray,
        about: np.ndarray,
        files: list[dict],
        unread: Collection[str],
        **position: int,
    ) -> None:
        """Save another piece; `about` describes its documents (`_DOCUMENT`).

        `answers` says which tokens of chats count; it is empty for other text. `files` are those
        now read to their end, and `position` the new `part` and `documents`.
        """
        progress = np.array(json.dumps({"files": files, "unread": [*unread]} | position))
        arrays = {"tokens": tokens, "answers": answers, "about": about, "progress": progress}
        with replaced_file(self._path(len(self._counts))) as file:
            np.savez(file, **arrays)
        self._note(about, files, unread, **position)

    def pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray, slice]]:
        """Yield tokens and answers of each saved piece, and the slice of `about` it describes."""
        first = 0
        for number, count in enumerate(self._counts):
            with self._opened(self._path(number)) as content:
                yield content["tokens"], content["answers"], slice(first, first + count)
            first += count

    def _note(
        self,
        about: np.ndarray,
        files: list[dict],
        unread: Collection[str],
        part: int,
        documents: int,
    ) -> None:
        self._about.append(about)
        self._counts.append(len(about))
        self.num_tokens += int(about["length"].sum())
        self.files += files
        self.unread |= {*unread}
        self.part, self.documents = part, documents

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.npz"

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            # Reading also compares the checksums in the file.
            with open(path, "rb") as file, np.load(file) as content:
                yield content
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged ({error}); delete {self._folder}") from error


# -- Reading and tokenising ------------------------------------------------------------------


def _tokenise(job: Job, kept: _Kept, partial: Path, note: Callable[[str], None]) -> None:
    heldout, rest = job.parts()
    parts = [*heldout, *rest]
    if kept.num_tokens:
        note(f"continuing after {kept.part} of {len(parts)} files, {kept.num_tokens} tokens")
    with tqdm(unit=" tokens", unit_scale=True, disable=None, initial=kept.num_tokens) as bar:
        for side, last in ((1, len(heldout)), (0, len(parts))):
            if kept.part < last:
                _tokenise_side(job, kept, parts[:last], side, partial, bar)
            if last and not (kept.about["side"] == side).any():
                raise DataError(no_text(job.where[side]))


def no_text(where: str) -> str:
    """Say that the text which a setting names is empty."""
    return f"{where}: no text in it, need at least one document that is not empty"


def _tokenise_side(
    job: Job, kept: _Kept, parts: list[Part], side: int, partial: Path, bar: tqdm
) -> None:
    pending: list[Document] = []
    files: list[dict] = []

    def keep(part: int, documents: int) -> None:
        unread = {name for document in pending for name in document.answers.unread}
        kept.add(*_encode(pending, job, side), files, unread, part=part, documents=documents)
        bar.update(kept.num_tokens - bar.n)
        pending.clear()
        files.clear()

    first, number, num_chars = kept.part, kept.documents, 0
    num_bad = int(kept.about["bad"].sum())
    enough = _is_enough(job, kept, side)
    for index, part in enumerate(parts[first:], first):
        bar.set_description(f"file {index + 1} of {len(parts)}", refresh=False)
        with local_copy(part.file, partial / "copy") as path:
            rest = itertools.islice(job.documents(part, path, job.where[side]), number, None)
            for document in () if enough else rest:
                number += 1
                num_bad += document.fault != ""
                if document.fault and num_bad > job.data.skip_bad:
                    why = f"row {num_bad} that is bad, and data.skip_bad={job.data.skip_bad}"
                    raise DataError(f"{document.fault}; {why}")
                pending.append(document)
                num_chars += len(document.text)
                if num_chars >= CHUNK_CHARS:
                    keep(index, number)
                    num_chars, enough = 0, _is_enough(job, kept, side)
                    if enough:
                        break
            # A file is read to its end even if there is enough text, so that it is counted whole,
            # and because gzip has its checksum there.
            if path is not None:
                number += sum(1 for _ in rest)
            files.append(_file_record(part.name, path, number))
        number = 0
        if enough:
            break
    keep(len(parts), 0)


def _is_enough(job: Job, kept: _Kept, side: int) -> bool:
    limit = job.heldout_limit if side else job.data.num_sequences
    if limit is None or job.num_classes is not None:
        return False
    needed = limit * job.row_length
    # Separate held-out text is read first. While it is read, all saved tokens belong to it.
    if side or kept.num_tokens < needed:
        return kept.num_tokens >= needed
    about = kept.about
    held = about["side"] == 1
    if not held.any():
        held = _share(np.flatnonzero(about["length"]), len(about), job.data.heldout_frac)
        if about["length"][held].sum() < MIN_HELDOUT_ROWS * job.row_length:
            return False
    known = np.isin(about["digest"], about["digest"][held])
    return about["length"][~known].sum() >= needed


def _encode(
    documents: Sequence[Document], job: Job, side: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenise documents; return all tokens, which count (of chats), and a `_DOCUMENT` for each."""
    texts, encoder = [document.text for document in documents], job.encoder
    about = np.zeros(len(texts), _DOCUMENT)
    if job.data.is_chat:
        ids, pieces, marks = _cut(documents, job, about)
    else:
        ids, marks = encoder.encode_batch(texts), []
        pieces = [np.append(i, np.int32(encoder.eot_id)) for i in ids]
        pieces = [p[:0] if d.fault else p for p, d in zip(pieces, documents, strict=True)]
        about["counted"] = [len(piece) for piece in pieces]
        about["num_bytes"] = [len(text.encode()) for text in texts]
    hashes = (hashlib.blake2b(i.astype("<i4").tobytes(), digest_size=8).digest() for i in ids)
    about["digest"] = [int.from_bytes(digest, "little") for digest in hashes]
    about["label"] = [document.label for document in documents]
    about["bad"] = [document.fault != "" for document in documents]
    about["side"] = side
    about["length"] = [len(piece) for piece in pieces]
    tokens = np.concatenate([np.empty(0, np.int32), *pieces])
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < encoder.vocab_size:
        raise DataError(
            f"data.tokenizer={encoder.name}: gives ids from {tokens.min()} to {tokens.max()}, "
            f"need 0 to {encoder.vocab_size - 1}"
        )
    tokens = tokens.astype(prepared.row_dtype(encoder.vocab_size, labelled=False))
    return tokens, np.concatenate([np.empty(0, bool), *marks]), about


def _cut(
    documents: Sequence[Document], job: Job, about: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Tokenise chats and cut them to the length of a row, to nothing if no token counts.

    Returns their ids, these cut, and which of the latter count.
    """
    ids, pieces, marks = [], [], []
    for document, of_chat in zip(documents, about, strict=True):
        answers = document.answers
        chat, offsets = job.encoder.encode_aligned(document.text)
        counted = chats.counted(offsets, answers.spans)[: job.row_length]
        length = len(counted) if counted.any() else 0
        ids.append(chat)
        pieces.append(chat[:length])
        marks.append(counted[:length])
        of_chat["counted"], of_chat["num_bytes"] = counted.sum(), answers.num_bytes
        of_chat["only_last"], of_chat["rejected"] = answers.only_last, answers.is_rejected
        of_chat["cut"] = 0 < length < len(chat)
    return ids, pieces, marks


def _file_record(name: str, path: Path | None, num_documents: int) -> dict:
    record: dict[str, Any] = {"name": name, "rows": num_documents}
    if path is not None:
        record |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return record


# -- Holding out -----------------------------------------------------------------------------


def is_heldout(first: int, count: int, heldout_frac: float) -> np.ndarray:
    """Say for each of `count` documents from index `first` on whether it is held out: bool[count].

    Of the first n documents in reading order, round(n · heldout_frac) are held out, so documents
    added to the end of the text do not change the choice.
    """
    marks = np.floor(np.arange(first, first + count + 1) * heldout_frac + 0.5)
    return np.diff(marks) > 0


def _split(job: Job, about: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mask, bool [N] each, the documents to train on and those to hold out.

    Copies of held-out documents, and chats without a token that counts, are in neither mask.
    """
    heldout, frac = about["side"] == 1, job.data.heldout_frac
    has_tokens = about["length"] > 0
    if not heldout.any() and job.cuts:
        heldout = np.arange(len(about)) == 1
    elif not heldout.any():
        for label in np.unique(about["label"]):
            of_label = np.flatnonzero((about["label"] == label) & has_tokens)
            heldout |= _share(of_label, len(about), frac)
    is_new = ~np.isin(about["digest"], about["digest"][heldout])
    return ~heldout & is_new & has_tokens, heldout & has_tokens


def _share(index: np.ndarray, count: int, heldout_frac: float) -> np.ndarray:
    """Mask, bool [count], the share of the documents at `index` to hold out."""
    heldout = np.zeros(count, bool)
    heldout[index] = is_heldout(0, len(index), heldout_frac)
    return heldout


# -- Rows ------------------------------------------------------------------------------------


def _write_folder(job: Job, kept: _Kept, whole: Path) -> Manifest:
    encoder, about, is_packed = job.encoder, kept.about, job.num_classes is None
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    masks = _split(job, about)
    is_empty, bad, rejected = about["length"] == 0, about["bad"].sum(), about["rejected"].sum()
    copies = int((~is_empty).sum() - sum(mask.sum() for mask in masks))
    dropped = int(is_empty.sum() - bad - rejected)
    names = prepared.ARRAYS[: 6 if job.data.is_chat else 4 if is_packed else 2]
    paths = [whole / name for name in names]
    shapes = (_write_packed if is_packed else _write_labelled)(job, kept, paths, masks)
    unread = f" and {dropped + rejected} chats without an answer" * bool(dropped + rejected)
    unread += " within data.sequence_length" * bool(dropped)
    for side, (have, least) in enumerate(zip(shapes[:2], (1, MIN_HELDOUT_ROWS), strict=True)):
        if have[0] < least:
            raise DataError(
                f"{job.where[side]}: too little text: have {have[0]} rows of {have[1]} tokens to"
                f" {('train on', 'hold out')[side]}, in {masks[side].sum()} of {len(about)}"
                f" documents ({copies} copies of held-out ones{unread} are left out), need {least};"
                " give more text or documents, another data.heldout_frac, separate held-out text"
                " (data.heldout_path), or a smaller data.sequence_length"
            )
    for path in paths:
        sync(path)
    arrays = [np.load(path, mmap_mode="r") for path in paths]
    heldout_tokens, heldout_bytes = (about[key][masks[1]].sum() for key in ("counted", "num_bytes"))
    cut = about["cut"] if is_packed else job.lengths(about) > job.data.sequence_length
    manifest = Manifest(
        format=FORMAT,
        request=job.request,
        tokenizer=encoder.name,
        fingerprint=encoder.fingerprint,
        vocab_size=encoder.vocab_size,
        eot_id=encoder.eot_id,
        shapes=shapes,
        hashes=[file_sha256(path) for path in paths],
        documents=[prepared.num_documents(*arrays[side::2]) for side in (0, 1)],
        tokens_per_byte=float(heldout_tokens / max(1, heldout_bytes)),
        files=[FileRecord(**record) for record in kept.files],
        copies=copies,
        truncated=int(cut.sum()),
        dropped=dropped,
        only_last=int(about["only_last"].sum()),
        rejected=int(rejected),
        bad=int(bad),
        unread=sorted(kept.unread),
    )
    (whole / MANIFEST).write_text(json.dumps(manifest.model_dump(exclude_none=True)) + "\n")
    for path in (whole / MANIFEST, whole):
        sync(path)
    return manifest


Masks = tuple[np.ndarray, np.ndarray]


def _write_packed(job: Job, kept: _Kept, paths: Sequence[Path], masks: Masks) -> list[list]:
    """Write rows of documents one after another, or of whole chats; return all shapes."""
    lengths, width, is_chat = kept.about["length"], job.row_length, job.data.is_chat
    kinds = [prepared.row_dtype(job.encoder.vocab_size, labelled=False), np.dtype(bool)]
    sides, shapes = [], []
    limits = (job.data.num_sequences, job.heldout_limit)
    for side, (mask, limit) in enumerate(zip(masks, limits, strict=True)):
        length_D = lengths[mask]
        if is_chat:
            row_D, offset_D = pack(length_D, width)
            first_D, num_rows = row_D * width + offset_D, int(row_D.max(initial=-1)) + 1
        else:
            first_D, num_rows = np.cumsum(length_D) - length_D, int(length_D.sum()) // width
        num_rows = num_rows if limit is None else min(num_rows, limit)
        arrays = [
            np.lib.format.open_memmap(path, "w+", kind, (num_rows, width))
            for path, kind in zip(paths[side::4], kinds, strict=False)
        ]
        if is_chat:  # padding is a document of its own, in which nothing counts
            arrays[0][:] = job.encoder.eot_id
            starts = np.union1d(first_D, first_D + length_D)
        else:  # a document begins with the end of text from which its first token is predicted
            starts = np.maximum(first_D - 1, 0)
        starts = starts[starts < num_rows * width]
        np.save(paths[side + 2], starts)
        first_N = np.full(len(lengths), num_rows * width)  # behind the end: left out
        first_N[mask] = first_D
        sides.append((first_N, arrays))
        shapes.append([[num_rows, width], [len(starts)]])
    for *saved, which in kept.pieces():
        offsets = np.cumsum(lengths[which]) - lengths[which]
        for first_N, arrays in sides:
            to = np.repeat(first_N[which] - offsets, lengths[which]) + np.arange(len(saved[0]))
            fits = to < arrays[0].size
            for array, values in zip(arrays, saved, strict=False):
                array.reshape(-1)[to[fits]] = values[fits]
    rows, starts = map(list, zip(*shapes, strict=True))
    return [*rows, *starts, *(rows if is_chat else [])]


def pack(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents of up to `width` tokens to rows: each one's row, and its position there.

    A document goes to the row with the least space that holds it (best fit), in order.
    """
    rows, offsets = np.zeros((2, len(lengths)), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(width + 1)]  # by the space that is left
    spaces, num_rows = 0, 0  # the set bits of `spaces` are the spaces of open rows
    for index, length in enumerate(lengths.tolist()):
        fits = spaces >> length << length
        space = (fits & -fits).bit_length() - 1
        if fits:
            row = open_rows[space].pop()
            spaces ^= (not open_rows[space]) << space
        else:
            row, space, num_rows = num_rows, width, num_rows + 1
        rows[index], offsets[index] = row, width - space
        if space > length:
            open_rows[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows, offsets


def _write_labelled(job: Job, kept: _Kept, paths: Sequence[Path], masks: Masks) -> list[list]:
    """Write one row [class, n, tokens...] for each labelled text; return both shapes."""
    about, longest = kept.about, job.data.sequence_length
    prefix, suffix = job.encoder.prefix, job.encoder.suffix
    lengths = np.minimum(job.lengths(about), longest)
    power = 1 << (int(lengths.max()) - 1).bit_length()
    bucket = power * 3 // 4 if lengths.max() <= power * 3 // 4 else power
    rows = np.zeros((len(about), NUM_FIELDS + min(bucket, longest)), np.int32)
    rows[:, 0], rows[:, 1] = about["label"], lengths
    for tokens, _, which in kept.pieces():
        starts = np.cumsum(about["length"][which]) - about["length"][which]
        for row, start, length in zip(rows[which], starts, lengths[which], strict=True):
            text = tokens[start : start + length - len(prefix) - len(suffix)]
            row[NUM_FIELDS : NUM_FIELDS + length] = [*prefix, *text, *suffix]
    shapes = []
    for path, mask, limit, where in zip(
        paths, masks, (job.data.num_sequences, None), job.where, strict=True
    ):
        chosen = rows[mask] if limit is None else _drawn(rows[mask], limit)
        counts = np.bincount(chosen[:, 0], minlength=job.num_classes or 0)
        if counts.min() < 1:
            raise DataError(
                f"{where}: have {', '.join(map(str, counts))} texts of classes 0 to"
                f" {len(counts) - 1}, need some of each to train on and to hold out; check"
                f" model.num_classes={len(counts)}, or give more text"
            )
        np.save(path, chosen)
        shapes.append(list(chosen.shape))
    return shapes


def _drawn(rows: np.ndarray, limit: int) -> np.ndarray:
    """Draw up to `limit` rows at random, in order, because files are often sorted by class."""
    limit = min(limit, len(rows))
    drawn = permute(np.arange(limit), num_items=len(rows), key=np.zeros(1, np.uint64))
    return rows[np.sort(drawn)]
