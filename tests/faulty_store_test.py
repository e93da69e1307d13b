"""scripts/faulty_store.py: what its faults look like to a client of S3."""

import time

import faulty_store
import pytest

obstore = pytest.importorskip("obstore")
pytest.importorskip("moto")
NO_RETRY = {"max_retries": 0, "backoff": {}}


@pytest.fixture(scope="module")
def server():
    with faulty_store.s3_server("bkt") as url:
        yield url


@pytest.fixture
def store(server, monkeypatch):
    """A client behind a proxy, and the list of the faults of its next requests."""
    faults = []
    with faulty_store.faulty(server, lambda *_: faults.pop(0) if faults else "") as url:
        for name, value in faulty_store.environment(url).items():
            monkeypatch.setenv(name, value)
        # no connection is used again: the proxy may have closed it
        options = {"allow_http": True, "pool_max_idle_per_host": "0"}
        how = {"retry_config": NO_RETRY, "client_options": options}
        yield obstore.store.from_url("s3://bkt/run", **how), faults


def read(store, name):
    return bytes(obstore.get(store, name).bytes())


def test_without_a_fault_the_proxy_changes_nothing(store):
    store, _ = store
    data = bytes(range(256)) * 4096
    obstore.put(store, "a", data)
    assert read(store, "a") == data
    assert bytes(obstore.get_range(store, "a", start=5, length=3)) == data[5:8]
    assert obstore.head(store, "a")["size"] == len(data)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "a", b"", mode="create")
    obstore.delete(store, "a")
    with pytest.raises(FileNotFoundError):
        read(store, "a")


@pytest.mark.parametrize("fault", faulty_store.FAULTS)
def test_a_fault_of_a_write_and_of_a_read(store, fault, monkeypatch):
    monkeypatch.setattr(faulty_store, "SLOW_S", 0.3)
    store, faults = store
    data, name = bytes(1000), f"{fault}/data"
    begin_s = time.monotonic()
    faults[:] = [fault]
    if fault in ("slow", "wrong", "cut"):  # the answer to a write has no body
        obstore.put(store, name, data)
    else:
        with pytest.raises(Exception, match="(?i)error|denied|permission"):
            obstore.put(store, name, data)
    assert faults == []
    is_there = fault in ("lost", "slow", "wrong", "cut")
    assert is_there == bool([*obstore.list(store, fault).collect()])
    obstore.put(store, name, data)
    faults[:] = [fault]
    if fault in ("slow", "wrong"):
        assert (read(store, name) == data) == (fault == "slow")
    else:
        with pytest.raises(Exception, match="(?i)error|denied|permission"):
            read(store, name)
    assert (time.monotonic() - begin_s > 0.6) >= (fault == "slow")
    assert read(store, name) == data
