"""How a knob, one setting of a run, is declared: type, default, meaning and resume rule.

The type includes the allowed values. The resume rule says whether the knob may change when a run is
resumed. A knob whose values are entries of a public table has only the table's name, and the table
is read when a config is validated. So this module does not import JAX.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args

Change = Literal["harmless", "accepted", "refused"]

# The annotation of a type is the interval of its allowed values. Counts have to fit into int32,
# because devices store them so.
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
      default: The value of the knob in `default_config()`. For an optional knob this is None, or
        another value that means "unset", such as "auto".
      doc: The meaning of the knob, with unit and source.
      table: Empty, or the name of a public table, such as "BATCH_TESTS", followed by the names of
        the entries that come with the package. If it is not empty, the value of the knob is the
        name of an entry.
      resume: Whether the knob may change when a run is resumed: "harmless" (yes), "accepted" (with
        the flag --accept-config-change) or "refused". Empty: the rule of the knob's group applies.
      size: For a knob that is a size of the model, the value that applies if neither the config nor
        a checkpoint sets one. None for all other knobs.
      type: The annotation of the knob: its type with the allowed values.
    """

    default: Any
    doc: str
    table: tuple[str, ...] = ()
    resume: Change | Literal[""] = ""
    size: Any = None
    type: Any = None

    @property
    def is_optional(self) -> bool:
        """Whether the knob may be unset.

        An unset knob is None in `Settings`, except for a size of the model: `Settings` then has the
        size from the checkpoint, or else the default size.
        """
        return NoneType in get_args(self.type) or self.size is not None

    @property
    def kind(self) -> Any:
        """The type of the knob's value when the knob is set."""
        return get_args(self.type)[0] if NoneType in get_args(self.type) else self.type

    def entries(self) -> Mapping[str, Any]:
        """Return the entries of the knob's table, including those that a config file has added."""
        return getattr(importlib.import_module("adloco_jax"), self.table[0])


def knob(default: object, doc: str, **more: Any) -> Any:
    """Declare a knob as a field of its group.

    `more` are further attributes of `Knob`: `table`, `resume` or `size`.
    """
    return dataclasses.field(metadata={"knob": Knob(default, doc, **more)})


# These declare a knob whose resume rule differs from the rule of its group.
harmless = functools.partial(knob, resume="harmless")
accepted = functools.partial(knob, resume="accepted")
refused = functools.partial(knob, resume="refused")


def size(value: float, doc: str) -> Any:
    """Declare a knob for a size of the model, which need not be set.

    If it is unset, the size comes from the checkpoint `model.init_from`, or else is `value`.
    """
    return knob(None, f"{doc} Unset: read from the checkpoint, else {value}.", size=value)


def group(resume: Change) -> Any:
    """Declare a group of knobs as a field of `Settings`.

    `resume` is the resume rule of those knobs in the group that declare none.
    """
    return dataclasses.field(metadata={"resume": resume})


def declared(group: Any, prefix: str = "", resume: str = "") -> dict[str, Knob]:
    """Return the knobs of a group and of the groups in it, by full key such as `inner.tx`.

    The resume rule and the type of each knob are filled in.
    """
    knobs = {}
    for field in dataclasses.fields(group):
        if knob := field.metadata.get("knob"):
            more = {"type": field.type, "resume": knob.resume or resume}
            knobs[prefix + field.name] = dataclasses.replace(knob, **more)
        elif field.metadata:
            knobs |= declared(field.type, f"{field.name}.", field.metadata["resume"])
    return knobs
