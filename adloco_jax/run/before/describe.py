"""Describe a run in words without compiling it: its header, its communication and its tokens.

A trainer is a model in training; its workers train copies of it, and a synchronisation brings these
together. With Streaming DiLoCo it sends one fragment, a part of the parameters. A batch is what a
worker uses for an update; a part of it that a device takes at once is a micro-batch, and the batch
is accumulated from several. An adapter is small matrices that are trained beside frozen weights.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from adloco_jax.core.batching import BATCH_TESTS
from adloco_jax.engine.sharding import ensemble_spec, placement
from adloco_jax.engine.spec import Layout, ProgramSpec, num_bytes, num_values
from adloco_jax.errors import counted, in_bytes
from adloco_jax.loop.control import merge_cost, sync_cost
from adloco_jax.loop.growth import measures_gradients
from adloco_jax.settings import (
    BatchingSettings,
    EnsembleSettings,
    InnerSettings,
    Settings,
)

_MANY_PASSES = 10  # above, passes over the rows have a line of their own
_FEW_HELDOUT = 16  # below, held-out rows have a line of their own
_FEW_UPDATES = 10  # below, a run has a warning
ALMOST_ALL = 0.9  # the share of the rows above which a run needs no advice to read the rest


def run_header(
    settings: Settings, spec: ProgramSpec, max_batch: int | None, own: Sequence[str] = ()
) -> list[str]:
    """Describe model, trainers, batches and fragments in at most four lines.

    Args:
      settings: The complete settings of the run.
      spec: What its compiled programs share.
      max_batch: The largest micro-batch, in sequences; None: not known yet.
      own: What the caller of `fit` gave: some of "model", "rows", "inner_tx" and "outer_tx".
    """
    model = settings.model
    ensemble = settings.ensemble
    inner = settings.inner
    outer = settings.outer
    batching = settings.batching
    first_sizes = ensemble.sizes()  # workers of each trainer in the first round

    # The model: where its weights are from, and how it runs.
    if "model" in own:
        weights = "own model"
    elif model.init_from:
        weights = f"from {model.init_from}"
    else:
        weights = "from random weights"
    if spec.base is not None:  # frozen weights, beside which an adapter is trained
        held = model.base_dtype or "bfloat16 if they fit, else nf4"  # unset until that is known
        beside = f"{num_values(spec.base):,} frozen ones ({held}) {weights}"
        sent = in_bytes(spec.sync_bytes * outer.fragments)  # `sync_bytes` are of one fragment
        weights = f"an adapter of rank {settings.adapter.rank} beside {beside}"
        weights += f"; a worker sends {sent} a round"
    attention = f"attention by {spec.attention}"
    if settings.data.separates_documents:
        attention += " within documents"
    # How workers, batches and parameters are divided among the devices in the first round.
    division = placement(spec, Layout(first_sizes, batching.initial_batch_size))
    model_line = (
        f"model: {spec.num_params:,} parameters ({in_bytes(spec.param_bytes)}), {weights};"
        f" {model.dtype}, {attention}; {spec.machine.describe()}, {division.describe()}"
    )

    # The trainers: their workers, the length of the run and of a round, the optimizers.
    workers = sum(first_sizes)
    pool = f"{ensemble.num_trainers} with {counted(workers, 'worker')} together"
    if ensemble.num_workers > workers:
        pool += f", and {ensemble.num_workers - workers} more when gradient noise asks for them"
    ends = _end_in_words(settings.last_round, settings.num_tokens, settings.num_epochs)
    steps = counted(inner.steps_per_round, "update")
    if inner.round_length != "fixed":
        steps += f" or more ({inner.round_length})"
    inner_tx = "own optimizer" if "inner_tx" in own else inner.tx
    outer_tx = "own optimizer" if "outer_tx" in own else outer.tx
    trainers_line = (
        f"trainers: {pool}; {ends} of {steps} ({inner_tx}) and a synchronisation ({outer_tx})"
    )

    # The batches: the first, how they grow, and the largest micro-batch.
    batch = counted(batching.initial_batch_size, "sequence")
    if "rows" in own:
        batch += " of own rows"
    growth = _growth_in_words(batching, ensemble, inner)
    sizes = f"up to {max_batch}" if max_batch else "as many as fit"
    batches_line = (
        f"batches: {batch} per worker and update, {growth}; {sizes} at once, more by accumulation"
    )
    return [model_line, trainers_line, batches_line, *_fragment_lines(spec)]


def label_lines(tx: str, labels: Mapping[str, str]) -> list[str]:
    """Say in a line which parameters have which label; no line without labels.

    `tx` is the inner optimizer's name, and `labels` has the label of each parameter, such as
    "matrix", by its name. Numbers in names, as of layers, become `*`. With muon the line says which
    of its two optimizers a parameter gets.
    """
    if not labels:
        return []
    names_by_label: dict[str, list[str]] = {}
    for name, label in labels.items():
        if tx == "muon" and label.endswith("matrix"):  # those of hidden layers
            label = "muon"
        elif tx == "muon":
            label = f"adamw ({label})"
        pattern = re.sub(r"\d+", "*", name)
        patterns = names_by_label.setdefault(label, [])
        if pattern not in patterns:
            patterns.append(pattern)
    each = [f"{label}: {', '.join(names)}" for label, names in names_by_label.items()]
    return ["; ".join(["parameters by label", *each])]


def _end_in_words(last_round: float, tokens: int | None, epochs: float | None) -> str:
    """Say when a run ends: "3 rounds", or such as "until 5,000 tokens or round 3, rounds".

    Words on the length of a round follow: " of 200 updates". `last_round` is infinite without a
    last round; `tokens` and `epochs` are None if they do not end the run.
    """
    ends = []
    if tokens:
        ends.append(f"{tokens:,} tokens")
    if epochs:
        passes = "pass" if epochs == 1 else "passes"
        ends.append(f"{epochs:g} {passes} over the rows")
    if not ends:
        return counted(int(last_round), "round")
    if math.isfinite(last_round):
        ends.append(f"round {last_round}")
    return f"until {' or '.join(ends)}, rounds"


def length_lines(settings: Settings, tokens_per_s: float, num_heldout: int | None) -> list[str]:
    """Describe how often a run reads its rows, and how long it takes at least.

    `tokens_per_s` is the speed at the peak of the devices, NaN if it is not known; `num_heldout`
    the number of rows of the reported loss, None if it is not known. A run with too few updates,
    with rows that are read too often, or with too few held-out rows has a line more for each.
    """
    # Tokens until the run ends, if its rounds stay as the first; infinite if nothing ends it.
    tokens = min(settings.last_round * settings.round_tokens, settings.last_token)
    inner = settings.inner
    # Whether later rounds may have more tokens than the first.
    rounds_grow = (
        settings.batching.test != "constant"
        or inner.round_length != "fixed"
        or settings.ensemble.initial_workers is not None
    )
    read = tokens / settings.data.sequence_length  # rows that are read, again or not
    lines = []
    passes = 0.0  # over the rows; 0: their number is not known
    if settings.num_rows:
        passes = read / settings.num_rows
    if math.isfinite(tokens):
        line = "length: "
        if rounds_grow and tokens < settings.last_token:
            line += "at least "
        line += f"{read:,.0f} rows"
        if passes:
            shown = f"{passes:,.0f}" if passes >= _MANY_PASSES else f"{passes:.2g}"
            noun = "pass" if shown == "1" else "passes"
            line += f", {shown} {noun} over the {settings.num_rows:,} to train on"
        if tokens / tokens_per_s >= 1:  # false of NaN, if the speed is not known
            least = timedelta(seconds=round(tokens / tokens_per_s))
            line += f"; at least {least}, at the peak of the devices"
        lines.append(line)
        # One after another: rounds, times the updates of each.
        updates = math.ceil(tokens / settings.round_tokens * inner.steps_per_round)
        if updates < _FEW_UPDATES:
            lines.append(
                f"warning: {counted(updates, 'update')} in all, which change little; set a larger"
                " num_epochs or num_rounds, or a smaller batching.initial_batch_size"
            )
    if passes > _MANY_PASSES:
        lines.append(
            f"note: each row is read {passes:,.0f} times; num_epochs=1 reads it once (or give more"
            " text, or fewer rounds)"
        )
    if num_heldout is not None and num_heldout < _FEW_HELDOUT:
        lines.append(
            f"note: the held-out loss is of {counted(num_heldout, 'row')} only; hold out more"
            " (data.heldout_frac, data.heldout_path)"
        )
    return lines


def longer_lines(settings: Settings) -> list[str]:
    """Say in a line which options make a new run read all rows; no line if this one almost does."""
    # Tokens until the run ends, if its rounds stay as the first.
    tokens = min(settings.last_round * settings.round_tokens, settings.last_token)
    share = share_read(settings, tokens)  # infinite if the number of rows is not known
    if share > ALMOST_ALL:
        return []
    options = ""
    for key in ("num_rounds", "num_tokens"):  # set, they would end the run before
        if getattr(settings, key):
            options += f"--config.{key}=none "
    options += "--config.num_epochs=1"
    return [
        f"note: about {share:.0%} of the rows are read; to read each once: {options} (or"
        " --config.num_tokens=N in place of num_epochs)"
    ]


def share_read(settings: Settings, tokens: float) -> float:
    """Return which share of its rows a run of some tokens reads; infinity if they are not known."""
    if not settings.num_rows:
        return math.inf
    return tokens / (settings.num_rows * settings.data.sequence_length)


def _growth_in_words(
    batching: BatchingSettings, ensemble: EnsembleSettings, inner: InnerSettings
) -> str:
    """Say how the batch changes from round to round, as the end of a sentence about it.

    A test (`batching.test`) decides about it after each round: "constant" keeps it, a schedule
    declares it, and the others request a batch from measured gradients. For instance "in all
    rounds", or "raised by gradient noise (norm test, eta 0.8) up to 64".
    """
    if batching.test == "constant":
        return "in all rounds"
    if not measures_gradients(batching):  # a schedule, such as the pairs of `batching.ramp`
        return f"then by batching.test={batching.test} {batching.ramp or ''}".rstrip()
    test = f"{batching.test} test"
    # The names of the arguments of a test's function, among them the options that it uses.
    used = inspect.signature(BATCH_TESTS[batching.test].request).parameters
    for name in ("eta", "vartheta", "nu"):  # the numeric options of tests that measure gradients
        if name in used:
            test += f", {name} {getattr(batching, name)}"
    if "batch" in batching.growth and batching.batch_cap > batching.initial_batch_size:
        return f"raised by gradient noise ({test}) up to {batching.batch_cap}"
    # Workers and rounds grow only if these options are set.
    limits = {"workers": ensemble.initial_workers, "rounds": inner.max_steps_per_round}
    others = " and ".join(name for name in batching.growth if limits.get(name))
    if others:
        return f"kept; gradient noise ({test}) decides about {others}"
    return f"kept; gradient noise ({test}) is measured"


def _fragment_lines(spec: ProgramSpec) -> list[str]:
    """Describe the fragments of Streaming DiLoCo in a line; no line without them."""
    outer = spec.outer
    if not outer.own_params:  # workers keep parameters of their own only in Streaming DiLoCo
        return []
    delay = outer.delay_updates
    arrival = "is waited for"
    if delay:
        arrival = f"arrives {counted(delay, 'update')} later"
    # `num_micro_batches`: from one fragment's synchronisation to the next one's.
    return [
        f"fragments: {outer.fragments}, one every {counted(spec.num_micro_batches, 'update')},"
        f" which {arrival}; a worker keeps {outer.mixing:g} of its own numbers;"
        f" {in_bytes(spec.sync_bytes)} each way"
    ]


def plan_lines(settings: Settings, spec: ProgramSpec) -> list[str]:
    """Describe a run's state, communication and tokens, without compiling anything."""
    ensemble = settings.ensemble
    fragments = spec.outer.fragments
    # What the workers of each trainer send in the first round: it synchronises each fragment once.
    costs = [sync_cost(workers, spec.sync_bytes, fragments) for workers in ensemble.sizes()]
    moved = sum(cost["bytes"] for cost in costs)
    syncs = sum(cost["syncs"] for cost in costs)
    # Parameters and optimizer states, once all workers have joined.
    state = num_bytes(ensemble_spec(spec, Layout(ensemble.sizes(whole_pool=True))))
    # What is sent for a worker that joins a trainer, and for a trainer that another absorbs.
    joining = in_bytes(merge_cost(spec.state_bytes, num_joining=1)["bytes"])
    absorbed = in_bytes(merge_cost(spec.state_bytes, num_absorbed=1)["bytes"])
    lines = [
        *run_header(settings, spec, settings.batching.max_batch_size),
        f"state between rounds: {in_bytes(state)} for"
        f" {counted(ensemble.num_trainers, 'trainer')}, {counted(ensemble.num_workers, 'worker')}",
        f"bytes per round at the start: {in_bytes(moved)} in {syncs} synchronisations"
        f" ({settings.outer.precision}); tokens: {settings.round_tokens:,}",
    ]
    if ensemble.initial_workers is not None:
        lines.append(f"the pool grows: {joining} for each worker that joins")
    if settings.merge.policy != "none" and ensemble.num_trainers > 1:
        lines.append(
            f"bytes of a merge: {absorbed} for each absorbed trainer, {joining} for each worker"
            " that joins a trainer"
        )
    return lines
