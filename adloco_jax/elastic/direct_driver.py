"""A run that learners reach directly: its driver's key, ticket and objects."""

import asyncio
import contextlib
import dataclasses
import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adloco_jax.elastic import bucket, direct, store
from adloco_jax.elastic.bucket import BucketTransport
from adloco_jax.elastic.child import own_learner
from adloco_jax.elastic.direct import Ticket, read_ticket, secret_file
from adloco_jax.elastic.files import Library
from adloco_jax.elastic.learner import LearnerSetup, state_form
from adloco_jax.elastic.messages import DriverHeartbeat, Refused, RunDescription, array_bytes
from adloco_jax.elastic.objects import Memory
from adloco_jax.elastic.served import Server
from adloco_jax.elastic.signatures import Unneeded
from adloco_jax.elastic.store import Store
from adloco_jax.errors import ConfigError, ResourceError, check_installed
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.settings import EngineSettings, Settings

_ONLINE_S = 5.0  # to wait for a relay
_FREE_S = 3.0  # to wait for a port that this process has closed
_LAST_S = 15.0  # to wait for learners to see that the run is over
_MOST_ADDRESSES = 4  # of this computer in a ticket


class RunObjects(Memory):
    """The objects of a run's driver; `run.json` is kept in a folder, for the next driver."""

    def __init__(self, folder: Path):
        """Begin with what the last driver has left in the folder, which has then ended."""
        super().__init__(str(folder))
        self._library = Library({})
        self._file = folder / "run.json"
        if not self._file.exists():
            return
        described = self._file.read_bytes()
        super().put("run.json", described)
        with contextlib.suppress(Refused):
            run = store.from_json(described, "run.json", RunDescription)
            ended = DriverHeartbeat(count=0, has_ended=True)
            super().put(f"driver/{run.driver}.json", store.to_json(ended))

    def offer(self, library: Library) -> None:
        """Serve the files of a library, too."""
        self._library = library

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none."""
        if not name.startswith("files/"):
            return super().get(name)
        data = self._library.read(name)
        return None if data is None else (len(data), iter([data]))

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        super().put(name, data)
        if name == "run.json":
            self._file.write_bytes(data)


def check_possible(settings: Settings, folder: Path) -> None:
    """Check that a run in a folder can let learners join directly; raise ConfigError if not."""
    check_installed("iroh", "", "engine.kind = direct")
    _external(settings.engine.address)
    _check_relay(settings.engine.relay)
    learners = folder / "learners"
    there = Store(RunObjects(learners), Unneeded())
    bucket.check_continues(there, settings, learners / "id")


def _external(address: str) -> tuple[str, int] | None:
    """Return the IP and port of `engine.address`; None if it is empty."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        if not 0 < int(port) < 2**16:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"engine.address = {address!r}: for direct IP:PORT, such as 203.0.113.7:4433, or empty"
        ) from error
    return host, int(port)


def _check_relay(relay: str) -> None:
    import iroh

    if relay in ("", "off"):
        return
    try:
        iroh.RelayMode.custom_from_urls([relay])
    except iroh.IrohError as error:
        raise ConfigError(f"engine.relay = {relay!r}: {error.message()}; correct it") from error


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, given: LearnerSetup, is_over: Callable[[], bool]
) -> Iterator[BucketTransport]:
    """Serve the run's objects to learners with its ticket, which is printed.

    Raises ConfigError or ResourceError if the port or the relay cannot be used.
    """
    import iroh

    engine, folder = given.settings.engine, Path(given.log).parent
    folder.mkdir(parents=True, exist_ok=True)
    key = secret_file(folder / "endpoint.key", lambda: os.urandom(32))
    endpoint, ticket = direct.wait_for(_open(key, engine, folder / "ticket"))
    own_key = os.urandom(32)
    own_id = str(iroh.SecretKey.from_bytes(own_key).public())
    members = {*engine.members, own_id} if engine.members else set()
    objects = RunObjects(folder)
    server = Server(objects, ticket.secret, members, most_bytes=_most_bytes(given), own_id=own_id)
    direct.begin(server.accept(endpoint))
    invitation = f"to join from another computer: adloco join {ticket}"
    if given.by_fit:
        invitation = f"to join from another computer: adloco_jax.join({str(ticket)!r}, ...)"
    try:
        with contextlib.ExitStack() as stack:
            own = own_learner(given, str(_here(ticket)), is_over, key=own_key)
            stack.enter_context(own)
            there = Store(objects, Unneeded())
            driving = bucket.driving(there, given, is_over, invitation, objects.offer, server.owner)
            yield stack.enter_context(driving)
    finally:
        direct.wait_for(_close(endpoint, server))


async def _open(key: bytes, engine: EngineSettings, path: Path) -> tuple[Any, Ticket]:
    """Open the driver's endpoint, at the port of its last start; write its ticket to a file."""
    import iroh

    external, port = _external(engine.address), 0
    if external is not None:
        port = external[1]
    elif path.exists():
        before = read_ticket(path.read_text("utf-8"))
        port = int(before.addresses[0].rpartition(":")[2])
    until_s = time.monotonic() + _FREE_S
    while True:
        try:
            endpoint = await direct.bind(key, relay=engine.relay, port=port)
            break
        except iroh.IrohError as error:
            if time.monotonic() > until_s:
                raise ResourceError(
                    f"engine.kind = direct: cannot use UDP port {port} ({error.message()}); end the"
                    " process that uses it, or name another port (engine.address)"
                ) from error
        await asyncio.sleep(0.1)
    if engine.relay != "off":
        try:
            await asyncio.wait_for(endpoint.online(), _ONLINE_S)
        except TimeoutError:
            say("no relay answers, so learners need an address of this computer that they reach")
    found = endpoint.addr()
    addresses = _reachable(found.direct_addresses())
    if external is not None:
        addresses.insert(0, engine.address)
    if not addresses:
        addresses = [f"127.0.0.1:{endpoint.bound_sockets()[0].rpartition(':')[2]}"]
    secret = hashlib.sha256(key + b"secret of the run").digest()[:16]
    ticket = Ticket(found.id().to_bytes(), secret, tuple(addresses), found.relay_url() or "")
    secret_file(path, lambda: b"").decode()
    path.write_text(str(ticket), "utf-8")
    return endpoint, ticket


def _reachable(addresses: list[str]) -> list[str]:
    """Return the addresses that others may reach, first that of the route to the internet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        first = ""
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # sends nothing
            first = probe.getsockname()[0]
    hosts = {each: ipaddress.ip_address(each.rpartition(":")[0].strip("[]")) for each in addresses}
    usable = [a for a, ip in hosts.items() if not (ip.is_loopback or ip.is_link_local)]
    usable.sort(key=lambda address: str(hosts[address]) != first)
    return usable[:_MOST_ADDRESSES]


def _here(ticket: Ticket) -> Ticket:
    """Return the ticket for a learner on this computer."""
    port = ticket.addresses[0].rpartition(":")[2]
    return dataclasses.replace(ticket, addresses=(f"127.0.0.1:{port}",), relay="")


_DIFFERENCE_BYTES = 4  # of a parameter at most: a single worker sends float32


def _most_bytes(given: LearnerSetup) -> int:
    """Return the largest size of a response in bytes."""
    spec, num_workers = given.spec, given.settings.ensemble.num_workers
    states = array_bytes(state_form(spec))
    differences = _DIFFERENCE_BYTES * spec.num_params
    return bucket.limit(()) + num_workers * max(differences, states)


async def _close(endpoint: Any, server: Server) -> None:
    """Close the endpoint, once learners have had time to see that the driver has ended."""
    until_s = time.monotonic() + (store.LAST_S if processes.is_asked_to_stop() else _LAST_S)
    while server.num_connections and time.monotonic() < until_s:
        await asyncio.sleep(0.1)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(endpoint.close(), store.LAST_S)
