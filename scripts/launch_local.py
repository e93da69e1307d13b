"""Runs one training run as several processes on this machine, and restarts them if they fail.

    python scripts/launch_local.py --processes 2 [--devices-per-process 4] [--watchdog-s 600] \
        [--max-restarts 3] -- --config configs/quickstart.py --workdir runs/two

The arguments after `--` are those of `python -m adloco_jax.main`, and must name a workdir, in which
a restarted group finds its checkpoints. After a stop, the same command resumes the run. The
processes compute on the CPU, unless JAX_PLATFORMS says otherwise: one process alone uses all GPUs
of a machine.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from adloco_jax.errors import ConfigError, ResourceError
from adloco_jax.run.supervise import supervise

_OURS = ("--coordinator", "--num_processes", "--process_id", "--distributed")


def main() -> int:
    """Launches the processes, and returns when the run has ended."""
    words, rest = sys.argv[1:], []
    if "--" in words:
        words, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        usage="%(prog)s [options] -- --config FILE --workdir DIR [--config.KEY=VALUE ...]",
    )
    parser.add_argument("--processes", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--devices-per-process", type=int, help="emulated devices (default 1)")
    parser.add_argument(
        "--watchdog-s",
        type=float,
        default=600.0,
        help="seconds without a line in the ledger, compilation included, after which the "
        "processes are taken to be stuck (default 600)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="restarts in a row without a newer checkpoint (default 3)",
    )
    options = parser.parse_args(words)
    counts = {options.processes, options.devices_per_process} - {None}
    if min(counts) < 1:
        parser.error("--processes and --devices-per-process: expected 1 or more")
    if not options.watchdog_s > 0 or options.max_restarts < 0:
        parser.error("--watchdog-s: expected more than 0; --max-restarts: 0 or more")
    try:
        return supervise(
            [sys.executable, "-m", "adloco_jax.main", *rest],
            workdir_of(rest),
            num_processes=options.processes,
            watchdog_s=options.watchdog_s,
            max_restarts=options.max_restarts,
            environment=environment(os.environ, options.devices_per_process),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:  # no more processes, files, ports
        print(f"out of resources: {error}", file=sys.stderr)
        return ResourceError.exit_code


def workdir_of(words: Sequence[str]) -> Path:
    """The run's folder that its command line names.

    Raises:
      ConfigError: If it names none, or has options that the launcher sets.
    """
    workdir = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = re.sub("^--?", "--", word).partition("=")
        if name in _OURS:
            raise ConfigError(f"{name}: is given to each process from here; leave it out")
        if name == "--workdir":
            workdir = value if equals else following
    if not workdir:
        raise ConfigError(
            "--workdir: missing; processes that are started again find their checkpoints by it; "
            "write -- --config FILE --workdir DIR"
        )
    return Path(workdir)


def environment(present: Mapping[str, str], devices_per_process: int | None) -> dict[str, str]:
    """The environment of the processes, with emulated devices if a number is given."""
    on_cpu = {"JAX_PLATFORMS": "cpu"} | dict(present)
    if devices_per_process is None:
        return on_cpu
    flag = f"--xla_force_host_platform_device_count={devices_per_process}"
    flags = f"{present.get('XLA_FLAGS', '')} {flag}".strip()  # of two, the last one counts
    return on_cpu | {"XLA_FLAGS": flags}


if __name__ == "__main__":
    sys.exit(main())
