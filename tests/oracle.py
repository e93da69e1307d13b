"""A slow, obvious AdLoCo in float64: a second implementation, to test the package against.

It shares no code with the package. The model is a table of bigram logits with a gradient written by
hand. Section numbers are those of docs/algorithm.md.
"""

import copy
import math
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

# --- The model: the current token chooses a row of a table W[V, V], the next token's logits.


def sequence_loss(table, tokens):
    """Mean cross-entropy of one sequence of L + 1 tokens, in nats per token."""
    loss = 0.0
    for present, following in zip(tokens[:-1], tokens[1:], strict=True):
        logits = table[present]
        loss += np.log(np.sum(np.exp(logits - logits.max()))) + logits.max() - logits[following]
    return loss / (len(tokens) - 1)


def sequence_grad(table, tokens):
    """Gradient of `sequence_loss`: softmax minus one-hot, in the row of the current token."""
    grad = np.zeros_like(table)
    for present, following in zip(tokens[:-1], tokens[1:], strict=True):
        exps = np.exp(table[present] - table[present].max())
        grad[present] += exps / exps.sum()
        grad[present, following] -= 1.0
    return grad / (len(tokens) - 1)


def batch_loss_and_grad(table, rows):
    losses = [sequence_loss(table, row) for row in rows]
    grads = [sequence_grad(table, row) for row in rows]
    return sum(losses) / len(rows), sum(grads) / len(rows)


# --- Optimizers: each takes (params, grad, state, learning rate) and returns (params, state).


def adamw(params, grad, state, learning_rate, *, weight_decay, b1=0.9, b2=0.999, eps=1e-8):
    """Loshchilov & Hutter 2019 in optax's form; `state` is (count, first moment, second moment)."""
    count, mu, nu = state
    count = count + 1
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * grad**2
    mu_hat = mu / (1 - b1**count)
    nu_hat = nu / (1 - b2**count)
    step = mu_hat / (np.sqrt(nu_hat) + eps) + weight_decay * params
    return params - learning_rate * step, (count, mu, nu)


def adamw_start(params):
    return 0, np.zeros_like(params), np.zeros_like(params)


def sgd(params, grad, state, learning_rate):
    return params - learning_rate * grad, state


def nesterov(params, grad, velocity, learning_rate, *, momentum):
    """Nesterov momentum in the form of optax and PyTorch."""
    velocity = momentum * velocity + grad
    return params - learning_rate * (grad + momentum * velocity), velocity


def step(group, params, grad, state, learning_rate):
    """One update of the optimizer that a group of settings names: the inner or the outer one."""
    if group.tx == "adamw":
        b1, b2 = getattr(group, "beta1", 0.9), getattr(group, "beta2", 0.999)
        decay = getattr(group, "weight_decay", 0.0)
        return adamw(params, grad, state, learning_rate, weight_decay=decay, b1=b1, b2=b2)
    if group.tx == "nesterov":
        return nesterov(params, grad, state, learning_rate, momentum=group.momentum)
    return sgd(params, grad, state, learning_rate)


# --- Batch-size tests (section 2). Statistics are plain dicts of sums and their weights.


def gradient_sums(grads):
    """Sums over the per-example gradients [t, ...] that one worker tested."""
    t = len(grads)
    grads = [np.asarray(g, np.float64).ravel() for g in grads]
    mean = sum(grads) / t
    n = [g @ g for g in grads]
    p = [g @ mean for g in grads]
    mean2 = mean @ mean
    sums = {
        "examples": t,
        "noise": sum(n) - t * mean2,
        "noise_weight": t - 1,
        "signal": t**2 * mean2 - sum(n),
        "signal_weight": t * (t - 1),
        "plugin_ip": sum((p_j - mean2) ** 2 for p_j in p),
        "plugin_orth": sum(n) - sum(p_j**2 for p_j in p) / mean2,
        "ip": 0.0,
        "ip_weight": 0,
    }
    third = t // 3
    if t >= 4:
        mean_1 = sum(grads[:third]) / third
        mean_2 = sum(grads[third : 2 * third]) / third
        last = grads[2 * third :]
        a = [g @ mean_1 for g in last]
        b = [g @ mean_2 for g in last]
        a_mean, b_mean = sum(a) / len(last), sum(b) / len(last)
        sums["ip"] = sum((x - a_mean) * (y - b_mean) for x, y in zip(a, b, strict=True))
        sums["ip_weight"] = len(last) - 1
    return sums


def pooled(sums_of_workers):
    return {name: sum(sums[name] for sums in sums_of_workers) for name in sums_of_workers[0]}


def averaged(old, new, decay=0.9):
    """Averages numerators and denominators separately; their equal bias corrections cancel."""
    if not old:
        old = dict.fromkeys(new, 0.0)
    return {name: decay * old[name] + (1 - decay) * new[name] for name in new}


def signal_used(sums, mode, total_batch):
    """The |G|^2 that the tests divide by."""
    noise = sums["noise"] / sums["noise_weight"]
    signal = sums["signal"] / sums["signal_weight"]
    if mode == "paper":
        return max(signal, 0.0) + noise / total_batch
    return max(signal, 1e-3 * noise)


def norm_request(sums, *, eta, workers, mode, total_batch=None):
    noise = sums["noise"] / sums["noise_weight"]
    return noise / (workers * eta**2 * signal_used(sums, mode, total_batch))


def inner_product_request(sums, *, vartheta, workers, mode, total_batch=None):
    signal = signal_used(sums, mode, total_batch)
    return ip_variance(sums, mode) / (workers * vartheta**2 * signal**2)


def augmented_request(sums, *, vartheta, nu, workers, mode, total_batch=None):
    signal = signal_used(sums, mode, total_batch)
    if mode == "paper":
        orthogonal = sums["plugin_orth"] / sums["noise_weight"]
    else:
        noise = sums["noise"] / sums["noise_weight"]
        orthogonal = noise - ip_variance(sums, mode) / signal
    how = {"workers": workers, "mode": mode, "total_batch": total_batch}
    along = inner_product_request(sums, vartheta=vartheta, **how)
    return max(along, orthogonal / (workers * nu**2 * signal))


def ip_variance(sums, mode):
    if mode == "paper":
        return sums["plugin_ip"] / sums["noise_weight"]
    return sums["ip"] / sums["ip_weight"]


def limited(request, *, batch, max_growth, cap):
    """The request, rounded up and limited by growth and cap; it never falls."""
    if not math.isfinite(request):
        return batch
    new = math.ceil(request)
    return max(min(new, max_growth * batch, cap), batch)


# --- Switch mode (section 3), merge choice and allocation (section 4).


def planned(batch, *, max_batch, multiplier, mode, buckets):
    """The micro-batch and the number of accumulation steps."""
    if batch <= max_batch:
        micro, accum = batch, 1
    elif mode == "clip" or (mode == "threshold" and batch <= multiplier * max_batch):
        micro, accum = max_batch, 1
    else:
        micro, accum = max_batch, math.ceil(batch / max_batch)
    while micro not in buckets:
        micro += 1
    return micro, accum


def merge_members(batches, *, policy, width):
    """Positions of the trainers to merge, the representative first."""
    if len(batches) < 2:
        return []
    # a stable sort: ties by position
    ascending = sorted(range(len(batches)), key=lambda i: batches[i])
    if policy == "worst_with_worst":
        candidates = ascending[:width]
        top = max(batches[i] for i in candidates)
        representative = min(i for i in candidates if batches[i] == top)
        absorbed = [i for i in candidates if i != representative]
    else:
        representative = min(i for i in ascending if batches[i] == max(batches))
        absorbed = [i for i in ascending if i != representative][: width - 1]
    return [representative, *sorted(absorbed)]


def allocated(batches, workers):
    """Divides workers by largest remainder, at least one each; ties favour lower positions."""
    shares = [Fraction(b * workers, sum(batches)) for b in batches]
    counts = [max(1, math.floor(share)) for share in shares]
    while sum(counts) < workers:
        gaps = [share - count for share, count in zip(shares, counts, strict=True)]
        counts[gaps.index(max(gaps))] += 1
    while sum(counts) > workers:
        gaps = [share - count for share, count in zip(shares, counts, strict=True)]
        least = min(gap for gap, count in zip(gaps, counts, strict=True) if count > 1)
        last = max(i for i, gap in enumerate(gaps) if gap == least and counts[i] > 1)
        counts[last] -= 1
    return counts


# --- A whole run.


@dataclass
class Trainer:
    id: int
    params: np.ndarray
    outer_state: object
    batch: int
    length: int = 1  # of a round, in multiples of its initial length
    wanted: int = 0  # number of workers that the test asks for
    updates: int = 0
    sums: dict = field(default_factory=dict)
    cursors: dict = field(default_factory=dict)  # number of sequences read, by stream


@dataclass
class Worker:
    stream: int
    trainer: int  # its trainer's id
    inner_state: object


def run_oracle(settings, *, batch, table):
    """Plays a run.

    Args:
      settings: Anything with the fields of a run's settings, by group; the groups `model`, `data`,
        `eval` and `log` are not used.
      batch: `batch(trainer_id, stream, start, count)` returns token rows [count, L + 1].
      table: Initial parameters [V, V].

    Returns:
      `rounds`: a dict for each round and living trainer; `merges`: a dict for each merge; `spawns`:
      tuples (round, trainer's id, workers before, workers after); `trainers` and `workers` at the
      end, in order.
    """
    s = settings
    table = np.asarray(table, np.float64)
    outer_start = adamw_start(table) if s.outer.tx == "adamw" else np.zeros_like(table)
    inner_start = adamw_start(table) if s.inner.tx == "adamw" else None
    trainers = [
        Trainer(i, table.copy(), copy.deepcopy(outer_start), s.batching.initial_batch_size)
        for i in range(s.ensemble.num_trainers)
    ]
    begin = s.ensemble.initial_workers or s.ensemble.num_workers
    workers = [
        Worker(w, w * len(trainers) // begin, copy.deepcopy(inner_start)) for w in range(begin)
    ]
    rounds, merges, spawns = [], [], []
    for round_number in range(1, s.num_rounds + 1):
        free = s.ensemble.num_workers - len(workers) if s.ensemble.initial_workers else 0
        for trainer in trainers:
            mine = [worker for worker in workers if worker.trainer == trainer.id]
            rounds.append({"round": round_number, **play_round(s, trainer, mine, batch, free)})
            free -= trainer.wanted - len(mine)
        is_due = round_number % s.merge.every_rounds == 0 and round_number < s.num_rounds
        if s.merge.policy != "none" and is_due:
            batches = [trainer.batch * trainer.length for trainer in trainers]
            members = merge_members(batches, policy=s.merge.policy, width=s.merge.width)
            if members:
                merged = merge_trainers(s, trainers, workers, [trainers[i] for i in members])
                merges.append({"round": round_number, **merged})
        if s.ensemble.initial_workers and round_number < s.num_rounds:
            for trainer in trainers:
                mine = [worker for worker in workers if worker.trainer == trainer.id]
                mean_state = mean_inner_state(s, mine)
                joining = min(trainer.wanted - len(mine), s.ensemble.num_workers - len(workers))
                for _ in range(joining):
                    stream = min(set(range(99)) - {worker.stream for worker in workers})
                    workers.append(Worker(stream, trainer.id, copy.deepcopy(mean_state)))
                if joining > 0:
                    spawns.append((round_number, trainer.id, len(mine), len(mine) + joining))
    return SimpleNamespace(
        rounds=rounds, merges=merges, spawns=spawns, trainers=trainers, workers=workers
    )


def play_round(s, trainer, workers, batch, free):
    """Plays one round of one trainer, which changes in place; returns a record of the round."""
    limits = {"max_batch": s.batching.max_batch_size, "buckets": s.batching.buckets}
    micro, accum = planned(trainer.batch, **limits, **vars(s.switch))
    per_update = micro * accum
    num_updates = s.inner.steps_per_round * trainer.length
    # The rows that each worker reads in this round, update after update.
    rows = []
    for worker in workers:
        start = trainer.cursors.get(worker.stream, 0)
        rows.append(batch(trainer.id, worker.stream, start, num_updates * per_update))
        trainer.cursors[worker.stream] = start + num_updates * per_update

    request, (next_workers, next_length, next_batch), sums = tested(s, trainer, rows, free)

    # Inner updates of each worker.
    ends, losses, rates = [], [], []
    for worker, worker_rows in zip(workers, rows, strict=True):
        params = trainer.params.copy()
        for update in range(num_updates):
            grad_sum, loss_sum = np.zeros_like(params), 0.0
            for part in range(accum):
                first = update * per_update + part * micro
                loss, grad = batch_loss_and_grad(params, worker_rows[first : first + micro])
                grad_sum += grad
                loss_sum += loss
            rate = learning_rate(s, trainer.updates + update)
            rates.append(rate)
            params, worker.inner_state = step(
                s.inner, params, grad_sum / accum, worker.inner_state, rate
            )
            losses.append(loss_sum / accum)
        ends.append(params)

    # Outer update: the only communication of the workers.
    pseudo_grad = trainer.params - sum(ends) / len(ends)
    if s.outer.skip_single and len(workers) == 1:
        trainer.params = ends[0]
    else:
        trainer.params, trainer.outer_state = step(
            s.outer, trainer.params, pseudo_grad, trainer.outer_state, s.outer.learning_rate
        )
    played = {
        "trainer": trainer.id,
        "workers": len(workers),
        "requested": trainer.batch,
        "micro": micro,
        "accum": accum,
        "updates": num_updates,
        "loss": sum(losses) / len(losses),
        "rates": rates,
        "test_value": request,
        "noise": None if sums is None else sums["noise"] / sums["noise_weight"],
        "signal": None if sums is None else sums["signal"] / sums["signal_weight"],
    }
    trainer.updates += num_updates
    trainer.wanted, trainer.length, trainer.batch = next_workers, next_length, next_batch
    return played


def tested(s, trainer, rows, free):
    """The test on the first rows of a round: (request, workers/length/batch after it, sums)."""
    b = s.batching
    least = 2 if b.test == "norm" else 4
    sequences = sum(len(worker_rows) for worker_rows in rows)
    total = b.test_batch_size
    if total is None:
        total = min(max(math.ceil(Fraction(4, 100) * sequences), 8), 256)
    total = max(total, least * len(rows))
    per_worker = min(total, sequences) // len(rows)
    if per_worker < least:
        return None, (len(rows), trainer.length, trainer.batch), None
    sums = pooled(
        [
            gradient_sums([sequence_grad(trainer.params, row) for row in worker_rows[:per_worker]])
            for worker_rows in rows
        ]
    )
    used = sums
    if b.mode == "unbiased":
        used = trainer.sums = averaged(trainer.sums, sums, b.smoothing)
    workers = len(rows) if b.scope == "trainer" else 1
    common = {"workers": workers, "mode": b.mode, "total_batch": trainer.batch * workers}
    if b.test == "norm":
        request = norm_request(used, eta=b.eta, **common)
    elif b.test == "inner_product":
        request = inner_product_request(used, vartheta=b.vartheta, **common)
    else:
        request = augmented_request(used, vartheta=b.vartheta, nu=b.nu, **common)
    return request, grown(s, trainer, len(rows), free, request), sums


def grown(s, trainer, workers, free, request):
    """(workers, round length, batch): more workers first, then longer rounds, larger batches."""
    b, length, batch = s.batching, trainer.length, trainer.batch
    largest = b.max_growth * workers * length * batch  # limit of the product of the three
    total = min(workers * request, largest)
    wanted = max(math.ceil(total / (length * batch)), workers)
    now = workers if wanted == workers else min(2 * workers, workers + free)
    if now < min(wanted, workers + free):
        return now, length, batch
    most = (s.inner.max_steps_per_round or s.inner.steps_per_round) // s.inner.steps_per_round
    each = total / now
    longer = max(length, min(math.ceil(each / batch), most, largest // (now * batch)))
    limits = {"max_growth": b.max_growth, "cap": b.batch_cap}
    larger = limited(each / longer, batch=batch, **limits)
    return now, longer, min(larger, largest // (now * longer))


def learning_rate(s, update):
    """The rate for the trainer's count of updates; only the schedules that tests use."""
    warmup = s.inner.warmup_updates
    factor = (update + 1) / warmup if update < warmup else 1.0
    if s.inner.schedule == "cosine":
        span = s.num_rounds * s.inner.steps_per_round - warmup
        through = min(max(update - warmup, 0) / span, 1.0)
        factor *= (1 + math.cos(math.pi * through)) / 2
    return s.inner.learning_rate * factor


def merge_trainers(s, trainers, workers, members):
    """Merges the members into the first of them; `trainers` and `workers` change in place."""
    representative, absorbed = members[0], members[1:]
    weights = [member.batch * member.length for member in members]
    total = sum(weights)

    def mean(arrays):
        return sum(w * array for w, array in zip(weights, arrays, strict=True)) / total

    representative.params = mean([member.params for member in members])
    if s.outer.tx == "nesterov":
        representative.outer_state = mean([member.outer_state for member in members])
    elif s.outer.tx == "adamw":
        count = representative.outer_state[0]
        moments = [mean([m.outer_state[k] for m in members]) for k in (1, 2)]
        representative.outer_state = (count, *moments)
    measured = [member.sums for member in members if member.sums]
    if measured:
        representative.sums = {
            name: sum(sums[name] for sums in measured) / len(measured) for name in measured[0]
        }

    largest = members[weights.index(max(weights))]
    representative.batch, representative.length = largest.batch, largest.length
    for trainer in absorbed:
        trainers.remove(trainer)

    # The new owners: a trainer's own workers come before those that it absorbed.
    absorbed_ids = [trainer.id for trainer in absorbed]
    before = [worker.trainer for worker in workers]
    own = {t.id: [w for w in range(len(workers)) if before[w] == t.id] for t in trainers}
    orphans = [w for w in range(len(workers)) if before[w] in absorbed_ids]
    mean_state = {i: mean_inner_state(s, [workers[w] for w in own[i]]) for i in own}
    after = [None] * len(workers)
    counts = allocated([t.batch * t.length for t in trainers], len(workers))
    own[representative.id] += orphans
    for trainer, count in zip(trainers, counts, strict=True):
        trainer.wanted = count  # no worker joins until the trainer's test asks again
        for w in own[trainer.id][:count]:
            after[w] = trainer.id
    free = [w for w in range(len(workers)) if after[w] is None]
    for trainer, count in zip(trainers, counts, strict=True):
        while after.count(trainer.id) < count:
            after[free.pop(0)] = trainer.id
    for w, worker in enumerate(workers):
        worker.trainer = after[w]
        if after[w] != before[w]:  # a joining worker starts from the mean of the workers there
            worker.inner_state = copy.deepcopy(mean_state[after[w]])
    return {
        "members": [member.id for member in members],
        "into": representative.id,
        "weights": weights,
    }


def mean_inner_state(s, workers):
    if s.inner.tx != "adamw":
        return None
    states = [worker.inner_state for worker in workers]
    count = round(sum(state[0] for state in states) / len(states))
    return count, *(sum(state[k] for state in states) / len(states) for k in (1, 2))


# --- Outer gradients in fewer bits


def in_blocks(leaf, largest_code, most):
    """One worker's leaf rounded to integers with block scales, and each entry's scale."""
    dims = leaf.shape or (1,)
    length = max([dim for dim in dims if dim % 8 == 0] or dims)
    axis = max(d for d in range(len(dims)) if dims[d] == length)
    rows = np.moveaxis(leaf.reshape(dims), axis, 0)
    turned = rows.shape
    rows = rows.reshape(length, math.prod(dims[:axis] + dims[axis + 1 :]))
    rounded, scales = np.zeros_like(rows), np.zeros_like(rows)
    num_rows, width = 1, rows.shape[1]
    if width > most:  # split into pieces as even as possible
        width = math.ceil(width / math.ceil(width / most))
    while 0 < 2 * num_rows * width <= most:  # or combined by doubling
        num_rows *= 2
    for i in range(0, length, num_rows):
        for j in range(0, rows.shape[1], max(width, 1)):
            block = (slice(i, i + num_rows), slice(j, j + width))
            scale = np.max(np.abs(rows[block])) / np.float32(largest_code)
            unit = np.spacing(scale) * 8  # of 21 significant bits
            scales[block] = scale = np.floor(scale / unit) * unit
            if scale > 0:
                rounded[block] = np.round(rows[block] / scale) * scale
    return tuple(
        np.moveaxis(part.reshape(turned), 0, axis).reshape(leaf.shape) for part in (rounded, scales)
    )


# --- Aggregation: workers' differences become a pseudo-gradient (one tensor)


def radial_directional(differences, weights):
    """The mean direction at the mean length; the plain mean if directions cancel."""
    total = sum(weights)
    norms = [np.linalg.norm(difference) for difference in differences]
    direction, mean, length = 0.0, 0.0, 0.0
    for difference, norm, weight in zip(differences, norms, weights, strict=True):
        direction = direction + weight / total * (difference / norm if norm else difference)
        mean = mean + weight / total * difference
        length += weight / total * norm
    size = np.linalg.norm(direction)
    return mean if size < 1e-6 else length * direction / size


def running_averages(rounds, keep):
    """The running average of an array after each of its rounds; the first is the first round's."""
    averages = [rounds[0]]
    for number, new in enumerate(rounds[1:], 2):
        share = min(keep, 1 - 1 / number)
        averages.append(share * averages[-1] + (1 - share) * new)
    return averages
