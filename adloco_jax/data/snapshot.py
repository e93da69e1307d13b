"""Files of the Hugging Face hub, from its cache or over the network."""

import re
from collections.abc import Sequence
from pathlib import Path

from adloco_jax.errors import ConfigError

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def snapshot(
    name: str, wanted: Sequence[str], *, one_of: Sequence[str], where: str, what: str
) -> Path:
    """Download files of a hub repository, unless they are in the cache.

    Args:
      name: Of the repository.
      wanted: Patterns of file names.
      one_of: Patterns; the cache is used if it holds a file of at least one of them.
      where: Key and value of the config, for messages.
      what: Kind of files, for messages.

    Returns:
      The folder that holds the files.

    Raises:
      ConfigError: If the hub cannot be reached, or has no such repository.
    """
    import huggingface_hub

    try:
        try:
            cached = Path(
                huggingface_hub.snapshot_download(
                    name, allow_patterns=list(wanted), local_files_only=True
                )
            )
            if any(any(cached.glob(pattern)) for pattern in one_of):
                return cached
        except (OSError, ValueError):
            pass  # nothing is cached
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(wanted)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: no file or folder of that name here, and the Hugging Face hub gave no {what}"
            " for it (wrong or private name, or no network); correct the name, log in, or give a"
            " local path"
        ) from error
