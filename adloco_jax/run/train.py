"""A whole run: data, rounds, statistics, batch plans, merges, evaluation, ledger.

`train` is the run a config describes; `fit` is the same loop for a model and data of one's own. The
devices are kept busy: the batch-size test and the round are dispatched first, and the host decides
the next round's batches and prepares its data while they run.
"""

import dataclasses
import datetime
import functools
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax.core.base import Ensemble, GradientStats, LossFn
from adloco_jax.core.ensemble import init, put, reassign, take
from adloco_jax.core.merge import merge
from adloco_jax.data import load_corpus
from adloco_jax.errors import ConfigError, DivergedError
from adloco_jax.run import controller as control
from adloco_jax.run import evaluate
from adloco_jax.run.build import InitFn, build_model, program_spec
from adloco_jax.run.config import Settings, validate
from adloco_jax.run.controller import Controller, Decision, Group, Merge
from adloco_jax.run.ledger import Ledger
from adloco_jax.run.plan import corpus_header, devices, run_header
from adloco_jax.run.programs import (
    Key,
    Programs,
    Spec,
    buffers_spec,
    ensemble_shardings,
    round_shardings,
    worker_mesh,
)
from adloco_jax.run.progress import Progress


class Rows(Protocol):
    """What `fit` needs of a corpus; `adloco_jax.data.Corpus` is one."""

    @property
    def heldout_rows(self) -> np.ndarray:
        """Int [E, L + 1]; no training row shares a document with them."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the content that decides the rows."""
        ...

    @property
    def tokens_per_byte(self) -> float | None:
        """Of the held-out text, where tokens are text."""
        ...

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count` of a stream: int32 [count, L + 1]."""
        ...


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    workdir: Path
    params: PyTree  # the consensus
    loss: float  # its held-out loss, nats/token
    ensemble: Ensemble
    controller: Controller


def train(config: ConfigDict, workdir: str | Path | None = None, *, command: str = "") -> Result:
    """Runs what a config describes, from text to a trained consensus.

    Args:
      config: From a file in `configs/`, or `default_config()` with changes.
      workdir: The run's folder, made if need be; None makes `runs/train-<date>-<time>`.
      command: Recorded in the ledger, for the report's caption.

    Returns:
      The consensus, its loss and the whole final state.

    Raises:
      ConfigError: If the config or the folder cannot be used; before anything is compiled or made.
      DataError: If the text or tokens cannot be used; likewise.
      DivergedError: If every trainer's loss has stopped being a number.
    """
    settings = validate(config)
    if workdir is None:
        workdir = Path("runs") / f"train-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    check_workdir(workdir)
    data = settings.data
    corpus = load_corpus(
        source=data.source,
        path=data.path,
        heldout_path=data.heldout_path,
        text_column=data.text_column,
        tokenizer=data.tokenizer,
        sequence_length=data.sequence_length,
        num_sequences=data.num_sequences,
        heldout_frac=data.heldout_frac,
        subset_frac=data.subset_frac,
        num_streams=settings.ensemble.num_workers,
        seed=settings.seed,
        vocab_size=settings.model.vocab_size,
    )
    print(corpus_header(corpus))
    init_fn, loss_fn = build_model(settings)
    return fit(
        settings, corpus=corpus, init_fn=init_fn, loss_fn=loss_fn, workdir=workdir, command=command
    )


def fit(
    settings: Settings,
    *,
    corpus: Rows,
    init_fn: InitFn,
    loss_fn: LossFn,
    workdir: str | Path,
    command: str = "",
) -> Result:
    """Runs AdLoCo on any model and rows of tokens.

    Args:
      settings: From `validate`; its `model` and `data` groups are only recorded.
      corpus: Rows to train on and to hold out.
      init_fn: Makes one trainer's parameters from a PRNG key.
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean over int32 rows [B, L + 1].
      workdir: The run's folder; it must not hold a run already.
      command: Recorded in the ledger.

    Returns:
      As `train`.

    Raises:
      ConfigError: If the folder holds a run or cannot be written.
      DivergedError: If every trainer's loss has stopped being a number.
    """
    check_workdir(workdir)
    spec = program_spec(settings, init_fn, loss_fn, row_length=corpus.heldout_rows.shape[1])
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with Ledger(workdir / "ledger.jsonl") as ledger:
        run = _Run(settings, spec, corpus, ledger)
        return run.execute(init_fn, workdir, command)


def check_workdir(workdir: str | Path) -> None:
    """Refuses a folder that holds a run, or that cannot be one.

    Raises:
      ConfigError: Saying which, and what to do.
    """
    folder = Path(workdir)
    if (folder / "ledger.jsonl").exists():
        raise ConfigError(f"--workdir {folder}: holds a run already; name another folder")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--workdir {folder}: {existing} is a file; name a folder")


class _Prepared(NamedTuple):
    """A round's plan with its data on the devices."""

    groups: list[Group]
    lines: list[dict]  # the round's ledger lines as far as the plan decides them
    tokens: list[list[Array]]  # by group, by dispatch: [S, R, B, L + 1]
    rates: list[list[np.ndarray]]  # likewise: [S, R]
    flags: list[list[np.ndarray]]  # likewise: [S]
    test_rows_RBL: Array | None
    test_counts_R: np.ndarray


class _Pending(NamedTuple):
    """A dispatched round whose results have not been read."""

    lines: list[dict]  # one ledger line per trainer, what the round measures still missing
    groups: list[Group]
    workers: list[list[int]]  # by trainer
    losses: list[list[Array]]  # by group, by dispatch: [S, R]
    norms: list[Array]  # by group: [M]
    start_s: float
    stall_s: float


@dataclass
class _Run:
    """One run's moving parts; `execute` reads top-down as the algorithm does."""

    settings: Settings
    spec: Spec
    corpus: Rows
    ledger: Ledger
    start_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        self.programs = Programs(self.spec, self._compiled)
        self.controller = control.start(self.settings)
        self.heldout = evaluate.split_heldout(
            self.corpus.heldout_rows,
            num_sequences=self.settings.eval.num_sequences,
            seed=self.settings.seed,
        )
        self.progress = Progress(self.settings.num_rounds, every=self.settings.log.every_rounds)
        self.last_end_s = time.perf_counter()
        self.loss = float("nan")

    def execute(self, init_fn: InitFn, workdir: Path, command: str) -> Result:
        self._write_start(workdir, command)
        for line in run_header(self.settings, self.spec):
            self.progress.note(line)
        self.ensemble = self._initial_ensemble(init_fn)
        prepared, pending, consensus = self._prepare(), None, None
        for _ in range(self.settings.num_rounds):
            stats_R, dispatched = self._dispatch(prepared)
            if pending:
                self._finish(pending)
            pending = dispatched._replace(lines=self._observe(stats_R, prepared))
            merge_now = control.due_merge(self.controller, self.settings)
            last = self.controller.round == self.settings.num_rounds
            if not merge_now and not last:
                prepared = self._prepare()
            if merge_now:
                self._finish(pending)
                pending = None
                self._merge(merge_now)
                if not last:
                    prepared = self._prepare()
            if last or self.controller.round % self.settings.eval.every_rounds == 0:
                if pending:
                    self._finish(pending)
                pending = None
                consensus = self._evaluate()
        self.progress.close()
        self._write_end()
        return Result(workdir, consensus, self.loss, self.ensemble, self.controller)

    # -- one round ---------------------------------------------------------------------------

    def _prepare(self) -> _Prepared:
        """Plans the next round and puts its sequences on the devices."""
        groups = control.plan_round(self.controller, self.settings)
        counts_R = np.zeros(len(self.controller.owners), np.int32)
        if control.measures_gradients(self.settings):
            counts_R = control.test_counts(self.controller, groups, self.settings)
        test_shape = (len(counts_R), self.spec.max_test_sequences, self.spec.row_length)
        test_rows_RBL = np.zeros(test_shape, np.int32)
        tokens, rates, flags = [], [], []
        for group in groups:
            rows_TRBL = self._sequences(group)
            for place, worker in enumerate(group.workers):
                flat = rows_TRBL[:, place].reshape(-1, self.spec.row_length)
                test_rows_RBL[worker, : counts_R[worker]] = flat[: counts_R[worker]]
            mesh = worker_mesh(len(group.workers), group.plan.micro_batch_size)
            place = round_shardings(mesh)["tokens_TRBL"]
            parts = range(0, group.num_micro_batches, self.spec.num_micro_batches)
            rate_TR = control.learning_rates(self.controller, group, self.settings)
            flag_T = control.update_flags(group)
            steps = self.spec.num_micro_batches
            tokens.append([jax.device_put(rows_TRBL[t : t + steps], place) for t in parts])
            rates.append([rate_TR[t : t + steps] for t in parts])
            flags.append([flag_T[t : t + steps] for t in parts])
        tested = None
        if counts_R.any():
            mesh = worker_mesh(len(counts_R), 1)
            tested = jax.device_put(test_rows_RBL, round_shardings(mesh)["worker"])
        lines = self._draft_lines(groups, rates)
        return _Prepared(groups, lines, tokens, rates, flags, tested, counts_R)

    def _draft_lines(self, groups: list[Group], rates: list[list[np.ndarray]]) -> list[dict]:
        """Per trainer, in stack order: what the plan already says of the round."""
        lines = {}
        for group, group_rates in zip(groups, rates, strict=True):
            for position in group.trainers:
                trainer, workers = (
                    self.controller.trainers[position],
                    self.controller.workers_of(position),
                )
                lines[position] = {
                    "round": self.controller.round + 1,
                    "trainer": trainer.id,
                    "workers": len(workers),
                    "requested_batch_size": trainer.requested_batch_size,
                    **group.plan._asdict(),
                    "learning_rate": float(group_rates[-1][-1, group.workers.index(workers[0])]),
                }
        return [lines[position] for position in sorted(lines)]

    def _sequences(self, group: Group) -> np.ndarray:
        """Int32 [T, R, B, L + 1]: what every worker of a group trains on, in its stream's order."""
        size = group.plan.micro_batch_size
        shape = (group.num_micro_batches, len(group.workers), size, self.spec.row_length)
        rows_TRBL = np.empty(shape, np.int32)
        for place, worker in enumerate(group.workers):
            trainer = self.controller.trainers[self.controller.owners[worker]]
            stream = self.controller.streams[worker]
            rows = self.corpus.batch(
                trainer.id, stream, trainer.cursors.get(str(stream), 0), len(rows_TRBL) * size
            )
            rows_TRBL[:, place] = rows.reshape(len(rows_TRBL), size, -1)
        return rows_TRBL

    def _dispatch(self, prepared: _Prepared) -> tuple[GradientStats | None, _Pending]:
        """Starts the test and then the round on the devices, without waiting for either."""
        stall_s = self.programs.stall_s
        start_s = time.perf_counter()
        stats_R = None
        if prepared.test_rows_RBL is not None:
            shape = (self.ensemble.num_trainers, self.ensemble.num_workers)
            arguments = (
                self.ensemble.params_M,
                self.ensemble.owner_R,
                prepared.test_rows_RBL,
                prepared.test_counts_R,
            )
            stats_R = self._call(Key("test", *shape), *arguments)
        losses, norms = [], []
        for i, group in enumerate(prepared.groups):
            parts = list(zip(prepared.tokens[i], prepared.rates[i], prepared.flags[i], strict=True))
            whole = len(group.trainers) == self.ensemble.num_trainers
            sub = self.ensemble if whole else _take(self.ensemble, group.trainers, group.workers)
            sub, group_losses, norm_M = self._run_group(group, sub, parts)
            self.ensemble = (
                sub if whole else _put(self.ensemble, sub, group.trainers, group.workers)
            )
            losses.append(group_losses)
            norms.append(norm_M)
        stall_s = self.programs.stall_s - stall_s
        workers = [self.controller.workers_of(m) for m in range(self.ensemble.num_trainers)]
        pending = _Pending([], prepared.groups, workers, losses, norms, start_s, stall_s)
        return stats_R, pending

    def _run_group(self, group: Group, sub: Ensemble, parts: list) -> tuple:
        shape = (len(group.trainers), len(group.workers), group.plan.micro_batch_size)
        if group.plan.num_accum_steps == 1:
            ((tokens, rate_TR, _),) = parts
            sub, loss_TR, norm_M = self._call(Key("round", *shape), sub, tokens, rate_TR)
            return sub, [loss_TR], norm_M
        mesh = worker_mesh(shape[1], shape[2])
        buffers = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            buffers_spec(self.spec, shape[1], mesh),
        )
        losses, norm_M = [], None
        for i, (tokens, rate_TR, flag_T) in enumerate(parts):
            ends = (np.bool_(i == 0), np.bool_(i == len(parts) - 1))
            sub, buffers, loss_TR, norm_M = self._call(
                Key("accumulate", *shape), sub, buffers, tokens, rate_TR, flag_T, *ends
            )
            losses.append(loss_TR)
        return sub, losses, norm_M

    def _call(self, key: Key, *arguments):
        """Runs a program with its arguments moved to where it wants them."""
        program = self.programs[key]
        return program(*jax.device_put(arguments, program.input_shardings[0]))

    def _observe(self, stats_R: GradientStats | None, prepared: _Prepared) -> list[dict]:
        """Reads the test, sets the next batches, counts the round; returns its drafted lines."""
        if stats_R is not None:
            stats_R = jax.tree.map(np.float64, jax.device_get(stats_R))
        decisions = control.observe(self.controller, self.settings, stats_R, prepared.test_counts_R)
        spent = control.advance(
            self.controller,
            prepared.groups,
            sequence_length=self.spec.row_length - 1,
            param_bytes=self.spec.param_bytes,
        )
        for line, decision in zip(prepared.lines, decisions, strict=True):
            if decision.next_batch_size != line["requested_batch_size"]:
                self.progress.note(_batch_note(line, decision))
        return [
            line | cost | decision._asdict()
            for line, cost, decision in zip(prepared.lines, spent, decisions, strict=True)
        ]

    def _finish(self, pending: _Pending) -> None:
        """Reads what a dispatched round measured, and records it."""
        losses_R: dict[int, float] = {}
        norms_M: dict[int, float] = {}
        for group, losses, norm_M in zip(
            pending.groups, pending.losses, pending.norms, strict=True
        ):
            loss_R = np.mean(np.concatenate(jax.device_get(losses)), axis=0)
            losses_R |= dict(zip(group.workers, loss_R.tolist(), strict=True))
            norms_M |= dict(zip(group.trainers, np.asarray(norm_M).tolist(), strict=True))
        end_s = time.perf_counter()
        step_s = end_s - max(pending.start_s, self.last_end_s)
        self.last_end_s = end_s
        losses = []
        for position, (line, workers) in enumerate(
            zip(pending.lines, pending.workers, strict=True)
        ):
            losses.append(float(np.mean([losses_R[w] for w in workers])))
            measured = {
                "train_loss": losses[-1],
                "pseudo_grad_norm": norms_M[position],
                "step_s": round(step_s, 6),
                "stall_s": round(pending.stall_s, 6),
            }
            self.ledger.write("round", **line, **measured)
        tokens = sum(line["tokens"] for line in pending.lines)
        self.progress.round(
            pending.lines[0]["round"],
            {
                "loss": float(np.mean(losses)),
                "heldout": self.loss,
                "trainers": len(losses),
                "batch": [line["requested_batch_size"] for line in pending.lines],
                "accum": [line["num_accum_steps"] for line in pending.lines],
                "tokens/s": tokens / step_s,
            },
        )
        if not np.isfinite(losses).any():
            raise DivergedError(
                f"round {pending.lines[0]['round']}: no trainer's loss is a number any more; try a"
                " lower inner.learning_rate, a warm-up (inner.warmup_updates) or inner.clip_norm"
            )

    # -- between rounds ----------------------------------------------------------------------

    def _merge(self, due: Merge) -> None:
        """Merges trainers unless the guard refuses, and divides the workers anew."""
        controller, settings = self.controller, self.settings
        guard = self.heldout.guard_EL
        before = [
            evaluate.mean_loss(self.programs, evaluate.trainer_params(self.ensemble, m), guard)
            for m in due.members
        ]
        merged = evaluate.merged_params(self.ensemble, due.members, due.weights)
        after = evaluate.mean_loss(self.programs, merged, guard)
        barrier = after - float(np.average(before, weights=due.weights))
        ids = [controller.trainers[m].id for m in due.members]
        event = {
            "round": controller.round,
            "members": ids,
            "into": ids[0],
            "weights": list(due.weights),
            "loss_before": before,
            "loss_after": after,
            "barrier": barrier,
        }
        limit = settings.merge.max_barrier
        refused = limit is not None and not barrier <= limit
        if refused:
            action = settings.merge.on_refusal
            self.ledger.write("refusal", **event, action=action)
            self.progress.note(
                f"round {controller.round}: merging trainers {ids} would raise the loss by"
                f" {barrier:.4f} nats/token, more than merge.max_barrier={limit}: {action}"
            )
            if action == "keep":
                return
        weights = (1.0,) + (0.0,) * (len(ids) - 1) if refused else due.weights
        owners = control.apply_merge(
            controller, settings, due, param_bytes=0 if refused else self.spec.param_bytes
        )
        self.ensemble = _merge_and_reassign(
            self.ensemble, jnp.asarray(weights, jnp.float32), due.members, tuple(owners)
        )
        workers = {
            trainer.id: len(controller.workers_of(position))
            for position, trainer in enumerate(controller.trainers)
        }
        if not refused:
            size = next(t.requested_batch_size for t in controller.trainers if t.id == ids[0])
            moved = self.spec.param_bytes * (len(ids) - 1)
            self.ledger.write(
                "merge", **event, bytes=moved, requested_batch_size=size, workers=workers
            )
            controller.merges.append({"round": controller.round, "members": ids, "into": ids[0]})
            self.progress.note(
                f"round {controller.round}: trainers {ids} merge into {ids[0]}, held-out loss"
                f" {', '.join(f'{loss:.4f}' for loss in before)} -> {after:.4f}; workers {workers}"
            )

    def _evaluate(self) -> PyTree:
        """Records the held-out loss of each trainer and of the consensus, which it returns."""
        controller, report = self.controller, self.heldout.report_EL
        totals = {
            "tokens_total": controller.tokens_total,
            "bytes_total": controller.bytes_total,
            "updates_total": controller.updates_total,
            "syncs_total": controller.syncs_total,
        }

        def record(trainer, loss, **more):
            self.ledger.write(
                "eval",
                round=controller.round,
                trainer=trainer,
                loss=loss,
                perplexity=float(np.exp(loss)),
                **totals,
                **more,
                wall_s=round(time.perf_counter() - self.start_s, 3),
            )

        for position, trainer in enumerate(controller.trainers):
            params = evaluate.trainer_params(self.ensemble, position)
            record(trainer.id, evaluate.mean_loss(self.programs, params, report))
        weights = tuple(float(trainer.requested_batch_size) for trainer in controller.trainers)
        params, source = evaluate.consensus(
            self.ensemble, self.programs, self.heldout.guard_EL, weights
        )
        self.loss = evaluate.mean_loss(self.programs, params, report)
        record("consensus", self.loss, source=source)
        return params

    # -- start and end -----------------------------------------------------------------------

    def _initial_ensemble(self, init_fn: InitFn) -> Ensemble:
        ensemble = self.settings.ensemble
        key = jax.random.key(self.settings.seed)

        def make(key):
            stack = init(
                init_fn(key),
                num_trainers=ensemble.num_trainers,
                num_workers=ensemble.num_workers,
                inner_tx=self.spec.inner_tx,
                outer_tx=self.spec.outer_tx,
            )
            if ensemble.init == "independent":
                keys_M = jax.random.split(key, ensemble.num_trainers)
                stack = stack.replace(params_M=jax.vmap(init_fn)(keys_M))
            return stack

        mesh = worker_mesh(ensemble.num_workers, 1)
        shardings = ensemble_shardings(jax.eval_shape(make, key), mesh)
        return jax.jit(make, out_shardings=shardings)(key)

    def _compiled(self, key: Key, seconds: float, hit: bool) -> None:
        self.ledger.write(
            "compile",
            key=str(key),
            seconds=round(seconds, 3),
            cache="hit" if hit else "miss",
            where="foreground",
        )

    def _write_start(self, workdir: Path, command: str) -> None:
        settings, spec = self.settings, self.spec
        self.ledger.write(
            "start",
            time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            run=workdir.resolve().name,
            command=command,
            config=dataclasses.asdict(settings),
            num_params=spec.num_params,
            devices=devices(),
            jax=jax.__version__,
            versions={
                "python": platform.python_version(),
                "flax": flax.__version__,
                "optax": optax.__version__,
                "numpy": np.__version__,
            },
            data_fingerprint=self.corpus.fingerprint,
            tokens_per_byte=self.corpus.tokens_per_byte,
            max_batch_size=settings.batching.max_batch_size,
            buckets=settings.batching.buckets,
        )

    def _write_end(self) -> None:
        controller = self.controller
        self.ledger.write(
            "end",
            reason="finished",
            rounds=controller.round,
            tokens_total=controller.tokens_total,
            bytes_total=controller.bytes_total,
            syncs_total=controller.syncs_total,
            updates_total=controller.updates_total,
            wall_s=round(time.perf_counter() - self.start_s, 3),
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _take(ensemble: Ensemble, trainers: tuple[int, ...], workers: tuple[int, ...]) -> Ensemble:
    return take(ensemble, trainers, workers=workers)


@functools.partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def _put(ensemble: Ensemble, sub: Ensemble, trainers: tuple[int, ...], workers: tuple[int, ...]):
    return put(ensemble, trainers, sub, workers=workers)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _merge_and_reassign(
    ensemble: Ensemble, weights_n: Array, members: tuple[int, ...], owners: tuple[int, ...]
) -> Ensemble:
    return reassign(merge(ensemble, members, weights=weights_n), owners)


def _batch_note(line: dict, decision: Decision) -> str:
    why = {
        "grew": "the test asks for {:.1f}",
        "shrank": "the test asks for {:.1f}",
        "capped": "the test asks for {:.1f}, held by max_growth or batch_cap",
        "signal": "no signal above the noise yet, one step of growth",
        "schedule": "by the declared ramp",
    }[decision.reason].format(decision.test_value or 0.0)
    return (
        f"round {line['round']}: trainer {line['trainer']} batch per worker"
        f" {line['requested_batch_size']} -> {decision.next_batch_size} ({why})"
    )
