"""Fixtures and markers shared by all tests.

`cuda` tests are skipped without a GPU unless FAIL_WITHOUT_CUDA is set: then they fail,
so that a broken GPU runner cannot pass silently.
"""

import ctypes
import faulthandler
import os
import signal
import zlib

import pytest

# A shell ignores SIGINT for its background jobs, and subprocesses inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# OpenMP's threads spin for a while when they run out of work, by default. On a machine
# with other load, or with less than a core for each, that makes the tests several
# times slower. libgomp reads this when torch loads it; subprocesses inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

import one_rank  # noqa: E402
import torchkv  # noqa: E402

# PyTorch 2.11 warns of the first sparse tensor in a process that has not chosen.
torch.sparse.check_sparse_tensor_invariants.disable()

# make forward-test: a library that puts a store of its own before "local" and "device".
if library := os.environ.get("TORCHKV_TEST_STORE"):
    ctypes.CDLL(os.path.abspath(library))

# make one-rank-test: the same types as the only rank of a job.
ONE_RANK = os.environ.get("TORCHKV_TEST_TYPES", "").split(",") * one_rank.is_used()
if ONE_RANK:
    one_rank.start()

DEADLOCK_S = 300.0
SLOW_DEADLOCK_S = 1500.0


def pytest_addoption(parser):
    parser.addoption(
        "--slow-part",
        metavar="I/N",
        help="of the slow tests, run part I (from 0) of N, chosen by their names",
    )


def pytest_collection_modifyitems(config, items):
    if ONE_RANK:
        kept = [item for item in items if one_rank.applies(item)]
        config.hook.pytest_deselected(items=[i for i in items if i not in {*kept}])
        items[:] = kept
    if part := config.getoption("slow_part"):
        index, count = map(int, part.split("/"))
        left_out = [
            item
            for item in items
            if item.get_closest_marker("slow")
            and zlib.crc32(item.nodeid.encode()) % count != index
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "slow: only make test-all runs it")
    # Output capturing is off here, so this is the terminal the watchdog can write to.
    config.watchdog_stderr = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.watchdog_stderr)


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA"):
            pytest.fail("FAIL_WITHOUT_CUDA is set, but no CUDA device is available")
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def watchdog(request):
    """Ends the run with every thread's traceback instead of hanging."""
    slow = request.node.get_closest_marker("slow")
    faulthandler.dump_traceback_later(
        SLOW_DEADLOCK_S if slow else DEADLOCK_S,
        exit=True,
        file=request.config.watchdog_stderr,
    )
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def restored_rng():
    """No test depends on the tests before it."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Tests with several processes leave no processes and no sockets."""
    if request.path.parent.name != "dist":
        yield
        return
    import leftovers  # which only these need

    with leftovers.none():
        yield


@pytest.fixture(scope="module")
def one_thread():
    """For training small models: synchronizing threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def hosts():
    """Two, in network namespaces."""
    import ranks  # which only tests with several processes need

    try:
        made = ranks.Hosts(2)
    except ranks.NoHosts as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(params=ONE_RANK or ["local", "device", "sharded"])
def each_kv(request, monkeypatch):
    """A store of each type, and one that shards what is pushed as a list."""
    if request.param == "sharded":
        monkeypatch.setenv("TORCHKV_PLACES", "cpu,cpu,cpu")
    type = "device" if request.param == "sharded" else request.param
    with torchkv.create(type) as store:
        yield store


@pytest.fixture
def streams():
    """New streams, ordered after all previous work."""
    made = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    yield made
    torch.cuda.synchronize()


# make places-test and make forward-test repeat the tests for stores that work in
# another way: for the type that has all of them.
REPEATED = {"TORCHKV_PLACES", "TORCHKV_TEST_STORE"} & {*os.environ}


@pytest.fixture(params=ONE_RANK or (["device"] if REPEATED else ["local", "device"]))
def store_type(request):
    """The store types of the contract battery."""
    return request.param


@pytest.fixture
def kv(store_type):
    """An empty store of each type."""
    with torchkv.create(store_type) as store:
        yield store


@pytest.fixture(params=["device", "sharded"])
def device_kv(request, monkeypatch):
    """An empty store of type device, and one that shards what is pushed as a list."""
    if request.param == "sharded":
        monkeypatch.setenv("TORCHKV_PLACES", "cpu,cpu,cpu")
    with torchkv.create("device") as store:
        yield store


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def devices(request):
    """Four devices for replicas: the CPU, or the available GPUs in turn."""
    if request.param == "cpu":
        return [torch.device("cpu")] * 4
    count = torch.cuda.device_count()
    return [torch.device("cuda", i % count) for i in range(4)]
