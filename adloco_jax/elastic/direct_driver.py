"""A run that learners reach directly over iroh: its driver's key, ticket and objects.

The folder `learners` of the run has the endpoint's secret key, its ticket and `run.json`, so that a
driver that is started again is the same for learners. An endpoint is one side's socket in iroh; its
id is its public key. A ticket is the text with which learners find the driver's endpoint. A relay
is a server that passes packets on between computers that cannot reach each other.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from adloco_jax.data.disk import replaced_file
from adloco_jax.elastic import bucket, direct, store
from adloco_jax.elastic.bucket import BucketTransport
from adloco_jax.elastic.child import own_learner
from adloco_jax.elastic.direct import (
    SECRET_BYTES,
    SECRET_MODE,
    Ticket,
    new_key,
    read_ticket,
    secret_file,
)
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
_DIFFERENCE_BYTES = 4  # of a parameter at most: a single worker sends float32
_LOOK_S = 0.1  # from one look at whether something has changed to the next


class RunObjects(Memory):
    """The objects of a run's driver; `run.json` is kept in a folder, for the next driver."""

    def __init__(self, folder: Path):
        """Begin with the `run.json` that the last driver has left in the folder, if there is one.

        That driver is taken to have ended, and learners are told so: two endpoints cannot have one
        key at the same time. A `run.json` that is damaged is kept, for whoever reads it to refuse.
        """
        super().__init__(str(folder))
        self._library = Library({})
        self._file = folder / "run.json"
        if not self._file.exists():
            return
        description = self._file.read_bytes()
        super().put("run.json", description)
        with contextlib.suppress(Refused):  # is refused, and told, by whoever reads it
            run = store.from_json(description, "run.json", RunDescription)
            ended = DriverHeartbeat(count=0, has_ended=True)
            super().put(f"driver/{run.driver}.json", store.to_json(ended))

    def offer(self, library: Library) -> None:
        """Serve the files of a library, too."""
        self._library = library

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none.

        Names that begin with `files/` are those of the library.
        """
        if not name.startswith("files/"):
            return super().get(name)
        return self._library.get(name)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        super().put(name, data)
        if name == "run.json":
            with replaced_file(self._file) as file:
                file.write(data)


def check_possible(settings: Settings, folder: Path) -> None:
    """Check that a run in a folder can let learners join directly; raise ConfigError if not."""
    check_installed("iroh", "", "engine.kind = direct")
    _check_external(settings.engine.address)
    _check_relay(settings.engine.relay)
    learners = folder / "learners"
    there = Store(RunObjects(learners), Unneeded())
    bucket.check_continues(there, settings, learners / "id")


def _check_external(address: str) -> None:
    """Raise ConfigError unless `engine.address` is empty, or IP:PORT."""
    if not address:
        return
    try:
        (port,) = _ports([address]).values()
        if not 0 < port < 2**16:  # 0 is any port, and larger ones do not exist
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"engine.address = {address!r}: for direct IP:PORT, such as 203.0.113.7:4433, or empty"
        ) from error


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IP of an address, such as 1.2.3.4:5 or [2001:db8::7]:5; or raise ValueError."""
    host, _, _ = address.rpartition(":")
    return ipaddress.ip_address(host.strip("[]"))


def _ports(addresses: Iterable[str]) -> dict[int, int]:
    """Return the UDP ports of addresses IP:PORT by the version of their IP, 4 or 6.

    An endpoint has a socket for each version, with a port of its own. The first address of each
    counts. Raises ValueError if one is no IP:PORT.
    """
    ports: dict[int, int] = {}
    for address in addresses:
        _, _, port = address.rpartition(":")
        ports.setdefault(_ip_of(address).version, int(port))
    return ports


def _check_relay(relay: str) -> None:
    """Raise ConfigError unless `engine.relay` is empty, "off" or an address."""
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

    Raises ResourceError if the port cannot be used, ConfigError if the folder has the `run.json` of
    another run, or a ticket that cannot be read.

    Args:
      address: `engine.address`, which is also in the settings.
      num_learners: Not used: learners that are too many wait.
      given: That from which each learner is made.
      is_over: Returns, at the end of the `with` block, whether the run is over.
    """
    import iroh

    engine = given.settings.engine
    folder = Path(given.log).parent  # `learners` in the run's folder
    folder.mkdir(parents=True, exist_ok=True)
    key = secret_file(folder / "endpoint.key", new_key)
    endpoint, ticket = direct.wait_for(_open(key, engine, folder / "ticket"))

    own_key = new_key()  # of the learner on this computer
    own_id = str(iroh.SecretKey.from_bytes(own_key).public())
    members: set[str] = set()  # empty: all that have the ticket are let in
    if engine.members:
        members = {*engine.members, own_id}
    objects = RunObjects(folder)
    server = Server(objects, ticket.secret, members, most_bytes=_most_bytes(given), own_id=own_id)
    direct.begin(server.accept(endpoint))  # until the endpoint is closed

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
    """Open the driver's endpoint, and write its ticket to the file at `path`; return both.

    `key` is the endpoint's secret key. The ports of IPv4 and of IPv6 are that of `engine.address`,
    else those of the ticket of an earlier start, else any that are free. Raises ResourceError if
    one cannot be used, ConfigError if the earlier ticket cannot be read.
    """
    import iroh

    wanted = []  # addresses whose ports to use, the first one of each version of IP
    if engine.address:
        wanted.append(engine.address)
    if path.exists():
        wanted += read_ticket(path.read_text("utf-8")).addresses
    ports = _ports(wanted)
    port = ports.get(4, 0)  # 0: any that is free
    port_v6 = ports.get(6, 0)

    # Tried for a while, as an earlier run of this process may not have freed its port yet.
    until_s = time.monotonic() + _FREE_S
    while True:
        try:
            endpoint = await direct.bind(key, relay=engine.relay, port=port, port_v6=port_v6)
            break
        except iroh.IrohError as error:
            if time.monotonic() > until_s:
                numbers = sorted({*ports.values()}) or ["of any number"]
                used = " and ".join(str(number) for number in numbers)
                raise ResourceError(
                    f"engine.kind = direct: cannot use UDP port {used} ({error.message()}); end the"
                    " process that uses it, or name another port (engine.address)"
                ) from error
        await asyncio.sleep(_LOOK_S)
    if engine.relay != "off":
        try:
            await asyncio.wait_for(endpoint.online(), _ONLINE_S)
        except TimeoutError:
            say("no relay answers, so learners need an address of this computer that they reach")

    # Where learners reach this computer.
    place = endpoint.addr()
    addresses = _reachable(place.direct_addresses())
    if engine.address:
        addresses.insert(0, engine.address)
    if not addresses:  # no network: only this computer reaches it
        _, _, bound_port = endpoint.bound_sockets()[0].rpartition(":")
        addresses = [f"127.0.0.1:{bound_port}"]

    # The run's secret is made from the key, so it stays when the driver is started again.
    secret = hashlib.sha256(key + b"secret of the run").digest()[:SECRET_BYTES]
    ticket = Ticket(
        key=place.id().to_bytes(),
        secret=secret,
        addresses=tuple(addresses),
        relay=place.relay_url() or "",
    )
    with replaced_file(path, SECRET_MODE) as file:
        file.write(str(ticket).encode())
    return endpoint, ticket


def _reachable(addresses: list[str]) -> list[str]:
    """Return the addresses IP:PORT that others may reach, at most `_MOST_ADDRESSES`.

    The first is that of the route to the internet, if there is one.
    """
    route_ip = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # an address of documentation; sends nothing
            route_ip, _ = probe.getsockname()
    ips = {}  # by address
    for address in addresses:
        ip = _ip_of(address)
        if not (ip.is_loopback or ip.is_link_local):
            ips[address] = ip
    usable = sorted(ips, key=lambda address: str(ips[address]) != route_ip)  # False is first
    return usable[:_MOST_ADDRESSES]


def _here(ticket: Ticket) -> Ticket:
    """Return the ticket for a learner on this computer: its addresses are loopback ones."""
    loopback = {4: "127.0.0.1", 6: "[::1]"}  # by the version of IP
    addresses = []
    for version, port in _ports(ticket.addresses).items():
        addresses.append(f"{loopback[version]}:{port}")
    return dataclasses.replace(ticket, addresses=tuple(addresses), relay="")


def _most_bytes(given: LearnerSetup) -> int:
    """Return the largest size of a response in bytes.

    For each of all workers it has a difference, or an inner state.
    """
    spec = given.spec
    state_bytes = array_bytes(state_form(spec))
    difference_bytes = _DIFFERENCE_BYTES * spec.num_params
    num_workers = given.settings.ensemble.num_workers
    # `()` has no arrays: what an object may have besides.
    return bucket.max_object_bytes(()) + num_workers * max(difference_bytes, state_bytes)


async def _close(endpoint: Any, server: Server) -> None:
    """Close the endpoint, once learners have had time to see that the driver has ended.

    They close their connections then. After a signal they have less time.
    """
    patience_s = _LAST_S
    if processes.is_asked_to_stop():
        patience_s = store.LAST_S
    until_s = time.monotonic() + patience_s
    while server.num_connections and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)
    with contextlib.suppress(TimeoutError):  # the process goes on, or ends, without it
        await asyncio.wait_for(endpoint.close(), store.LAST_S)
