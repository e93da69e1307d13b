"""Break the link between a driver and a learner with a ticket, and time what each fault costs.

python scripts/direct_faults.py [--rate 10mbit] [--long]
python scripts/direct_faults.py --transfers 4 --files 64 [--rate 10mbit]

Needs root, `ip`, `tc` and, for NAT, `iptables`. Driver and learner are processes in network
namespaces of their own. The learner reads an object every 0.2 s; a fault costs the seconds
without an answer. `--transfers` times objects of so many MB in pairs, with a ticket and through
an S3 server beside the driver, and counts bytes on the wire; `--files` a served file. Nothing
is trained.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from adloco_jax.elastic import direct, direct_driver, files, served, store  # noqa: E402
from adloco_jax.elastic.direct import Remote  # noqa: E402
from adloco_jax.elastic.messages import DriverHeartbeat, LearnerRequests, RequestId, ServedFile  # noqa: E402
from adloco_jax.elastic.signatures import Unneeded  # noqa: E402
from adloco_jax.settings import EngineSettings  # noqa: E402
from probes import faulty_store  # noqa: E402
from studies.direct import cpu_s, ip, within  # noqa: E402

DRIVER, ROUTER, LEARNER = "adloco-driver", "adloco-router", "adloco-learner"
PLACE = RequestId(generation=1, learner=0, incarnation=0)
OBJECT = "params/1/0.safetensors"
S3_HOST, S3_PORT = "10.79.1.2", 9090
LARGE = 8 * 2**20  # bytes of the transfers that are timed


def serve(folder: Path, size: int, num_file_bytes: int) -> None:
    """Serve objects, as the driver of a run does, until the process is killed.

    With a `size` also through S3, and a file.
    """
    key = direct.secret_file(folder / "endpoint.key", lambda: os.urandom(32))
    engine = EngineSettings(kind="direct", relay="off")
    endpoint, ticket = direct.wait_for(direct_driver._open(key, engine, folder / "ticket"))
    there = direct_driver.RunObjects(folder)
    there.put("run.json", b"about the run")
    there.put(OBJECT, os.urandom(size or LARGE))
    free = [LearnerRequests(id=PLACE, is_free=True)]
    there.put("driver/1.json", store.to_json(DriverHeartbeat(count=1, learners=free)))
    there.put(PLACE.of(1).name("requests"), b"asked")
    server = served.Server(there, ticket.secret, (), most_bytes=size or LARGE)
    direct.begin(server.accept(endpoint))
    if size:
        file = folder / "file.safetensors"
        file.write_bytes(os.urandom(num_file_bytes))
        library = files.Library({("weights", file.name): file})
        there.offer(library)
        (folder / "file.json").write_bytes(library.files[0].model_dump_json().encode())
        from moto.server import ThreadedMotoServer

        s3 = ThreadedMotoServer(S3_HOST, S3_PORT, verbose=False)
        s3.start()
        url = f"http://{S3_HOST}:{S3_PORT}/bkt"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
        (folder / "s3").touch()
    while True:
        time.sleep(60)


def time_transfers(ticket: str, size: int, folder: Path) -> None:
    """Time objects in pairs, one way after the other, and a served file; print the medians."""
    for name, value in faulty_store.environment(f"http://{S3_HOST}:{S3_PORT}").items():
        os.environ[name] = value
    remote = Remote(ticket, b"l" * 32)
    remote.open()
    ways = {
        "ticket": store.Store(remote, Unneeded()),
        "S3": store.open_bucket("s3://bkt/run", "k" * 64),
    }
    data, names = os.urandom(size), {"up": PLACE.of(1).name("responses"), "down": OBJECT}
    assert remote.create(PLACE.heartbeat_name(), b"here")
    ways["S3"].put(OBJECT, data)
    seconds = {(way, to): [] for way in ways for to in names}
    sent = {(way, to): [] for way in ways for to in names}
    for _ in range(5):
        for (way, to), values in seconds.items():
            start_s, before = time.monotonic(), wire_bytes()
            if to == "up":
                ways[way].put(names[to], data)
            else:
                assert len(ways[way].get(names[to], limit=size)) == size
            values.append(time.monotonic() - start_s)
            sent[way, to].append(wire_bytes() - before)
    for to in names:
        one, two = (statistics.median(seconds[way, to]) for way in ways)
        wire = [statistics.median(sent[way, to]) / size for way in ways]
        print(
            f"{to}: {size / 1e6:g} MB: ticket {one:.2f} s, S3 {two:.2f} s, ratio {one / two:.2f};"
            f" bytes on the wire {wire[0]:.3f} and {wire[1]:.3f} of the object's",
            flush=True,
        )
    about = ServedFile.model_validate_json((folder / "file.json").read_bytes())
    with tempfile.TemporaryDirectory() as cache:
        start_s = time.monotonic()
        files.CachedFile(ways["ticket"], about, Path(cache)).read()
        took_s = time.monotonic() - start_s
    print(
        f"file: {about.size / 1e6:g} MB in {took_s:.1f} s, {8e-6 * about.size / took_s:.1f} Mbit/s"
    )


def wire_bytes() -> int:
    """Return the bytes that this namespace's device has sent and received."""
    at = Path("/sys/class/net/ad-l/statistics")
    return sum(int((at / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


def learn(ticket: str) -> None:
    """Read an object again and again, and print when an answer came; time transfers if asked."""
    remote = Remote(ticket, b"l" * 32)
    remote.open()
    there = store.Store(remote, Unneeded())
    for line in range(10**9):
        there.get("run.json")
        print(f"answer {time.monotonic():.3f}", flush=True)
        if line % 5 == 0 and Path("/tmp/adloco-direct-time").exists():
            start_s = time.monotonic()
            there.get(OBJECT, limit=LARGE)
            print(f"down {time.monotonic() - start_s:.3f}", flush=True)
        time.sleep(0.2)


@contextlib.contextmanager
def network(rate: str):
    """Make a driver's and a learner's namespace, with a router between them that masquerades."""
    for space in (DRIVER, ROUTER, LEARNER):
        subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
        ip("netns", "add", space)
        subprocess.run(within(space, "ip", "link", "set", "lo", "up"), check=True)
    for name, space, net in (("d", DRIVER, "10.79.1"), ("l", LEARNER, "10.79.2")):
        ip("link", "add", f"ad-{name}", "netns", space, "type", "veth", "peer", f"ad-r{name}",
           "netns", ROUTER)  # fmt: skip
        for where, device, host in ((space, f"ad-{name}", 2), (ROUTER, f"ad-r{name}", 1)):
            run = within(where, "ip")
            subprocess.run([*run, "addr", "add", f"{net}.{host}/24", "dev", device], check=True)
            subprocess.run([*run, "link", "set", device, "up"], check=True)
            if rate:
                shape = ("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate)
                how = ("burst", "32kb", "latency", "400ms")
                subprocess.run(within(where, *shape, *how), check=True)
        route = ("ip", "route", "add", "default", "via", f"{net}.1")
        subprocess.run(within(space, *route), check=True)
    subprocess.run(within(ROUTER, "sysctl", "-qw", "net.ipv4.ip_forward=1"), check=True)
    nat = ("iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "ad-rd", "-j", "MASQUERADE")
    subprocess.run(within(ROUTER, *nat), check=True)
    try:
        yield
    finally:
        for space in (DRIVER, ROUTER, LEARNER):
            ip("netns", "del", space)


class Pair:
    """A driver and a learner, as processes in their namespaces."""

    def __init__(self, folder: Path, size: int = 0, num_file_bytes: int = 0):
        self.folder, self.log = folder, folder / "learner.log"
        self.sizes = str(size), str(num_file_bytes)
        self.driver = self.start_driver()
        ticket = folder / "ticket"
        while not (ticket.exists() and ticket.read_text()):
            time.sleep(0.1)
        command = within(LEARNER, sys.executable, __file__, "learn", ticket.read_text())
        if size:
            while not (folder / "s3").exists():
                time.sleep(0.1)
            words = ("time", ticket.read_text(), str(size), str(folder))
            self.learner = subprocess.Popen(within(LEARNER, sys.executable, __file__, *words))
            return
        with open(self.log, "w") as log:
            self.learner = subprocess.Popen(command, stdout=log, stderr=log)

    def start_driver(self) -> subprocess.Popen:
        """Start the driver."""
        command = within(DRIVER, sys.executable, __file__, "serve", str(self.folder), *self.sizes)
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def values(self, word: str) -> list[float]:
        """Return the numbers that the learner has printed after a word."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [float(line[1]) for line in lines if len(line) == 2 and line[0] == word]

    def gap_s(self, since_s: float, until_s: float) -> float:
        """Return the longest time without an answer, once one has come after `until_s`."""
        limit_s = time.monotonic() + 150
        while time.monotonic() < limit_s:
            answers = [a for a in self.values("answer") if a > since_s - 2]
            if answers and answers[-1] > until_s + 1:
                return max(b - a for a, b in zip(answers, answers[1:], strict=False))
            time.sleep(0.2)
        return float("inf")

    def close(self) -> None:
        """End both."""
        for process in (self.learner, self.driver):
            process.kill()
            process.wait()


def link(state: str) -> None:
    """Set the driver's link up or down, as a cable would."""
    subprocess.run(within(ROUTER, "ip", "link", "set", "ad-rd", state), check=True)


def readdress(space: str, device: str, old: str, new: str) -> None:
    """Give a computer another address, as a router may at night."""
    run = within(space, "ip")
    subprocess.run([*run, "addr", "del", f"{old}/24", "dev", device], check=True)
    subprocess.run([*run, "addr", "add", f"{new}/24", "dev", device], check=True)
    gateway = new.rpartition(".")[0] + ".1"
    subprocess.run([*run, "route", "replace", "default", "via", gateway], check=True)


def faults(pair: Pair, *, long: bool) -> None:
    """Cause each fault, and print what it costs."""

    def cost(name: str, cause, undo=None, seconds: float = 0.0) -> None:
        start_s = time.monotonic()
        cause()
        time.sleep(seconds)
        if undo is not None:
            undo()
        print(f"{name:44} {pair.gap_s(start_s, time.monotonic()):6.1f} s", flush=True)

    def restart() -> None:
        pair.driver.kill()
        pair.driver.wait()
        pair.driver = pair.start_driver()

    def stop(process, number):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [process.pid, *map(int, children)]:
            os.kill(pid, number)

    cost("none", lambda: None, seconds=3)
    cost("the driver is killed and started again", restart)
    cost("the driver stops for 10 s", lambda: stop(pair.driver, signal.SIGSTOP),
         lambda: stop(pair.driver, signal.SIGCONT), 10)  # fmt: skip
    cost("the link is cut for 20 s", lambda: link("down"), lambda: link("up"), 20)
    cost("the learner's address changes",
         lambda: readdress(LEARNER, "ad-l", "10.79.2.2", "10.79.2.3"))  # fmt: skip
    cost("the driver's address changes, and back after 8 s",
         lambda: readdress(DRIVER, "ad-d", "10.79.1.2", "10.79.1.3"),
         lambda: readdress(DRIVER, "ad-d", "10.79.1.3", "10.79.1.2"), 8)  # fmt: skip
    if long:
        cost("the link is cut for 90 s", lambda: link("down"), lambda: link("up"), 90)


def main() -> None:
    """Make the network, cause the faults, and time transfers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="", help="of the links, such as 10mbit; default: none")
    parser.add_argument("--long", action="store_true", help="also faults that last minutes")
    parser.add_argument("--transfers", type=float, default=0, metavar="MB", help="only time these")
    parser.add_argument(
        "--files", type=float, default=1, metavar="MB", help="size of a served file"
    )
    given = parser.parse_args()
    if given.transfers:
        sizes = int(given.transfers * 1e6), int(given.files * 1e6)
        with tempfile.TemporaryDirectory() as folder, network(given.rate):
            pair = Pair(Path(folder), *sizes)
            pair.learner.wait()
            print(f"processor time of the driver's process: {cpu_s(pair.driver):.1f} s")
            pair.close()
        return
    marker = Path("/tmp/adloco-direct-time")
    marker.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder, network(given.rate):
        pair = Pair(Path(folder))
        try:
            while not pair.values("answer"):
                time.sleep(0.1)
            faults(pair, long=given.long)
            marker.touch()
            time.sleep(20)
            down = pair.values("down")
            if down:
                rates = [8 * LARGE / seconds / 1e6 for seconds in down]
                rate = f"{statistics.median(rates):.1f} Mbit/s, median of {len(rates)}"
                print(f"{LARGE / 1e6:.1f} MB down, behind NAT: {rate}")
        finally:
            marker.unlink(missing_ok=True)
            pair.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["learn"]:
        learn(sys.argv[2])
    elif sys.argv[1:2] == ["time"]:
        time_transfers(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
