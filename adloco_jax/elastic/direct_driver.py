"""A run that learners reach directly over iroh: its driver's key, ticket and objects.

The folder `learners` of the run has the endpoint's secret key, its ticket and `run.json`, so that a
driver that is started again is the same for learners. An endpoint is one side's socket in iroh; its
id is its public key. A ticket is the text with which learners find the driver's endpoint. A relay
is a server that passes packets on between computers that cannot reach each other. A driver's
heartbeat is the object `driver/NUMBER.json`, by which learners see whether it is alive; `NUMBER`
counts the run's drivers. A `Store` reads and writes messages in a keeper of objects.
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
_DIFFERENCE_BYTES = 4  # sent for a parameter at most: a single worker sends float32
_LOOK_S = 0.1  # between two tries of a port, or checks of whether learners are connected


class RunObjects(Memory):
    """The objects of a run's driver; `run.json` is kept in a folder, for the next driver."""

    def __init__(self, folder: Path):
        """Begin with the `run.json` that the last driver has left in the folder, if there is one.

        Its driver has ended, as two endpoints cannot have one key at the same time; so it gets a
        heartbeat that says this. A damaged `run.json` is kept: the driver, which reads it next,
        tells the user.
        """
        super().__init__(str(folder))
        self._library = Library({})
        self._file = folder / "run.json"
        if not self._file.exists():
            return
        description = self._file.read_bytes()
        super().put("run.json", description)
        with contextlib.suppress(Refused):  # it is damaged
            run = store.from_json(description, "run.json", RunDescription)
            ended = DriverHeartbeat(count=0, has_ended=True)
            super().put(f"driver/{run.driver}.json", store.to_json(ended))

    def offer(self, library: Library) -> None:
        """Serve files of prepared rows and weights, too: `get` then finds the library's pieces."""
        self._library = library

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none.

        Names that begin with `files/` are those of the library.
        """
        if not name.startswith("files/"):
            return super().get(name)
        return self._library.get(name)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it; `run.json` is written to the folder as well."""
        super().put(name, data)
        if name == "run.json":
            with replaced_file(self._file) as file:
                file.write(data)


def check_possible(settings: Settings, folder: Path) -> None:
    """Check that a run in a folder can let learners join directly.

    Raises ConfigError if iroh is missing, `engine.address` or `engine.relay` is no address, or the
    folder has another run or other settings.
    """
    check_installed("iroh", where="engine.kind = direct")
    _check_address(settings.engine.address)
    _check_relay(settings.engine.relay)
    learners = folder / "learners"
    there = Store(RunObjects(learners), Unneeded())  # unsigned: only the driver writes `run.json`
    bucket.check_continues(there, settings, learners / "id")  # with those in `run.json`


def _check_address(address: str) -> None:
    """Raise ConfigError unless `engine.address` is empty, or IP:PORT."""
    if not address:
        return
    try:
        # `_ports` maps the version of each IP, 4 or 6, to its port: here one version to one port.
        # It raises ValueError if the address is no IP:PORT.
        (port,) = _ports([address]).values()
        if not 0 < port < 2**16:  # 0 is any port, and larger ones do not exist
            raise ValueError  # the ConfigError below is raised in its place
    except ValueError as error:
        raise ConfigError(
            f"engine.address = {address!r}: for direct IP:PORT, such as 203.0.113.7:4433, or empty"
        ) from error


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IP of an address IP:PORT; raise ValueError if there is none.

    The IP of IPv6 is in brackets, as in [2001:db8::7]:5.
    """
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
    """Raise ConfigError unless `engine.relay` is empty, "off" or a URL."""
    import iroh

    if relay in ("", "off"):
        return
    try:
        iroh.RelayMode.custom_from_urls([relay])  # connects to nothing
    except iroh.IrohError as error:
        raise ConfigError(f"engine.relay = {relay!r}: {error.message()}; correct it") from error


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, setup: LearnerSetup, is_over: Callable[[], bool]
) -> Iterator[BucketTransport]:
    """Serve the run's objects to learners with its ticket, which is printed.

    Args:
      address: `engine.address`; not used, as it is in `setup.settings` too.
      num_learners: Not used: learners that are too many wait.
      setup: What each learner is made from. `setup.log` is in the folder `learners` of the run.
      is_over: Returns, at the end of the `with` block, whether the run is over.

    Yields:
      The transport, by which the driver calls learners.

    Raises:
      ConfigError: If the folder has the `run.json` of another run or a damaged one, or a ticket
        that cannot be read.
      ResourceError: If the port cannot be used.
    """
    import iroh

    engine = setup.settings.engine
    folder = Path(setup.log).parent
    folder.mkdir(parents=True, exist_ok=True)
    key = secret_file(folder / "endpoint.key", new_key)
    endpoint, ticket = direct.wait_for(_open(key, engine, folder / "ticket"))

    own_key = new_key()  # of the learner on this computer
    own_id = str(iroh.SecretKey.from_bytes(own_key).public())
    members: set[str] = set()  # empty: all that have the ticket are let in
    if engine.members:
        members = {*engine.members, own_id}
    objects = RunObjects(folder)
    server = Server(objects, ticket.secret, members, most_bytes=_most_bytes(setup), own_id=own_id)
    direct.begin(server.accept(endpoint))  # until the endpoint is closed

    invitation = f"to join from another computer: adloco join {ticket}"
    if setup.by_fit:  # `join` is called in a program that has the model and the rows
        invitation = f"to join from another computer: adloco_jax.join({str(ticket)!r}, ...)"
    try:
        with contextlib.ExitStack() as stack:
            own = own_learner(setup, str(_here(ticket)), is_over, key=own_key)
            stack.enter_context(own)
            # Unsigned: the server knows each learner by the key of its connection.
            there = Store(objects, Unneeded())
            driving = bucket.driving(there, setup, is_over, invitation, objects.offer, server.owner)
            yield stack.enter_context(driving)
    finally:
        direct.wait_for(_close(endpoint, server))


async def _open(key: bytes, engine: EngineSettings, path: Path) -> tuple[Any, Ticket]:
    """Open the driver's endpoint, and write its ticket to the file at `path`; return both.

    `key` is the endpoint's secret key. For IPv4 and IPv6 each, the port is that of
    `engine.address`, else that of the ticket of an earlier start, else any that is free. Raises
    ResourceError if one cannot be used, ConfigError if the earlier ticket cannot be read.
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
            await asyncio.wait_for(endpoint.online(), _ONLINE_S)  # a relay has answered
        except TimeoutError:
            say("no relay answers, so learners need an address of this computer that they reach")

    # Where learners reach this computer: the addresses and the relay that iroh has found.
    found = endpoint.addr()
    addresses = _reachable(found.direct_addresses())
    if engine.address:
        addresses.insert(0, engine.address)
    if not addresses:  # no network: only this computer reaches it
        _, _, bound_port = endpoint.bound_sockets()[0].rpartition(":")
        addresses = [f"127.0.0.1:{bound_port}"]

    # The run's secret is made from the key, so it stays when the driver is started again.
    secret = hashlib.sha256(key + b"secret of the run").digest()[:SECRET_BYTES]
    ticket = Ticket(
        key=found.id().to_bytes(),
        secret=secret,
        addresses=tuple(addresses),
        relay=found.relay_url() or "",
    )
    with replaced_file(path, mode=SECRET_MODE) as file:  # which only its user may read
        file.write(str(ticket).encode())
    return endpoint, ticket


def _reachable(addresses: list[str]) -> list[str]:
    """Return those of this computer's `addresses` IP:PORT that other computers may reach.

    They are at most `_MOST_ADDRESSES`. The first is that of the route to the internet, if there is
    one.
    """
    route_ip = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):  # there is no route
            # Of UDP this sends nothing: the system only chooses a route, and this socket's address.
            probe.connect(("192.0.2.1", 9))  # an address for documentation
            route_ip, _ = probe.getsockname()
    ips = {}  # of usable addresses, by address
    for address in addresses:
        ip = _ip_of(address)
        if not (ip.is_loopback or ip.is_link_local):  # only this computer, or its own net, uses it
            ips[address] = ip
    usable = sorted(ips, key=lambda address: str(ips[address]) != route_ip)  # False is first
    return usable[:_MOST_ADDRESSES]


def _here(ticket: Ticket) -> Ticket:
    """Return a ticket for the learner on this computer, with loopback addresses and no relay."""
    loopback = {4: "127.0.0.1", 6: "[::1]"}  # by the version of IP
    addresses = []
    for version, port in _ports(ticket.addresses).items():
        addresses.append(f"{loopback[version]}:{port}")
    return dataclasses.replace(ticket, addresses=tuple(addresses), relay="")


def _most_bytes(setup: LearnerSetup) -> int:
    """Return the largest size of a learner's response in bytes.

    A learner may run all workers. For each, a response has either a difference (the trainer's
    parameters minus the worker's) or an inner optimizer state.
    """
    spec = setup.spec
    state_bytes = array_bytes(state_form(spec))
    difference_bytes = _DIFFERENCE_BYTES * spec.num_params
    num_workers = setup.settings.ensemble.num_workers
    other_bytes = bucket.max_object_bytes(())  # of an object without arrays
    return other_bytes + num_workers * max(difference_bytes, state_bytes)


async def _close(endpoint: Any, server: Server) -> None:
    """Close the endpoint, once learners have had time to see that the driver has ended.

    They close their connections when they have seen it. After a signal they have less time.
    """
    patience_s = _LAST_S
    if processes.is_asked_to_stop():
        patience_s = store.LAST_S
    until_s = time.monotonic() + patience_s
    while server.num_connections and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)
    with contextlib.suppress(TimeoutError):  # the process goes on, or ends, without it
        await asyncio.wait_for(endpoint.close(), store.LAST_S)
