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

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax.core.base import Ensemble, LossFn
from adloco_jax.core.ensemble import init, reassign
from adloco_jax.core.merge import merge
from adloco_jax.data import load_corpus
from adloco_jax.errors import ConfigError, DivergedError, ResourceError
from adloco_jax.run import controller as control
from adloco_jax.run import evaluate
from adloco_jax.run.build import InitFn, build_model, program_spec
from adloco_jax.run.config import Settings, validate
from adloco_jax.run.controller import Controller, Decision, Merge
from adloco_jax.run.ledger import Ledger
from adloco_jax.run.plan import corpus_header, devices, max_batch_size, run_header
from adloco_jax.run.programs import (
    Compiled,
    Key,
    Programs,
    Spec,
    ensemble_shardings,
    use_compilation_cache,
    worker_mesh,
)
from adloco_jax.run.progress import Progress
from adloco_jax.run.rounds import (
    Dispatched,
    Prepared,
    Rows,
    dispatch,
    prepare,
    programs_ahead,
    read_losses,
    update_keys,
)


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
    use_compilation_cache()
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
        try:
            return run.execute(init_fn, workdir, command)
        finally:
            run.programs.close()
            run.progress.close()


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


@dataclass
class _Run:
    """One run's moving parts; `execute` reads top-down as the algorithm does."""

    settings: Settings
    spec: Spec
    corpus: Rows
    ledger: Ledger
    start_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        settings = self.settings
        self.programs = Programs(self.spec, self._compiled)
        self.controller = control.start(settings, max_batch_size(settings, self.programs))
        self.heldout = evaluate.split_heldout(
            self.corpus.heldout_rows,
            num_sequences=settings.eval.num_sequences,
            batch_size=self.controller.max_batch_size,
            seed=settings.seed,
        )
        self.tried: set[Key] = set()  # programs that have run without exhausting the memory
        self.progress = Progress(self.settings.num_rounds, every=self.settings.log.every_rounds)
        self.last_end_s = time.perf_counter()
        self.loss = float("nan")

    def execute(self, init_fn: InitFn, workdir: Path, command: str) -> Result:
        self._write_start(workdir, command)
        for line in run_header(self.settings, self.spec, self.controller.max_batch_size):
            self.progress.note(line)
        self.ensemble = self._initial_ensemble(init_fn)
        ahead = programs_ahead(self.controller, self.settings)
        self.programs.prefetch([*ahead, evaluate.evaluate_key(self.heldout.batch_size)])
        prepared, previous, consensus = self._prepare(), None, None
        for _ in range(self.settings.num_rounds):
            prepared, dispatched = self._dispatch(prepared)
            if previous:
                self._record(*previous)
            previous = dispatched, self._decide(dispatched, prepared)
            if self.controller.round < self.settings.num_rounds:
                self.programs.prefetch(programs_ahead(self.controller, self.settings))
            merge_now = control.due_merge(self.controller, self.settings)
            last = self.controller.round == self.settings.num_rounds
            evaluate_now = last or self.controller.round % self.settings.eval.every_rounds == 0
            if not merge_now and not last:
                prepared = self._prepare()  # while the devices are at work
            if merge_now or evaluate_now:
                self._record(*previous)
                previous = None
            if merge_now:
                self._merge(merge_now)
                if not last:
                    prepared = self._prepare()
            if evaluate_now:
                consensus = self._evaluate()
        self._write_end()
        return Result(workdir, consensus, self.loss, self.ensemble, self.controller)

    def _prepare(self) -> Prepared:
        groups = control.plan_round(self.controller, self.settings)
        return prepare(self.controller, self.settings, self.spec, self.corpus, groups)

    def _dispatch(self, prepared: Prepared) -> tuple[Prepared, Dispatched]:
        """Starts a round. Where its programs exhaust the memory, the round is undone and halved.

        The ensemble's buffers are given up to the round, so a copy is kept on the host while a
        program has not proved itself. The same sequences are then used in smaller micro-batches.
        """
        keys = update_keys(prepared.groups)
        untried = self.controller.max_batch_size > 1 and not self.tried.issuperset(keys)
        backup = jax.device_get(self.ensemble) if untried else None
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.ensemble)
        try:
            self.ensemble, dispatched = dispatch(
                self.programs, self.controller, self.ensemble, prepared
            )
            if untried:
                jax.block_until_ready((self.ensemble, dispatched.losses))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if backup is None:
                raise ResourceError(
                    f"round {self.controller.round + 1}: out of memory at a micro-batch of"
                    f" {self.controller.max_batch_size}: {str(error).splitlines()[0]}; use fewer"
                    " workers, a smaller model or shorter sequences, or model.remat"
                ) from error
            self.ensemble = jax.device_put(backup, shardings)
            self._halve_max_batch(str(error).splitlines()[0])
            groups = control.smaller_micro_batches(self.controller, self.settings, prepared.groups)
            return self._dispatch(
                prepare(self.controller, self.settings, self.spec, self.corpus, groups)
            )
        self.tried.update(keys)
        return prepared, dispatched

    def _halve_max_batch(self, cause: str) -> None:
        before = self.controller.max_batch_size
        self.controller.max_batch_size = before // 2
        self.ledger.write(
            "fault",
            kind="out_of_memory",
            round=self.controller.round + 1,
            cause=cause,
            max_batch_size_before=before,
            max_batch_size=before // 2,
        )
        self.progress.note(
            f"round {self.controller.round + 1}: out of memory; the round is undone and"
            f" max_batch_size is {before // 2} from here on (was {before})"
        )

    def _decide(self, dispatched: Dispatched, prepared: Prepared) -> list[dict]:
        """Reads the test, sets the next batches, counts the round; returns its drafted lines."""
        stats_R = dispatched.stats_R
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

    def _record(self, dispatched: Dispatched, lines: list[dict]) -> None:
        """Waits for a round, and records what it measured."""
        losses, norms = read_losses(dispatched)
        end_s = time.perf_counter()
        step_s = end_s - max(dispatched.start_s, self.last_end_s)
        self.last_end_s = end_s
        for line, loss, norm in zip(lines, losses, norms, strict=True):
            self.ledger.write(
                "round",
                **line,
                train_loss=loss,
                pseudo_grad_norm=norm,
                step_s=round(step_s, 6),
                stall_s=round(dispatched.stall_s, 6),
            )
        index = lines[0]["round"]
        self.progress.round(
            index,
            {
                "loss": float(np.mean(losses)),
                "heldout": self.loss,
                "trainers": len(losses),
                "batch": [line["requested_batch_size"] for line in lines],
                "accum": [line["num_accum_steps"] for line in lines],
                "tokens/s": sum(line["tokens"] for line in lines) / step_s,
            },
        )
        if not np.isfinite(losses).any():
            raise DivergedError(
                f"round {index}: no trainer's loss is a number any more; try a lower"
                " inner.learning_rate, a warm-up (inner.warmup_updates) or inner.clip_norm"
            )

    # -- between rounds ----------------------------------------------------------------------

    def _merge(self, due: Merge) -> None:
        """Merges trainers unless the guard refuses, and divides the workers anew."""
        controller, settings = self.controller, self.settings
        guard = self.heldout.guard_EL
        before = [
            self._mean_loss(evaluate.trainer_params(self.ensemble, m), guard) for m in due.members
        ]
        merged = evaluate.merged_params(self.ensemble, due.members, due.weights)
        after = self._mean_loss(merged, guard)
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
            controller, settings, due, param_bytes=self.spec.param_bytes, refused=refused
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
            with np.errstate(over="ignore"):  # not finite: null in the ledger
                perplexity = float(np.exp(loss))
            self.ledger.write(
                "eval",
                round=controller.round,
                trainer=trainer,
                loss=loss,
                perplexity=perplexity,
                **totals,
                **more,
                wall_s=round(time.perf_counter() - self.start_s, 3),
            )

        for position, trainer in enumerate(controller.trainers):
            params = evaluate.trainer_params(self.ensemble, position)
            record(trainer.id, self._mean_loss(params, report))
        weights = tuple(float(trainer.requested_batch_size) for trainer in controller.trainers)
        params, source = evaluate.consensus(self.ensemble, self.programs, self.heldout, weights)
        self.loss = self._mean_loss(params, report)
        record("consensus", self.loss, source=source)
        return params

    def _mean_loss(self, params: PyTree, rows_EL: np.ndarray) -> float:
        return evaluate.mean_loss(self.programs, params, rows_EL, self.heldout.batch_size)

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

    def _compiled(self, compiled: Compiled) -> None:
        self.ledger.write(
            "compile",
            key=str(compiled.key),
            seconds=round(compiled.seconds, 3),
            cache="hit" if compiled.hit else "miss",
            where="background" if compiled.background else "foreground",
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
            max_batch_size=self.controller.max_batch_size,
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
