"""How a knob is declared: its type with the allowed values, its default, meaning and resume rule.

This module does not import JAX: a knob has the name of its table, and the table is read when a
config is validated.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args

Change = Literal["harmless", "accepted", "refused"]

# The annotation of a type contains the allowed interval. Counts are int32 on a device.
Count: TypeAlias = Annotated[int, "[1, 2147483647]"]
Number: TypeAlias = Annotated[int, "[0, 2147483647]"]
Several: TypeAlias = Annotated[int, "[2, 2147483647]"]
Rate: TypeAlias = Annotated[float, "(0, 100]"]
Decay: TypeAlias = Annotated[float, "[0, 1)"]
Part: TypeAlias = Annotated[float, "(0, 1)"]
PartOrAll: TypeAlias = Annotated[float, "(0, 1]"]
Weight: TypeAlias = Annotated[float, "[0, 100]"]
Amount: TypeAlias = Annotated[float, "[0, 1e9]"]
Positive: TypeAlias = Annotated[float, "(0, 1e9]"]
Name: TypeAlias = Annotated[str, "not empty"]


@dataclasses.dataclass(frozen=True)
class Knob:
    """The declaration of a knob, which is one setting of a run.

    Attributes:
      default: The value of the knob in `default_config()`. For an optional knob it is the way to
        write that the knob is unset.
      doc: The meaning of the knob, with unit and source.
      table: Empty, or the name of a public table, such as "BATCH_TESTS", followed by the table's
        shipped entries. The value of the knob is then the name of an entry.
      resume: Whether the knob may change when a run is resumed: "harmless" (yes), "accepted" (with
        the flag --accept-config-change) or "refused". If it is empty in a declaration, the rule of
        the knob's group applies.
      size: For a knob that is a size of the model: the value if neither the config nor a checkpoint
        sets it.
      type: The annotation of the knob.
    """

    default: Any
    doc: str
    table: tuple[str, ...] = ()
    resume: Change | Literal[""] = ""
    size: Any = None
    type: Any = None

    @property
    def is_optional(self) -> bool:
        """Whether the knob may be unset; in `Settings` it is then None, or a size of the model."""
        return NoneType in get_args(self.type) or self.size is not None

    @property
    def kind(self) -> Any:
        """The type of the knob's value if the knob is set."""
        return get_args(self.type)[0] if NoneType in get_args(self.type) else self.type

    def entries(self) -> Mapping[str, Any]:
        """The present entries of the knob's table, including those that a config file has added."""
        return getattr(importlib.import_module("adloco_jax"), self.table[0])


def knob(default: object, doc: str, **more: Any) -> Any:
    """Declare a knob as a field of its group, with the attributes of `Knob`."""
    return dataclasses.field(metadata={"knob": Knob(default, doc, **more)})


# Declare knobs whose resume rule differs from their group's rule.
harmless = functools.partial(knob, resume="harmless")
accepted = functools.partial(knob, resume="accepted")
refused = functools.partial(knob, resume="refused")


def size(value: float, doc: str) -> Any:
    """Declare a knob for a size of the model; if unset, the size comes from `model.init_from`."""
    return knob(None, f"{doc} Unset: read from the checkpoint, else {value}.", size=value)


def group(resume: Change) -> Any:
    """Declare a group of knobs; a knob without a resume rule has the resume rule of the group."""
    return dataclasses.field(metadata={"resume": resume})


def declared(group: Any, prefix: str = "", resume: str = "") -> dict[str, Knob]:
    """The knobs of a group and of the groups in it, by full key such as `inner.tx`."""
    knobs = {}
    for field in dataclasses.fields(group):
        if knob := field.metadata.get("knob"):
            more = {"type": field.type, "resume": knob.resume or resume}
            knobs[prefix + field.name] = dataclasses.replace(knob, **more)
        else:
            knobs |= declared(field.type, f"{field.name}.", field.metadata["resume"])
    return knobs
