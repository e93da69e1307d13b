"""Read the config of a run from a file and the command line, check it, and report all faults.

A config is a ConfigDict of knobs (settings), most of them in groups such as `inner`. The module
`adloco_jax.settings` declares the knobs. A config file calls `default_config()`, which returns a
locked ConfigDict, and changes some knobs. `validate` turns the ConfigDict into frozen dataclasses,
which all other modules read.
"""

import contextlib
import copy
import difflib
import inspect
import itertools
import json
import operator
import os
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from absl import flags
from ml_collections import ConfigDict, FieldReference
from ml_collections.config_flags.tuple_parser import TupleParser

from adloco_jax.errors import ConfigError
from adloco_jax.knobs import Knob
from adloco_jax.rules import RULES
from adloco_jax.settings import GROUPS, KNOBS, Settings

# The folder of the configs that come with the package. In the repository it is a link to the folder
# `configs` at the top level.
SHIPPED = (Path(__file__).parent / "configs").resolve()

# Keys of version 0.2, and values of keys, that were removed. The text says what holds instead, or
# what to do.
REMOVED = {
    "data.on_bad_shard": "a damaged file is refused; leave it out by a glob",
    "data.max_bad_rows": "a damaged line is refused; repair it",
    "checkpoint.on_save_error": "a failed save stops the run; the same command continues it",
    "model.attention": "the fastest kernel that the model and the device allow is chosen",
    "model.reinit_head": "a head that the checkpoint lacks is random",
    "batching.test=branch": "set batching.test=norm",
    "batching.branch_every_rounds": "set batching.test=norm",
    "batching.branch_epsilon": "set batching.test=norm",
    "batching.test=replay": "declare the batches by batching.test=ramp",
    "batching.replay": "declare the batches by batching.test=ramp",
    "ensemble.init": "all trainers start from the same parameters",
    "inner.lr_on_growth": "the learning rate does not change with the batch",
    "inner.max_lr_growth": "the learning rate does not change with the batch",
    "batching.estimator": "taps are used where the model has them, else per-example gradients",
    "batching.monotone": "a batch never falls",
    "inner.qsr_alpha": "it is 0.0175, as in its paper; for another, add an entry to ROUND_LENGTHS",
    "outer.precision=int8": "set outer.precision=int4, or bfloat16",
    "outer.weight_decay": "only the inner optimizer decays weights: inner.weight_decay",
    "inner.unit": "steps_per_round counts updates",
    "inner.schedule=linear_after_merge": "set inner.schedule=linear",
    "ensemble.worker_parallelism": "one worker at a time on a CPU, elsewhere all",
    "ensemble.allocation": "workers are divided by demand after a merge",
    "merge.representative_batch": "the merged trainer has its largest member's batch",
    "merge.max_harm": "set merge.max_barrier",
    "switch.mode=lengthen": (
        "set batching.growth=('rounds', 'batch') and inner.max_steps_per_round"
    ),
}

T = TypeVar("T")


# -- Values ----------------------------------------------------------------------------------


def default_config() -> ConfigDict:
    """Return a locked config in which every knob has its default value.

    A config file starts from this config, and changes some of the knobs.
    """
    config: dict[str, Any] = {group: {} for group in GROUPS}
    for key, knob in KNOBS.items():
        group, _, name = key.rpartition(".")
        value = knob.default
        if knob.is_optional:
            # If the default is "auto", the field must accept an int too. So it may have any type.
            value = FieldReference(value, field_type=_base(knob.kind) if value is None else object)
        (config[group] if group else config)[name] = value
    return ConfigDict(config).lock()


def validate(config: ConfigDict | Mapping[str, Any]) -> Settings:
    """Check a whole config, and return its values as frozen dataclasses.

    Args:
      config: A ConfigDict with the groups and knobs of `default_config()`, locked or not, or nested
        dicts with these groups and knobs.

    Returns:
      The settings. `batching.buckets` lists all allowed micro-batch sizes, ascending. Sizes of the
      model that are unset are read from the checkpoint that `model.init_from` names. If there is no
      such checkpoint, they have the defaults that the knobs declare.

    Raises:
      ConfigError: If a knob is unknown, missing, of a wrong type or out of range, or if knobs
        contradict one another. The message has one line for each fault. Also raised if sizes of the
        model must be read from a checkpoint on the hub, and the hub has no such checkpoint.
      ResourceError: If sizes of the model must be read from the hub, and the hub cannot be reached.
      DataError: If the checkpoint of `model.init_from` cannot be used.
    """
    given, faults = _flatten(config)
    values = {}
    for key, value in given.items():
        try:
            values[key] = _read(KNOBS[key], value)
        except ValueError:
            faults.append(value_fault(key, value))
    unset = [key for key in values if values[key] is None and KNOBS[key].size is not None]
    read = _sizes_of_checkpoint(values).intersection(unset)
    values |= {key: KNOBS[key].size for key in unset if key not in read}
    faults += _contradictions({key: values[key] for key in values if key not in read})
    if read and not faults:
        from adloco_jax import hf  # imported only here, because it imports JAX

        found = hf.inspect(values["model.init_from"]).network
        # A checkpoint of another architecture may lack some sizes. The default is used for these,
        # and the run later refuses such a checkpoint.
        for key in read:
            values[key] = getattr(found, key.removeprefix("model."), KNOBS[key].size)
        faults = _contradictions(values)
    if faults:
        raise ConfigError("\n".join(faults))
    values["batching.buckets"] = _resolve_buckets(
        values["batching.buckets"],
        largest=values["batching.max_batch_size"] or values["batching.batch_cap"],
    )
    parts: dict[str, dict[str, Any]] = {group: {} for group in ("", *GROUPS)}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        parts[group][name] = value
    return Settings(**parts.pop(""), **{name: GROUPS[name](**part) for name, part in parts.items()})


def _sizes_of_checkpoint(values: Mapping[str, Any]) -> set[str]:
    """Return the keys of the model's sizes that can be read from the checkpoint `model.init_from`.

    The set is empty if the config names no checkpoint, or if its architecture has no weight map
    (the names under which a checkpoint stores sizes and weights).
    """
    if not values.get("model.init_from") or "model.arch" not in values:
        return set()
    names = KNOBS["model.arch"].entries()[values["model.arch"]].weight_map
    return set() if names is None else {f"model.{ours}" for ours, _ in names.sizes.values()}


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Describe the contradictions between the values of knobs, one line for each broken rule.

    The rules are those in `RULES`, those of the configured architecture, and those of the
    configured source of data.
    """
    rules = [(keys.split(), holds, need) for need, (keys, holds) in RULES.items()]
    if arch := values.get("model.arch"):
        for names, holds, need in KNOBS["model.arch"].entries()[arch].rules:
            rules.append(([f"model.{name}" for name in names], holds, need))
    if source := values.get("data.source"):
        for name, need in KNOBS["data.source"].entries()[source].refuses.items():
            default = KNOBS[f"data.{name}"].default
            rules.append((["data.source", f"data.{name}"], lambda _, v, d=default: v == d, need))
    return [
        f"{', '.join(f'{key} = {_shown(values[key])}' for key in keys)}: {need}"
        for keys, holds, need in rules
        if values.keys() >= set(keys) and not holds(*(values[key] for key in keys))
    ]


def allowed(key: str, names: tuple[str, ...] = ()) -> str:
    """Describe in words the values that a key of the config may have, and its default.

    Args:
      key: The key.
      names: The names to list, if the value of the key is the name of an entry in a table. Empty:
        the names of the entries that come with the library.
    """
    knob = KNOBS[key]
    names = names or knob.table[1:]
    words = " or ".join(map(repr, names)) if names else _in_words(knob.kind)
    default = "unset" if knob.default is None else repr(knob.default)
    return f"{words} (default: {default})"


def value_fault(key: str, value: object) -> str:
    """Say on one line that a value is not allowed for a key of the config, and which values are."""
    if instead := REMOVED.get(f"{key}={value}"):
        return f"{key} = {_shown(value)}: removed in 0.3: {instead}"
    names = tuple(KNOBS[key].entries()) if KNOBS[key].table else ()
    return f"{key} = {_shown(value)}: must be {allowed(key, names)}"


def unknown_key_fault(key: str) -> str:
    """Say on one line that a key of the config is unknown, and which known keys have a near name.

    If the key was removed in version 0.3, the line says so, and what to do instead.
    """
    if key in REMOVED:
        return f"{key}: removed in 0.3: {REMOVED[key]}"
    nearest = namesakes(key) or difflib.get_close_matches(key, KNOBS, n=1, cutoff=0.0)
    return f"{key}: no such key; did you mean {' or '.join(nearest)}?"


def namesakes(key: str) -> list[str]:
    """List the known keys with the same last part, or whose words begin with its letters.

    So `lr` stands for `learning_rate`. Keys of the same group are preferred.
    """
    group, _, name = key.rpartition(".")
    found = []
    for known in KNOBS:
        last = known.rpartition(".")[2]
        if name in (last, "".join(word[0] for word in last.split("_") if "_" in last)):
            found.append(known)
    return [known for known in found if known.rpartition(".")[0] == group] or found


def _flatten(config: object) -> tuple[dict[str, Any], list[str]]:
    """Return the values of all known keys of a config, and one line of text for each fault.

    A fault is an unknown key, a missing key, or a single value in place of a group of keys.
    """
    if not isinstance(config, ConfigDict | Mapping):
        return {}, [f"config = {_shown(config)}: must be a config; start from default_config()"]
    given: dict[str, Any] = {}
    for name, value in config.items():
        if name in GROUPS and isinstance(value, ConfigDict | Mapping):
            given |= {f"{name}.{key}": member for key, member in value.items()}
        else:
            given[str(name)] = value
    faults = [
        f"{key} = {_shown(value)}: must be a group of keys; see default_config()"
        if key in GROUPS
        else unknown_key_fault(key)
        for key, value in given.items()
        if key not in KNOBS
    ]
    faults += [
        f"{key}: missing; start from default_config(), which has every key"
        for key in KNOBS
        if key not in given and key.partition(".")[0] not in given
    ]
    return {key: given[key] for key in KNOBS if key in given}, faults


def _read(knob: Knob, value: Any) -> Any:
    """Convert the value of a knob in a config to the value that `Settings` has for it.

    If the knob is unset, this is None. A whole number becomes a float if the knob is a float.

    Raises:
      ValueError: If the value is not allowed for the knob.
    """
    if knob.is_optional and type(value) is type(knob.default) and value == knob.default:
        return None
    if not _fits(value, knob.kind) or knob.table and value not in knob.entries():
        raise ValueError
    return float(value) if _base(knob.kind) is float else value


def _base(annotation: Any) -> Any:
    """Return the plain type, such as float or tuple, in the annotation of a knob.

    The annotation may also have the range of a number, or the types of a tuple's items.
    """
    origin = get_origin(annotation)
    return get_args(annotation)[0] if origin is Annotated else origin or annotation


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value has the type and is in the range that an annotation states.

    A bool is not accepted as an int, and a list is not accepted as a tuple. But an int is accepted
    as a float.
    """
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return type(value) is str and value in members
    if get_origin(annotation) is tuple:
        sized = type(value) is tuple and (members[-1] is ... or len(value) == len(members))
        return sized and all(_fits(member, members[0]) for member in value)
    if get_origin(annotation) is not Annotated:
        return type(value) is annotation
    kind, within = members
    if kind is str:
        return type(value) is str and value != ""
    low, high = map(float, within[1:-1].split(","))
    above = operator.gt if within[0] == "(" else operator.ge
    below = operator.lt if within[-1] == ")" else operator.le
    return type(value) in (int, kind) and above(value, low) and below(value, high)


def _in_words(annotation: Any) -> str:
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, members))
    if get_origin(annotation) is tuple:
        kind = "a tuple" if members[-1] is ... else "a pair"
        return f"{kind}, each item {_in_words(members[0])}"
    if get_origin(annotation) is Annotated:
        separator = ", " if members[0] is str else " in "
        return separator.join([_in_words(members[0]), members[1]])
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    return names[annotation]


def _shown(value: object) -> str:
    """Represent a value as text on one line, cut after 200 characters."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 200 else f"{text[:200]}..."


def _resolve_buckets(buckets: tuple[int, ...], *, largest: int) -> tuple[int, ...]:
    """List the allowed micro-batch sizes, ascending.

    These are the sizes in `buckets` up to `largest`. If `buckets` is empty, they are the powers of
    two up to `largest`, the numbers halfway between two of these powers, and `largest` itself.
    """
    powers = [2**n for n in range(largest.bit_length())]
    sizes = buckets or [*powers, *(3 * power // 2 for power in powers[1:]), largest]
    return tuple(sorted({size for size in sizes if size <= largest}))


# -- Options ---------------------------------------------------------------------------------


def define_flags(options: flags.FlagValues) -> None:
    """Define an option `--config.KEY` of the command line for every knob of the config.

    The value of such an option is kept as text. The function `override` parses it later.
    """
    for key, knob in KNOBS.items():
        parser, is_bool = flags.ArgumentParser(), knob.kind is bool
        flag = flags.Flag(parser, None, f"config.{key}", None, knob.doc, boolean=is_bool)
        flags.DEFINE_flag(flag, options)


def override(config: ConfigDict, key: str, text: str) -> None:
    """Parse the text of a value from the command line, and set a key of a config to the value.

    If the config lacks the key, nothing is set; `validate` then reports the missing key.

    Raises:
      ConfigError: If the text cannot be parsed as the key's type.
    """
    group, _, name = key.rpartition(".")
    holder = config.get(group) if group else config
    if not isinstance(holder, ConfigDict) or name not in holder:
        return  # `validate` reports the missing key
    knob = KNOBS[key]
    try:
        if knob.is_optional and text == ("none" if knob.default is None else knob.default):
            value = knob.default
        else:
            parser = _PARSERS.get(_base(knob.kind), flags.ArgumentParser)
            value = parser().parse(text)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(value_fault(key, text)) from error
    with holder.ignore_type():
        holder[name] = value


_PARSERS: dict[Any, type[flags.ArgumentParser]] = {
    **{int: flags.IntegerParser, float: flags.FloatParser, bool: flags.BooleanParser},
    tuple: TupleParser,
}


def config_help() -> str:
    """Return the help on all knobs of the config as text.

    The text says for each knob what it means, its unit, its allowed values, its default, and how to
    unset it.
    """
    lines = []
    for group, keys in itertools.groupby(KNOBS, key=lambda key: key.rpartition(".")[0]):
        card = inspect.getdoc(GROUPS[group]) if group else "The whole run."
        lines += ["", f"config.{group}".removesuffix("."), f"  {card}"]
        for key in keys:
            values = f"{allowed(key)}{_unset(KNOBS[key])}"
            lines.append(f"  --config.{key}")
            lines += [
                textwrap.fill(text, 98, initial_indent=" " * 6, subsequent_indent=" " * 6)
                for text in (KNOBS[key].doc, values)
            ]
    return "\n".join(lines[1:])


def _unset(knob: Knob) -> str:
    if knob.is_optional:
        return f"; unset with ={'none' if knob.default is None else knob.default}"
    return f"; unset with ={knob.default!r}" if knob.default in ("", ()) else ""


# -- Files -----------------------------------------------------------------------------------


def find_config(name: str | None) -> Path:
    """Find a config file by its path, or by the name of a config that comes with this package.

    Raises:
      ConfigError: If `name` is None, or if there is no such file. In the second case the message
        lists the configs that come with this package.
    """
    if name is None:
        raise ConfigError(
            "no config; write: adloco train quickstart, or another name that adloco configs lists,"
            " or a file"
        )
    for path in (Path(name), SHIPPED.parent / name, SHIPPED / f"{name}.py"):
        if os.path.isfile(path):
            return path
    known = sorted(file.stem for file in SHIPPED.glob("[!_]*.py"))
    nearest = difflib.get_close_matches(Path(name).stem, known, n=1)
    meant = "".join(f"did you mean {near}? " for near in nearest)
    raise ConfigError(
        f"--config {name}: no such file; {meant}those that come with adloco_jax: {', '.join(known)}"
    )


def load_config(path: Path, function: str, kind: type[T]) -> T:
    """Run the Python file of a config, call one of its functions, and return the result.

    Raises:
      ConfigError: If the file raises an error, if it does not define the function, or if the result
        is not of type `kind`.
    """
    made = _run(path, function)
    if type(made) is not kind:
        hint = "start it from adloco_jax.config.default_config()"
        for other, verb in (("get_config", "train"), ("get_comparison", "compare")):
            if other != function and f"def {other}(" in path.read_text("utf-8", "replace"):
                hint = f"write: adloco {verb} {path}"
        raise ConfigError(f"{path}: needs a {function}() that returns a {kind.__name__}; {hint}")
    return made


def with_recorded_sizes(config: ConfigDict, workdir: str | Path | None) -> ConfigDict:
    """Return a config whose unset model sizes are those that the run in a folder has recorded.

    So a run resumes without the checkpoint `model.init_from`, from which the sizes were read. The
    config stays as it is if the folder contains no run, or one from another checkpoint.
    """
    config, recorded = copy.deepcopy(config), {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # reported later
        recorded = json.loads(Path(workdir or "", "config.json").read_bytes())["config"]["model"]
    model = config.get("model")
    if isinstance(model, ConfigDict) and recorded.get("init_from") == model.get("init_from", ""):
        with model.ignore_type():
            for name in model:
                if model[name] is None and recorded["init_from"]:
                    model[name] = recorded.get(name)
    return config


def add_entries(name: str | None) -> None:
    """Run a config file only for the entries that it adds to tables, such as `ARCHITECTURES`.

    The config that the file makes is ignored. `name` is the path of the file, or the name of a
    config that comes with this package. If it is None, nothing is done.
    """
    if name is not None:
        _run(find_config(name), "get_config", "get_comparison")


def _run(path: Path, *functions: str) -> object:
    """Run a Python file, and return the result of one of its functions.

    The function is the first in `functions` that the file defines. The result is None if the file
    defines none of them.
    """
    # The parent of the config's folder is added to the import path, so that a config can import
    # other configs in this folder.
    root = str(path.resolve().parent.parent)
    sys.path.insert(0, root)
    try:
        names = runpy.run_path(str(path))
        found = [names[name] for name in functions if callable(names.get(name))]
        return found[0]() if found else None
    # Deliberately broad, because a config file is arbitrary Python.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        # The error of a locked ConfigDict lists all fields before it names the nearest one. This
        # list is removed.
        text = re.sub(r"Other fields present: .*}\"", "", str(error)).replace("\\n", " ")
        raise ConfigError(f"{where}: {type(error).__name__}: {' '.join(text.split())}") from error
    finally:
        sys.path.remove(root)
