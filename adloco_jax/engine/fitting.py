"""What fits the devices for the configured model: mode, micro-batch, and type of frozen weights.

A mode says whether workers run at once or in turn, and whether the backward pass recomputes layers.
Frozen weights are those of a model that is trained only by an adapter.
"""

from adloco_jax.engine.memory import Choice, choose, modes, require_room
from adloco_jax.engine.model import configured_model, program_spec
from adloco_jax.engine.spec import Machine, OnCompile
from adloco_jax.errors import ResourceError
from adloco_jax.settings import Settings


def configured_choice(
    settings: Settings, machine: Machine, on_compile: OnCompile = lambda event: None
) -> Choice:
    """Choose the mode and the micro-batch for the configured model, by compiling its programs.

    An unset `model.base_dtype` counts as bfloat16. `on_compile` is called before and after each
    compilation. Returns the compiled programs in that mode, with the largest micro-batch and the
    memory that was measured. Raises NothingFits if the least micro-batch fits in no mode.
    """
    model = configured_model(settings, machine)
    spec = program_spec(settings, model, machine)
    return choose(
        spec,
        model.loss_of,
        settings.ensemble,
        settings.batching,
        settings.switch,
        allowed=modes(settings.model.remat, machine.platform),
        size=settings.batching.max_batch_size,  # None: to be found
        on_compile=on_compile,
    )


def base_dtype_is_open(settings: Settings) -> bool:
    """Return whether `model.base_dtype`, the type of frozen weights, is still to be chosen."""
    return settings.adapter.rank > 0 and settings.model.base_dtype is None


def fitting_choice(
    settings: Settings, machine: Machine, on_compile: OnCompile = lambda event: None
) -> tuple[Settings, Choice]:
    """Choose the mode and the micro-batch, after finding `model.base_dtype` if it is unset.

    It becomes bfloat16 if the run then fits, else nf4. Returns settings in which it is set, and the
    choice for them. Raises NothingFits if the run does not fit with either.
    """
    if not base_dtype_is_open(settings):
        return settings, configured_choice(settings, machine, on_compile)
    wide = _with_base_dtype(settings, "bfloat16")
    try:
        # On a CPU `configured_choice` may compile nothing, and would not see that the state has no
        # room.
        spec = program_spec(wide, configured_model(wide, machine), machine)
        sizes = wide.ensemble.sizes(whole_pool=True)
        require_room(spec, sizes, wide.batching.memory_frac)
        return wide, configured_choice(wide, machine, on_compile)
    except ResourceError:  # from `require_room`, or NothingFits
        narrow = _with_base_dtype(settings, "nf4")
        return narrow, configured_choice(narrow, machine, on_compile)


def _with_base_dtype(settings: Settings, dtype: str) -> Settings:
    """Return settings in which `model.base_dtype` is set."""
    model = settings.model.model_copy(update={"base_dtype": dtype})
    return settings.model_copy(update={"model": model})


def base_dtype_line(settings: Settings) -> str:
    """Return a line for the user: which `model.base_dtype` was found, and why."""
    if settings.model.base_dtype == "nf4":
        return "found: model.base_dtype=nf4, because bfloat16 does not fit by the plan"
    return "found: model.base_dtype=bfloat16, which fits by the plan"
