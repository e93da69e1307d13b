"""What compilation needs: the data that all programs of a run share, and each program's key.

Letters in shapes: M trainers, R workers, B sequences of a micro-batch, L tokens of a sequence, S
micro-batches of a round, F fragments (parts of the parameters that Streaming DiLoCo synchronises
one after another).
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from adloco_jax.contrib.streaming import take_fragment
from adloco_jax.core.compress import packed_bytes
from adloco_jax.core.gradstats import Estimator, resolve_estimator
from adloco_jax.core.outer import Aggregator, mean
from adloco_jax.core.types import LossFn, trainable
from adloco_jax.loop.adloco import StateBytes
from adloco_jax.models.quantised import is_quantised
from adloco_jax.settings import OuterSettings

Kernel = Literal["xla", "cudnn"]  # of attention
Kind = Literal["start", "steps", "outer", "fragment", "stats", "loss", "flush"]


class Layout(NamedTuple):
    """What decides where arrays are: workers, the batch that they share, and devices."""

    sizes: tuple[int, ...] = (1,)  # workers of each trainer
    batch_size: int = 1  # sequences of a micro-batch, over which devices that are left are divided
    devices: tuple[int, int] | None = None  # first device and number of devices; None: all


class ProgramKey(NamedTuple):
    """Identifies a compiled program of a run: by its kind, and by the sizes it is compiled for."""

    kind: Kind
    sizes: tuple[int, ...] = (1,)  # workers of each trainer; one trainer if it does not matter
    micro_batch_size: int = 0
    accumulates: bool = False
    devices: tuple[int, int] | None = None  # first device and number of devices; None: all

    @property
    def layout(self) -> Layout:
        """Where the program's arrays are."""
        return Layout(self.sizes, max(self.micro_batch_size, 1), self.devices)

    def __str__(self) -> str:
        """Write the key as in ledgers: M trainers, R workers, micro-batches of B sequences."""
        shape = f"{self.kind} M={len(self.sizes)} R={sum(self.sizes)} B={self.micro_batch_size}"
        if len(set(self.sizes)) > 1:
            shape += f" workers={','.join(map(str, self.sizes))}"
        if self.accumulates:
            shape += " accumulating"
        if self.devices is not None:
            first, count = self.devices
            shape += f" devices={first}-{first + count - 1}"
        return shape


class Compiling(NamedTuple):
    """The beginning of a compilation: it is the `number`-th, and `of` are known to be needed."""

    number: int
    of: int


class Compiled(NamedTuple):
    """What is known about one compilation; a `compile` line of the ledger."""

    key: ProgramKey
    seconds: float
    hit: bool  # whether the program came from the persistent cache
    background: bool  # whether it was compiled in the background
    needed_bytes: int | None  # memory of a device while it runs; None: the compiler does not say


OnCompile = Callable[[Compiling | Compiled], None]
"""Called before and after a compilation, in the thread that compiles."""


@dataclass(frozen=True)
class Machine:
    """The devices for which a run is planned and compiled; the devices need not exist."""

    devices: tuple[jax.Device, ...]  # devices of all processes
    device_bytes: int  # memory of one device; a CPU device has its share of the RAM

    @property
    def platform(self) -> str:
        """Platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    @property
    def local_devices(self) -> list[jax.Device]:
        """The devices of the machine that belong to this process."""
        return [d for d in self.devices if d.process_index == d.client.process_index()]

    @property
    def num_processes(self) -> int:
        """Number of processes to which the devices belong."""
        return len({device.process_index for device in self.devices})

    def describe(self) -> str:
        """Describe the devices as text: their number, their kind, and the number of processes."""
        text = f"{len(self.devices)} x {self.devices[0].device_kind}"
        if self.num_processes > 1:
            text += f" in {self.num_processes} processes"
        return text

    def budget(self, memory_frac: float | None) -> int:
        """Bytes of a device's memory that a run may use.

        `memory_frac` is the fraction of all of it; None: 0.8 on a CPU, else 0.92.
        """
        if memory_frac is None:  # a CPU's memory also holds the host's data and other programs
            memory_frac = 0.8 if self.platform == "cpu" else 0.92
        return int(memory_frac * self.device_bytes)


# The share of a GPU's memory that the commands let JAX reserve; XLA plans programs for it.
TAKEN = 0.95


def this_machine() -> Machine:
    """Return the machine of this run: the devices of all its processes, with their memory."""
    local = jax.local_devices()
    stats = local[0].memory_stats() or {}  # None on a CPU
    limit = stats.get("bytes_limit")
    if limit is None:  # a CPU, whose emulated devices share the RAM
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    elif local[0].platform == "gpu":
        # The limit is what JAX has reserved: the share TAKEN, unless the user chose another.
        limit = int(limit / TAKEN)
    return Machine(tuple(jax.devices()), limit)


@dataclass(frozen=True)
class ProgramSpec:
    """What all compiled programs of a run share: devices, loss, parameter shapes, optimizers."""

    machine: Machine
    loss_fn: LossFn
    params: PyTree  # shapes and dtypes of one model's parameters
    inner_tx: optax.GradientTransformation
    outer_tx: optax.GradientTransformation
    outer: OuterSettings  # schedule, delay and precision of synchronisations
    num_micro_batches: int  # micro-batches per call of `steps`: S, or S / F with F fragments
    row: PyTree  # shapes and dtypes of a row: int32 [L + 1], [2 + L] with a label, or a RowBatch
    sequence_length: int  # L
    max_test_sequences: int  # most sequences that a batch-size test measures for one worker
    inner_products: bool
    reset_inner_state: bool
    model_shards: int = 1  # devices that share one worker's parameters
    aggregate: Aggregator = mean  # aggregates the differences of a trainer's workers
    eval_loss_fn: LossFn | None = None  # for held-out losses; None: `loss_fn`, without a key
    key_seed: int | None = None  # seed for a loss that takes `key`; None: the loss takes none
    remat: bool = False  # whether layers are recomputed in the backward pass
    sequential: bool = False  # whether a device's workers run their rounds one after another
    examples_per_pass: int | None = None  # see `inner_steps`; ignored if devices share a batch
    loss_chunk: int = 0  # rows whose held-out losses a device computes at once; 0: all of a call
    attention: Kernel = "xla"  # kernel of the model's attention
    base: PyTree | None = None  # shapes and dtypes of frozen weights, which the loss gets as `base`

    @property
    def estimator(self) -> Estimator:
        """How per-example gradients are measured: "taps" if the loss has them, else "vmap"."""
        return resolve_estimator("auto", self.loss_fn)

    @property
    def steps_per_round(self) -> int:
        """S, the micro-batches of a round without accumulation."""
        return self.num_micro_batches * self.outer.fragments

    @property
    def param_bytes(self) -> int:
        """Bytes of one trainer's parameters."""
        return num_bytes(self.params)

    @property
    def sync_bytes(self) -> int:
        """Bytes that one worker sends, and receives, in a synchronisation (of one fragment)."""

        def first_fragment(params: PyTree) -> PyTree:
            """Return the first fragment of one model's parameters; all have about its size."""
            stacked = jax.tree.map(lambda leaf: leaf[None], params)  # as of one trainer [1, ...]
            part = take_fragment(stacked, 0, num_fragments=self.outer.fragments)
            return jax.tree.map(lambda leaf: leaf[0], part)

        return packed_bytes(jax.eval_shape(first_fragment, self.params), self.outer.precision)

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of a trainer's parameters and optimizer states that merges and joins send."""
        # An inner state that is reset in every round need not be sent to a worker that joins.
        inner_bytes = 0 if self.reset_inner_state else _sent_bytes(self.inner_tx, self.params)
        average_bytes = self.param_bytes if self.outer.average else 0
        outer_bytes = _sent_bytes(self.outer_tx, self.params) + average_bytes
        return StateBytes(params=self.param_bytes, outer_state=outer_bytes, inner_state=inner_bytes)

    @property
    def num_params(self) -> int:
        """Number of parameters of one trainer."""
        return num_values(self.params)


def num_values(tree: PyTree) -> int:
    """Count the numbers in all arrays of a tree, of quantised ones without scales."""
    leaves = jax.tree.leaves(tree, is_leaf=is_quantised)
    return sum(math.prod(leaf.shape) for leaf in leaves)


def num_bytes(tree: PyTree) -> int:
    """Bytes that all arrays of a tree take together; shapes with dtypes may stand for arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _sent_bytes(tx: optax.GradientTransformation, params: PyTree) -> int:
    """Bytes that must be sent to copy an optimizer's state to another trainer or worker.

    `params` may be shapes. Only floating-point arrays are sent: counts of updates are equal there.
    """
    state = jax.eval_shape(tx.init, trainable(params))
    leaves = jax.tree.leaves(state)
    return num_bytes([leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)])
