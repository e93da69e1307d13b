"""Time training over slow links: four sites of this machine that share a bucket (Linux, root).

    python scripts/links.py [--model half] [--rates 50 10 200] [--seeds 31 32 33] [--share 0.4]
                            [--precision float32 int4]

Each site is a network namespace with one link to a hub, which has the bucket's server. Both ends of
a link are limited to the same rate (`tc tbf`), and each site to the same share of a processor. The
links have no delay. The driver runs at the first site.

- growing_pool, DiLoCo: through the bucket, to the loss of studies/RESULTS.md; once with
  a learner that is killed after a third of the run, and starts again
- one worker: alone at one site
- data parallel: 200 updates are timed (jax.distributed with gloo). Its number of updates to the
  loss comes from the run without links in studies/*.jsonl.

What goes through the bucket does so in each `--precision` (outer.precision). Data parallel reduces
float32: a ring adds gradients on their way, and sums of quantised numbers are none.

Every run is a file in `--folder`, all are lines of `<folder>/<model>.jsonl`, and the same command
continues. Compiling is not counted, but it
disturbs other sites: to fill the compilation cache, first run the command with `--loss 2.3
--folder DISCARDED`.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from timing import machine

from adloco_jax.core.compress import Precision
from adloco_jax.study import cluster, curves, results
from adloco_jax.study.summary import markdown_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from studies import methods, track  # noqa: E402

NUM_SITES = 4
NET = "10.78.0"  # seen inside the namespaces alone
BUCKET = f"http://{NET}.254:9000"
FRAME_FRAC = 1448 / 1514  # what a full Ethernet frame carries beside the headers of IP and TCP
PERIOD_US = 20_000  # a site's processor time is given out in parts of this length
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "links",
    "AWS_SECRET_ACCESS_KEY": "links",
    "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": BUCKET,
    "AWS_ALLOW_HTTP": "true",
}
KILLED = "growing_pool, a learner killed"
THROUGH_BUCKET = ("growing_pool", "DiLoCo", KILLED)


class Model(NamedTuple):
    """A size of studies/track.py, and what is measured at it."""

    loss: float  # to reach
    record: str  # studies/<record>.jsonl has the runs without links
    trials: dict[str, str]  # the settings of studies/methods.py


MODELS = {
    "small": Model(
        loss=1.6,
        record="small",
        trials={
            "growing_pool": methods.GROWING_POOL,
            "DiLoCo": methods.DILOCO_MOMENTUM,
            "one worker": "one worker: rate 0.002, 13200 updates",
            "data parallel": "data parallel: rate 0.004, 2640 updates",
        },
    ),
    "half": Model(
        loss=1.32,
        record="half_muon",
        trials={
            "growing_pool": "growing pool: Muon, 0.006",
            "DiLoCo": "DiLoCo: Muon, 0.006",
            "one worker": "one worker: Muon, 0.004",
            "data parallel": "data parallel: Muon, 0.01",
        },
    ),
}


class Case(NamedTuple):
    """A run to make."""

    method: str
    rate: int | None  # of all links, in Mbit/s; None: no link
    seed: int
    precision: str = "float32"  # of what goes through the bucket

    def __str__(self) -> str:
        rate = "no-link" if self.rate is None else f"{self.rate}mbit"
        precision = f"-{self.precision}" * (self.precision != "float32")
        return f"{self.method}-{rate}-{self.seed}{precision}".replace(", ", "-").replace(" ", "-")


def cases(rates: list[int], seeds: list[int], precisions: list[str]) -> Iterator[Case]:
    """The runs, the first rate, seed and precision first."""
    pairs = [(rate, seeds[0]) for rate in rates] + [(rates[0], seed) for seed in seeds[1:]]
    for rate, seed in pairs:
        for precision in precisions:
            for method in ("growing_pool", "DiLoCo"):
                yield Case(method, rate, seed, precision)
        if seed == seeds[0]:
            yield Case("data parallel", rate, seed)
        if rate == rates[0]:
            yield Case("one worker", None, seed)
    yield Case(KILLED, rates[0], seeds[0], precisions[0])


def variant(model: str, method: str) -> str:
    """What the studies call a method: its name and setting."""
    return MODELS[model].trials["growing_pool" if method == KILLED else method]


def config_of(model: str, method: str, seed: int, **changes: Any) -> Any:
    """The config of a method, as it ran in the studies."""
    config, known = track.get_base(model), methods.settings(model)[variant(model, method)]
    config.update_from_flattened_dict({**known, "seed": seed, **changes})
    return config


# -- Sites -----------------------------------------------------------------------------------


def ip(*words: object) -> str:
    """Run `ip` and return what it prints."""
    command = ["ip", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Site:
    """A network namespace with a share of a processor, in which commands are started."""

    def __init__(self, name: str, number: int, share: float | None):
        """Make a namespace with an address on the network, and a control group for its processes.

        Args:
          name: Name of the namespace and of the control group.
          number: Last part of the address.
          share: How much of one processor all processes of the site have, always the same one;
            else threads that wait for one another use up the share. None: no limit.
        """
        self.name, self.address, self._started = name, f"{NET}.{number}", []
        self.core = None if share is None else number % (os.cpu_count() or 1)
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        hosts = Path("/etc/netns") / name / "hosts"  # gloo looks up the host's name
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f"127.0.0.1 localhost\n{self.address} {os.uname().nodename}\n")
        group, per_period = _group(name), int((share or 0) * PERIOD_US)
        group.mkdir()
        if (group / "cpu.max").exists():
            limits = {"cpu.weight": "10000"}  # before other processes of the machine
            limits |= {"cpu.max": f"{per_period} {PERIOD_US}"} if per_period else {}
        else:
            limits = {"cpu.shares": "262144", "cpu.cfs_period_us": f"{PERIOD_US}"}
            limits |= {"cpu.cfs_quota_us": f"{per_period}"} if per_period else {}
        for key, value in limits.items():
            (group / key).write_text(value)

    def start(self, *command: object, log: Path, **environ: str) -> subprocess.Popen:
        """Start a command in the site; its output is added to a file."""
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', _group(self.name) / "cgroup.procs"]
        pin = [] if self.core is None else ["taskset", "-c", self.core]
        words = [*enter, "ip", "netns", "exec", self.name, *pin, *command]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | environ
        with open(log, "a") as file:
            process = subprocess.Popen([*map(str, words)], stdout=file, stderr=file, env=environ)
        self._started.append(process)
        return process

    def num_bytes(self) -> dict[str, int]:
        """Bytes that the site's interface has sent (`up`) and received (`down`)."""
        found = json.loads(ip("-n", self.name, "-s", "-j", "link", "show", "eth0"))[0]["stats64"]
        return {"up": found["tx"]["bytes"], "down": found["rx"]["bytes"]}

    def close(self) -> None:
        """End all processes of the site, and remove its namespace and control group."""
        group = _group(self.name)
        for process in self._started:
            process.kill()
            process.wait()
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        group.rmdir()
        ip("netns", "del", self.name)
        shutil.rmtree(Path("/etc/netns") / self.name)


def _group(name: str) -> Path:
    """The folder of a control group, of the first version or of the second."""
    root = Path("/sys/fs/cgroup")
    return (root / "cpu" if (root / "cpu" / "cpu.cfs_quota_us").exists() else root) / name


@contextlib.contextmanager
def network(
    rate: int | None, share: float | None, num_sites: int = NUM_SITES
) -> Iterator[tuple[Site, list[Site]]]:
    """Make the hub, and the sites with one link each to it, of `rate` Mbit/s in both directions."""
    with contextlib.ExitStack() as stack:

        def site(name: str, number: int, part: float | None) -> Site:
            made = Site(f"links{os.getpid()}-{name}", number, part)
            stack.callback(made.close)
            return made

        hub = site("hub", 254, None)
        ip("-n", hub.name, "link", "add", "dev", "bridge0", "type", "bridge")
        ip("-n", hub.name, "addr", "add", f"{hub.address}/24", "dev", "bridge0")
        ip("-n", hub.name, "link", "set", "bridge0", "up")
        sites = [site(f"{number}", number, share) for number in range(1, num_sites + 1)]
        for number, each in enumerate(sites, 1):
            ends = ((hub.name, f"site{number}"), (each.name, "eth0"))
            ip("-n", hub.name, "link", "add", ends[0][1], "type", "veth", "peer", "name", "eth0",
               "netns", each.name)  # fmt: skip
            ip("-n", hub.name, "link", "set", ends[0][1], "master", "bridge0")
            ip("-n", each.name, "addr", "add", f"{each.address}/24", "dev", "eth0")
            for name, device in ends:
                ip("-n", name, "link", "set", device, "up")
                if rate is not None:
                    limit = f"tbf rate {rate}mbit burst 32kb latency 400ms".split()
                    command = ["tc", "-n", name, "qdisc", "add", "dev", device, "root", *limit]
                    subprocess.run(command, check=True)
        yield hub, sites


# -- Data parallel ---------------------------------------------------------------------------


def parallel_updates(config: Any, count: int, num_updates: int) -> dict[str, Any]:
    """Make updates by the mean gradient of `count` devices, each with its own rows.

    Gradients are reduced as one vector of float32.

    Returns:
      Seconds of each update but the first, the bytes sent and received meanwhile if there is a link
      `eth0`, the loss of the last update, and the sum of the parameters.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from adloco_jax.config import completed, validate
    from adloco_jax.data import load_corpus
    from adloco_jax.engine.optimizers import inner_transform, labeller
    from adloco_jax.engine.spec import here
    from adloco_jax.run.choose import Mode
    from adloco_jax.run.program import configured_model

    settings = completed(validate(config))
    corpus, model = load_corpus(settings), configured_model(settings, here())
    loss_fn = model.loss_of(Mode(sequential=True, remat=False), model.attention(1))
    tx = inner_transform(settings.inner, labeller(settings.model.arch))
    batch = settings.batching.initial_batch_size
    mesh = jax.make_mesh((count,), ("site",), devices=jax.devices()[:count])
    params = jax.jit(model.init_fn)(jax.random.key(settings.seed))
    vector, unravel = ravel_pytree(params)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("site")), out_specs=P(), check_vma=False
    )
    def update(vector, state, rows_BL):
        loss, grad = jax.value_and_grad(lambda v: loss_fn(unravel(v), rows_BL))(vector)
        loss, grad = jax.lax.pmean((loss, grad), "site")
        change, state = tx.update(unravel(grad), state, unravel(vector))
        change = jax.tree.map(lambda leaf: settings.inner.learning_rate * leaf, change)
        return ravel_pytree(optax.apply_updates(unravel(vector), change))[0], state, loss

    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("site"))
    vector, state = jax.device_put((np.asarray(vector), jax.jit(tx.init)(params)), everywhere)
    seconds, before, loss = [], {}, jnp.nan
    for number in range(num_updates + 1):
        if number == 1:
            before = _counted()
        rows_BL = corpus.batch(0, 0, number * batch, batch)
        rows_BL = jax.make_array_from_callback(rows_BL.shape, split, rows_BL.__getitem__)
        start_s = time.perf_counter()
        vector, state, loss = jax.block_until_ready(update(vector, state, rows_BL))
        seconds.append(time.perf_counter() - start_s)
    moved = {name: num_bytes - before[name] for name, num_bytes in _counted().items()}
    found = {"loss": float(loss), "sum": float(vector.sum())}
    return {"seconds": seconds[1:], "bytes": moved, **found}


def _counted() -> dict[str, int]:
    folder = Path("/sys/class/net/eth0/statistics")
    names = {"up": "tx_bytes", "down": "rx_bytes"}
    return {way: int((folder / n).read_text()) for way, n in names.items() if folder.exists()}


def one_site(model: str, number: int, num_updates: int) -> None:
    """Be one process of data parallel, at the site with this number; print the result."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{NET}.1:9001", NUM_SITES, number)
    config = config_of(model, "data parallel", 0)
    print(json.dumps(parallel_updates(config, NUM_SITES, num_updates)), flush=True)


def data_parallel(sites: list[Site], model: str, num_updates: int, folder: Path) -> dict[str, Any]:
    """Time updates of data parallel between sites."""
    logs = [folder / f"{number}.log" for number in range(NUM_SITES)]
    processes = [
        site.start(sys.executable, __file__, "--site", number, "--model", model,
                   "--updates", num_updates, log=log)
        for number, (site, log) in enumerate(zip(sites, logs, strict=True))
    ]  # fmt: skip
    for process, log in zip(processes, logs, strict=True):
        if process.wait():
            raise SystemExit(f"failed, see {log}")
    every = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    return {
        "update_s": round(statistics.mean(every[0]["seconds"]), 5),
        "quartiles_s": [round(s, 5) for s in statistics.quantiles(every[0]["seconds"])],
        "bytes": [each["bytes"] for each in every],
        "updates": num_updates,
    }


# -- Runs of the command ---------------------------------------------------------------------


def trained(
    hub: Site, sites: list[Site], case: Case, model: str, loss: float, folder: Path
) -> dict[str, Any]:
    """Train until a loss is reached, through the bucket or alone; return the costs."""
    run, config, python = folder / "run", folder / "config.py", [sys.executable, "-m", "adloco_jax"]
    changes: dict[str, Any] = {}
    through_bucket = case.method != "one worker"
    if through_bucket:
        changes = {"engine.kind": "bucket", "engine.address": "s3://links/run"}
        changes["engine.max_learners"] = NUM_SITES  # growing_pool begins with one worker
        changes["outer.precision"] = case.precision
    config.write_text(
        f"import sys\n\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport links\n\n\n"
        f"def get_config():\n    changes = {changes!r}\n"
        f"    return links.config_of({model!r}, {case.method!r}, {case.seed}, **changes)\n"
    )
    learners: list[subprocess.Popen] = []
    join = functools.partial(Site.start, **CREDENTIALS)
    if through_bucket:
        serve_bucket(hub, folder)
        learners = [
            join(site, *python, "join", "s3://links/run", log=folder / f"{number}.log")
            for number, site in enumerate(sites)
        ]
    before = [site.num_bytes() for site in sites]
    train = [*python, "train", config, "--workdir", run]
    driver = sites[0].start(*train, log=folder / "driver.log", **CREDENTIALS)
    curve: list[dict[str, float]] = []
    third, log = math.inf, folder / "3.log"
    if case.method == KILLED:
        third = recorded(model, case, loss)["updates"] / 3
    while driver.poll() is None and not (curve and curve[-1]["loss"] <= loss):
        time.sleep(0.2)
        if any(learner.poll() for learner in learners):
            raise SystemExit(f"a learner has failed, see {folder}")
        curve = curve_of(run)
        if curve and curve[-1]["updates"] >= third:
            third = math.inf
            learners.pop().kill()
            learners.append(join(sites[-1], *python, "join", "s3://links/run", log=log))
    moved = [
        {way: num_bytes - was[way] for way, num_bytes in site.num_bytes().items()}
        for site, was in zip(sites, before, strict=True)
    ]
    driver.send_signal(signal.SIGTERM)
    if (code := driver.wait(300)) not in (0, 75) or not curve:
        raise SystemExit(f"failed ({code}), see {folder / 'driver.log'}")
    found = {"reached": curve[-1]["loss"] <= loss, "bytes": moved, "curve": curve}
    return {
        **{name: curve[-1][name] for name in ("seconds", "updates", "tokens", "syncs")},
        **found,
    }


def serve_bucket(hub: Site, folder: Path) -> None:
    """Start the bucket's server at the hub, and make the bucket."""
    host, port = BUCKET.removeprefix("http://").split(":")
    hub.start(sys.executable, "-m", "moto.server", "-H", host, "-p", port, log=folder / "s3.log")
    make = f"""import time, urllib.request as web
for _ in range(300):
    try:
        web.urlopen(web.Request("{BUCKET}/links", method="PUT")); break
    except OSError: time.sleep(0.1)
else: raise SystemExit("the bucket's server does not start")"""
    if hub.start(sys.executable, "-c", make, log=folder / "s3.log").wait():
        raise SystemExit(f"failed, see {folder / 's3.log'}")


def curve_of(run: Path) -> list[dict[str, float]]:
    """What a run has spent at each evaluation, and the loss; nothing before the second round ends.

    The first round counts as long as the second, so that compiling is left out.
    """
    path = run / "ledger.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    evals = [e for e in events if e["event"] == "eval" and e["trainer"] == "consensus"]
    if len(evals) < 2:
        return []
    begin_s = 2 * evals[0]["wall_s"] - evals[1]["wall_s"]
    return [
        {"seconds": round(e["wall_s"] - begin_s, 3), "loss": e["loss"], "round": e["round"]}
        | {name: e[f"{name}_total"] for name in ("updates", "tokens", "syncs")}
        for e in evals
    ]


def recorded(model: str, case: Case, loss: float) -> dict[str, Any]:
    """The run without links of the same method and seed: updates to the loss, and its curve."""
    found = results.read(ROOT / "studies" / f"{MODELS[model].record}.jsonl").values()
    name = variant(model, case.method)
    line = next(e for e in found if e["variant"] == name and e["seed"] == case.seed)
    curve = [{"updates": point["updates"], "loss": point["loss"]} for point in line["curve"]]
    reached = [point["updates"] for point in curve if point["loss"] <= loss]
    return {"updates": min(reached, default=math.nan), "curve": curve}


# -- All of them -----------------------------------------------------------------------------


def run_case(case: Case, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make one run in a network of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with network(case.rate, given.share) as (hub, sites):
        if case.method == "data parallel":
            return data_parallel(sites, given.model, given.updates, folder)
        return trained(hub, sites, case, given.model, given.loss, folder)


def costs(found: list[dict[str, Any]], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Complete the runs' costs.

    Data parallel gets its updates to the loss from the run without links. All get the seconds that
    are predicted at the speed of the site with one worker.
    """
    completed = []
    for run in found:
        if run["method"] == "data parallel":
            for seed in sorted({other["seed"] for other in found}):
                line = recorded(given.model, Case("data parallel", None, seed), given.loss)
                reached = not math.isnan(line["updates"])
                updates = line["updates"] if reached else line["curve"][-1]["updates"]
                factor = updates / run["updates"]
                each = {"seed": seed, "seconds": run["update_s"] * updates, "reached": reached}
                each |= {"updates": updates, "bytes": [
                    {way: round(count * factor) for way, count in site.items()}
                    for site in run["bytes"]
                ]}  # fmt: skip
                each["curve"] = [
                    {"seconds": run["update_s"] * point["updates"], "loss": point["loss"]}
                    for point in line["curve"]
                    if point["updates"] <= updates
                ]
                completed.append(run | each)
        else:
            completed.append(run)
    alone = next((run for run in completed if run["method"] == "one worker"), None)
    if alone is None:
        return completed
    return [run | {"predicted_s": predicted(run, alone, given)} for run in completed]


def bucket_seconds(events: list[dict[str, Any]], link: cluster.Cluster) -> dict[int, float]:
    """By round, seconds of a run through a bucket until it has ended.

    The driver's link carries every object once: what it sends, then what all workers send. A
    learner receives the one before the round, and sends its part of the other after it.
    """
    num_params, seconds, ended_s = curves.last(events, "start")["num_params"], 0.0, {}
    for event in curves.lines(events, "round"):
        workers = event["workers"]
        sequential = math.ceil(workers / NUM_SITES)
        update = event["bytes"] / (2 * (workers - 1)) if workers > 1 else 4 * num_params
        from_driver = event["wire_bytes"] - workers * update
        moved = event["wire_bytes"] + from_driver + sequential * update
        flops = 6 * num_params * event["tokens"] / workers * sequential
        seconds += flops / link.flops + moved / link.bandwidth
        ended_s[event["round"]] = seconds
    return ended_s


def predicted(run: dict[str, Any], alone: dict[str, Any], given: argparse.Namespace) -> float:
    """Seconds to the loss: on a link without latency, computing and transfers in turn."""
    folder = given.folder / f"{given.model}-{Case(alone['method'], None, alone['seed'])}" / "run"
    num_params = curves.last(curves.read_run(folder).events, "start")["num_params"]
    flops = 6 * num_params * alone["tokens"] / alone["seconds"]
    bandwidth = FRAME_FRAC * 1e6 / 8 * (run["rate"] or 1)
    link = cluster.Cluster(bandwidth, latency_s=0, flops=flops)
    if run["method"] == "data parallel":
        token_s, per_update = 6 * num_params / flops, alone["tokens"] / alone["updates"]
        ring_s = cluster.ring_s(NUM_SITES, 4 * num_params, bandwidth=link.bandwidth)
        return run["updates"] * (token_s * per_update + ring_s)
    case = Case(run["method"], run["rate"], run["seed"], run["precision"])
    events = curves.read_run(given.folder / f"{given.model}-{case}" / "run").events
    count = bucket_seconds if run["method"] in THROUGH_BUCKET else cluster.run_seconds
    return count(events, link)[run["curve"][-1]["round"]]


def table(runs: list[dict[str, Any]]) -> str:
    """Seconds and bytes to the loss of all runs, as a table in Markdown."""
    rows = []
    for run in runs:
        others = {e["method"]: e["seconds"] for e in runs
                  if e["seed"] == run["seed"] and e["rate"] in (run["rate"], None)
                  and (e["precision"] == run["precision"] or e["method"] not in THROUGH_BUCKET)
                  and e.get("reached", True)}  # fmt: skip
        ratios = [
            f"{run['seconds'] / others[name]:.2f}" if name in others else "-"
            for name in ("data parallel", "DiLoCo", "one worker")
        ]
        moved = sum(site["up"] for site in run["bytes"]) / 1e6
        link = "-" if run["rate"] is None else f"{run['rate']} Mbit/s"
        took = f"{run['seconds']:,.0f}" if run.get("reached", True) else "not reached"
        guess = f"{run['predicted_s'] / run['seconds']:.2f}" if "predicted_s" in run else "-"
        row = (link, run["method"], run["precision"], f"{run['seed']}", took, f"{moved:,.1f}")
        rows.append((*row, *ratios, guess))
    head = ("link", "method", "precision", "seed", "seconds", "MB sent by all sites")
    head += ("/ data parallel", "/ DiLoCo", "/ one worker", "predicted / measured")
    return markdown_table([head, *rows])


def main() -> None:
    """Make the runs whose files are missing, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="half", choices=MODELS)
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 10, 200], help="Mbit/s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32, 33])
    parser.add_argument("--share", type=float, default=0.4, help="of a processor, for each site")
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=get_args(Precision))
    parser.add_argument("--updates", type=int, default=200, help="of data parallel, to be timed")
    parser.add_argument("--loss", type=float, help="to reach; as in studies/RESULTS.md")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--folder", type=Path, default=Path("links"))
    parser.add_argument("--site", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.site is not None:
        one_site(given.model, given.site, given.updates)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given.folder = given.folder.resolve()
    given.loss = given.loss or MODELS[given.model].loss
    found = []
    for case in cases(given.rates, given.seeds, given.precision):
        if given.methods and case.method not in given.methods:
            continue
        path = given.folder / f"{given.model}-{case}.json"
        if not path.exists():
            print(case, flush=True)
            result = run_case(case, given, path.with_suffix(""))
            how = {"variant": variant(given.model, case.method), "machine": machine()}
            how |= {"share": given.share, "loss": given.loss}
            path.write_text(json.dumps({**case._asdict(), **result, **how}, indent=1) + "\n")
        found.append({"precision": "float32"} | json.loads(path.read_text()))
        completed = costs(found, given)
        lines = "".join(json.dumps(run) + "\n" for run in completed)
        (given.folder / f"{given.model}.jsonl").write_text(lines)
        print(table(completed), flush=True)


if __name__ == "__main__":
    main()
