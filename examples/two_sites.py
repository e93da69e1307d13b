"""Two sites train one model, by a ticket or in a bucket; one is killed, and joins again.

Run it:  python examples/two_sites.py [--bucket] [--svg docs/images/two_sites.svg]

A driver and two learners of the quickstart's model, on this machine. It takes about a minute on two
idle cores, and ends with the run's report. `--svg` also draws what was printed, with its times
divided by six.
"""

import argparse
import html
import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

from adloco_jax.errors import in_bytes
from adloco_jax.study.curves import read_run
from adloco_jax.study.summary import totals

SITES = ("A", "B")
KILLED, BACK, ROUNDS = 3, 5, 12  # rounds: after which a site is killed, and starts again
OPTIONS = {
    "num_rounds": ROUNDS,
    "inner.steps_per_round": 90,
    "outer.precision": "int4",
    "ensemble.num_workers": 2,
    "engine.link": "10Mbit/s",
    "engine.heartbeat_s": 4,
}
STYLE = """text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328;white-space:pre}
.later{animation:shown .1s backwards}rect{fill:#f6f8fa}@keyframes shown{from{opacity:0}}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#161b22}}"""


class Demonstration:
    """The processes of one run, and what was printed about them, with its time."""

    def __init__(self, folder: Path, *, in_bucket: bool):
        self.folder, self.run, self.in_bucket = folder, folder / "run", in_bucket
        self.start_s, self.printed, self.started = time.monotonic(), [], []
        self.key = secrets.token_hex(32)  # so that the sites need not be told the driver's own

    def say(self, line: str) -> None:
        """Print a line, and keep it with its time."""
        self.printed.append((time.monotonic() - self.start_s, line))
        print(line, flush=True)

    def start(self, name: str, *words: object) -> subprocess.Popen:
        """Start a command of adloco; its output goes to a file."""
        command = [sys.executable, "-P", "-m", "adloco_jax", *map(str, words)]
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "ADLOCO_KEY": self.key}
        with open(self.folder / f"{name}.log", "a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        self.started.append(process)
        return process

    def join(self, site: str) -> subprocess.Popen:
        """Start a learner, with the driver's ticket once there is one."""
        if self.in_bucket:
            return self.start(site, "join", f"file://{self.folder}/bucket")
        ticket = self.run / "learners" / "ticket"
        while not (ticket.exists() and ticket.read_text()):
            time.sleep(0.1)
            if self.started[0].poll() is not None:
                raise SystemExit(f"the driver has failed: {self.folder}/driver.log")
        return self.start(site, "join", ticket.read_text())

    def events(self) -> list[dict]:
        """The lines of the ledger that are complete."""
        path = self.run / "ledger.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def train(self) -> None:
        """Train; kill one site after a round, and start it again after another."""
        self.say(f"Two sites, each with a link of {OPTIONS['engine.link']}, train one model.")
        if self.in_bucket:
            self.say(f"They meet in a folder, in place of a bucket: {self.folder}/bucket")
            how = {"engine.kind": "bucket", "engine.address": f"file://{self.folder}/bucket"}
        else:
            self.say("They join with the ticket that the driver prints; the driver has no worker.")
            how = {"engine.kind": "direct", "engine.relay": "off", "engine.trains_here": False}
        self.say("")
        keys = OPTIONS | how
        words = [f"--config.{key}={value}" for key, value in keys.items()]
        driver = self.start("driver", "train", "diloco", "--workdir", self.run, *words)
        sites = {site: self.join(site) for site in SITES}
        self.say("$ adloco train diloco ...")
        what = "ADDRESS" if self.in_bucket else "adloco-..."
        self.say(f"$ adloco join {what} (site A)    $ adloco join {what} (site B)")
        self.say("")
        num_told, there = 0, set()
        while driver.poll() is None:
            time.sleep(0.1)
            events = self.events()
            for event in events[num_told:]:
                self.tell(event, there)
                number = event["round"] if event["event"] == "round" else 0
                if number == KILLED:
                    sites["B"].kill()
                    self.say("      $ kill -9 (site B)")
                elif number == BACK:
                    sites["B"] = self.join("B")
                    self.say("      $ adloco join ... (site B again)")
            num_told = len(events)
        for event in self.events()[num_told:]:
            self.tell(event, there)
        if driver.returncode:
            tail = (self.folder / "driver.log").read_text().splitlines()[-5:]
            raise SystemExit("\n".join(["the driver has failed:", *tail]))
        for site in sites.values():
            site.wait(60)

    def site_of(self, learner: int) -> str:
        """The site whose log says last that it joined as this learner of the run."""
        for site in SITES:
            joined = re.findall(
                r"joined as learner (\d+)", (self.folder / f"{site}.log").read_text()
            )
            if joined and int(joined[-1]) == learner:
                return site
        raise LookupError(f"no site has joined as learner {learner}")

    def tell(self, event: dict, there: set[str]) -> None:
        """Print a line about a round, or about what has happened to a site."""
        if event["event"] == "learner":
            site, what = self.site_of(event["learner"]), event["what"]
            if what == "joined":
                there.add(site)
                self.say(f"      site {site} joined")
            else:
                if what in ("left", "lost"):
                    there.discard(site)
                self.say(f"      site {site} {what}: {event['why']}")
        if event["event"] == "round":
            marks = "  ".join(f"{site} {'●' if site in there else '○'}" for site in SITES)
            self.say(
                f"round {event['round']:2}  {marks}  counted {event['workers_counted']} of"
                f" {event['workers']}  loss {event['train_loss']:.2f}  sent"
                f" {in_bytes(event['wire_bytes']):>9}  {event['step_s']:5.1f} s"
            )

    def conclude(self) -> None:
        """Print what the kill has cost, and where the report is."""
        events = read_run(self.run).events
        rounds, found = [e for e in events if e["event"] == "round"], totals(events)
        usual_s = sorted(e["step_s"] for e in rounds)[len(rounds) // 2]
        lost = found["worker_rounds"] - found["worker_rounds_counted"]
        waited_s = sum(max(e["step_s"] - usual_s, 0.0) for e in rounds[KILLED:])
        self.say("")
        self.say(
            f"the kill cost {lost} of {found['worker_rounds']} rounds of a site, and the other site"
            f" {waited_s:.1f} s of waiting"
        )
        self.say(f"held-out loss {found['loss']:.3f} {found['loss_unit']}")
        self.say(f"report: {self.run}/report/index.html")

    def close(self) -> None:
        """End all processes that were started here."""
        for process in self.started:
            process.kill()
            process.wait()


def svg(printed: list[tuple[float, str]], hidden: str) -> str:
    """Draw lines that appear at a sixth of their times, the first ones at once.

    Readers without animation see all.
    """
    height, lines = 20 * len(printed) + 16, []
    for number, (seconds, line) in enumerate(printed, 1):
        shown = html.escape(line.replace(hidden, "runs"))
        later = f' class="later" style="animation-delay:{seconds / 6:.2f}s"' if seconds > 1 else ""
        lines.append(f'<text x="12" y="{20 * number}"{later}>{shown}</text>')
    label = "Two sites train one model; site B is killed and joins again"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" role="img"'
            f' aria-label="{label}">',
            f"<title>{label}</title><style>{STYLE}</style>",
            f'<rect width="800" height="{height}" rx="8"/>',
            *lines,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Run the demonstration in a new folder under runs/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--svg", type=Path, help="file to draw what was printed")
    parser.add_argument("--bucket", action="store_true", help="meet in a folder, not by a ticket")
    given = parser.parse_args()
    folder = Path("runs").resolve() / f"two-sites-{time.strftime('%H%M%S')}"
    folder.mkdir(parents=True)
    shown = Demonstration(folder, in_bucket=given.bucket)
    try:
        shown.train()
        shown.conclude()
    finally:
        shown.close()
    if given.svg:
        given.svg.write_text(svg(shown.printed, str(folder.parent)), "utf-8")


if __name__ == "__main__":
    main()
