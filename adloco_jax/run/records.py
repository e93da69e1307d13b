"""What the JSON of a run's folder must hold; its fields are checked where it is read.

A folder may be damaged, or somebody else's. What `ledger.jsonl`, `config.json` and a checkpoint's
`host.json` give to the rest of the package has the types declared here.
"""

import typing
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypedDict

from adloco_jax.loop.adloco import Control, StateBytes
from adloco_jax.settings import Settings

Size = typing.NewType("Size", int)  # at least 1
_MOST_SECONDS = 1e12
_WORDS = {
    Size: "a count from 1 on",
    int: "a count",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
}


class Maybe(NamedTuple):
    """The kind of a field that may be missing."""

    kind: Any


class _Class(TypedDict):
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class _Shard(TypedDict):
    name: str


def _fields(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_COSTS = _fields(int, "syncs bytes")
_MERGE = (
    _fields(int, "round into")
    | {"members": list[int], "weights": list[float], "loss_before": list[float | None]}
    | _fields(float | None, "loss_after barrier")
    | _COSTS
)
# By event, the kind of each field. A number is null where it was not finite, or not measured.
EVENTS: dict[str, dict[str, Any]] = {
    "start": _fields(str, "run command data_fingerprint")
    | _fields(Size, "num_params max_batch_size")
    | {"state_bytes": typing.get_type_hints(StateBytes), "config": Settings}
    | _fields(Maybe(str), "time devices jax attention loss_unit")
    | {"versions": Maybe(dict[str, str]), "tokens_per_byte": Maybe(float | None)}
    | {"round": Maybe(int), "buckets": Maybe(list[int])},
    "round": _fields(int, "round trainer tokens")
    | _fields(Size, "workers requested_batch_size micro_batch_size num_accum_steps")
    | _fields(Size, "next_batch_size updates")
    | _COSTS
    | _fields(float | None, "train_loss noise signal test_value step_s stall_s")
    | _fields(Maybe(float | None), "learning_rate pseudo_grad_norm")
    | _fields(Maybe(int | None), "steps_per_round next_steps_per_round")
    | _fields(Maybe(int), "next_workers skipped_updates")
    | {"reason": Maybe(str)}
    | _fields(Maybe(int), "workers_counted wire_bytes"),
    "learner": _fields(int, "round learner") | {"trainer": int | None} | _fields(str, "what why"),
    "eval": {"round": int, "trainer": int | Literal["consensus"], "loss": float | None}
    | _fields(int, "tokens_total syncs_total bytes_total")
    | {"updates_total": Maybe(int), "source": Maybe(str)}
    | _fields(Maybe(float | None), "perplexity wall_s accuracy")
    | {"classes": Maybe(list[_Class])},
    "sync": {"round": int, "trainers": list[int]} | _COSTS,
    "merge": _MERGE | {"requested_batch_size": Maybe(int), "workers": Maybe(dict[str, int])},
    "refusal": _MERGE | {"action": Maybe(str)},
    "spawn": {"round": int, "trainer": Maybe(int), "reason": Maybe(str)}
    | _COSTS
    | _fields(Maybe(int), "workers_before workers_after"),
    "fault": {"kind": str, "round": int, "trainer": Maybe(int), "cause": Maybe(str)}
    | _fields(Maybe(int), "updates skipped_in_a_row max_batch_size max_batch_size_before")
    | _fields(Maybe(str), "tracker effect"),
    "compile": _fields(str, "key cache where")
    | {"seconds": float, "needed_bytes": Maybe(int | None)},
    "memory": {"round": int, "host_peak_bytes": int, "device_peak_bytes": list[int | None]},
    "checkpoint": {"round": int} | _fields(Maybe(float), "bytes blocked_s save_s"),
    "end": {"reason": str, "wall_s": float, "tokens_per_s": Maybe(float)}
    | _fields(int, "rounds tokens_total")
    | _fields(Maybe(int), "bytes_total syncs_total updates_total"),
}

HOST: dict[str, Any] = {
    "control": Control,
    "max_batch_size_given": int | None,
    "loss": float | None,
    "wall_s": float,
    "ledger": {"bytes": int, "sha256": str},
    "data": {"fingerprint": str, "shards": list[_Shard]},
}
"""Of a checkpoint's `host.json`, the fields that are read."""


def fault(value: Any, kind: Any, name: str) -> str:
    """The first field that does not hold what it should, in words; empty if all do.

    Args:
      value: From JSON.
      kind: An annotation, a dataclass, or a mapping from field to kind. Fields that a mapping lacks
        may hold anything.
      name: Of the value, for the message.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        faults = [fault(value, m, name) for m in members if m is not NoneType]
        return "" if "" in faults or (value is None and NoneType in members) else faults[0]
    parts: dict[str, tuple[Any, Any]] = {}  # value and kind of each part, by name
    if kind in (Any, *_WORDS):  # not by hash, which a mapping lacks
        is_well, expected = _is(value, kind, name), _WORDS.get(kind, "")
    elif origin is Literal:
        is_well, expected = type(value) is str and value in members, " or ".join(map(repr, members))
    elif origin in (list, tuple):
        kinds = members if origin is tuple and ... not in members else None
        is_well, expected = type(value) is list and len(kinds or value) == len(value), "a list"
        if is_well:
            pairs = zip(value, kinds or members[:1] * len(value), strict=True)
            parts = {f"[{index}]": pair for index, pair in enumerate(pairs)}
    else:
        is_well, expected = type(value) is dict, _WORDS[dict]
        if is_well and origin is dict:
            parts = {f".{key}": (item, members[1]) for key, item in value.items()}
        elif is_well:
            fields = kind if isinstance(kind, dict) else typing.get_type_hints(kind)
            for key, part in fields.items():
                is_optional = isinstance(part, Maybe)
                if key in value:
                    parts[f".{key}"] = value[key], part.kind if is_optional else part
                elif not is_optional:
                    return f"{name}.{key}: missing"
    if not is_well:
        return f"{name}: have {repr(value)[:60]}, expected {expected}"
    faults = (fault(item, part, f"{name}{key}") for key, (item, part) in parts.items())
    return next(filter(None, faults), "")


def _is(value: Any, kind: Any, name: str) -> bool:
    if kind in (int, Size):
        return type(value) is int and int(kind is Size) <= value < 2**63
    if kind is float:  # an integer may be too large for one
        limit = _MOST_SECONDS if name.endswith(("_s", ".seconds")) else 2**1023
        return type(value) in (int, float) and abs(value) < limit
    return kind is Any or type(value) is kind
