"""Ranks on two hosts: secrets, and networks that come and go.

The hosts are namespaces of Linux (see ranks.py); where this user may not make them, the
tests are skipped.
"""

import os
import re
import signal
import time

import pytest
import torch

import ranks
import torchkv

SECRET = "0123456789abcdef0123456789abcdef"
OTHER_SECRET = SECRET[::-1]
HEARTBEAT_S = 0.75
LOST_S = 4 * HEARTBEAT_S
KEYS = ["small", "sharded"]
SIZES = [(2, 3), (60_000,)]


def outcome(function):
    """What a call raises: its type's name and text, and the seconds it took."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


def security_options(security):
    return {"security": "none"} if security == "none" else {}


# -- who may take part


def train(rank, type, options):
    kv = torchkv.create(type, timeout=30, **options)
    kv.init(KEYS, [torch.zeros(size) for size in SIZES])
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    for _ in range(5):
        kv.push(KEYS, [torch.full(size, rank + 1.0) for size in SIZES])
    kv.barrier()
    values = [kv.pull(key).unique().tolist() for key in KEYS]
    kv.barrier()
    kv.close()
    return values


def secret_file(folder, secret=SECRET, mode=0o600):
    path = folder / "secret"
    path.write_text(secret + "\n")
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    "type, security",
    [("dist_sync", "secret"), ("dist_async", "file"), ("dist_sync", "none")],
)
def test_ranks_on_two_hosts_train(hosts, tmp_path, type, security):
    environment = {
        "secret": {"TORCHKV_JOB_SECRET": SECRET},
        "file": {"TORCHKV_JOB_SECRET_FILE": secret_file(tmp_path)},
        "none": {},
    }[security]
    values = ranks.run(
        *(train, 2, type, security_options(security)),
        hosts=hosts,
        environment=environment,
    )
    assert values == [[[-15.0], [-15.0]]] * 2


def create(rank, options):
    result = outcome(lambda: torchkv.create("dist_sync", **options).barrier())
    if result[0] is None:
        time.sleep(1.0)  # the other rank may need this one for its error
    return result


def create_two_stores(rank, folder):
    path = os.path.join(folder, str(rank))
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    for name in ("a", "b"):
        with torchkv.create("dist_sync", name=name, security="none") as kv:
            kv.barrier()
    with open(path) as file:
        return file.read()


def test_a_trusted_network_is_a_warning_once(hosts, tmp_path):
    texts = ranks.run(create_two_stores, 2, str(tmp_path), hosts=hosts)
    for text in texts:
        assert text.count("can read what the ranks exchange") == 1, text


REFUSED = {
    "none": ["TORCHKV_JOB_SECRET", "openssl rand -hex 32", "security='none'"],
    "short": ["at least 16 bytes"],
    "readable": ["TORCHKV_JOB_SECRET_FILE", "only this user may read", "chmod 600"],
    "link": ["TORCHKV_JOB_SECRET_FILE", "link"],
    "missing": ["TORCHKV_JOB_SECRET_FILE", "No such file"],
}


def refused_environment(case, folder):
    """What sets a secret that is refused."""
    if case == "none":
        return {}
    if case == "short":
        return {"TORCHKV_JOB_SECRET": SECRET[:15]}
    path = secret_file(folder, mode=0o644 if case == "readable" else 0o600)
    if case == "link":
        os.symlink(path, folder / "link")
        path = str(folder / "link")
    if case == "missing":
        os.unlink(path)
    return {"TORCHKV_JOB_SECRET_FILE": path}


def check_refusal(hosts, folder, case):
    results = ranks.run(
        *(create, 2, {"timeout": 10}),
        hosts=hosts,
        environment=refused_environment(case, folder),
    )
    for kind, text, elapsed in results:
        assert kind == "RuntimeError"
        for expected in REFUSED[case]:
            assert expected in text
        assert elapsed < 5


def test_without_a_secret_create_refuses_and_says_how(hosts, tmp_path):
    check_refusal(hosts, tmp_path, "none")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in REFUSED if case != "none"])
def test_secrets_that_are_none_are_refused(hosts, tmp_path, case):
    check_refusal(hosts, tmp_path, case)


SECRETS_DIFFER = r"secrets differ: one on rank 0; another on rank 1$"
NOT_THE_SAME = {
    "another": ({"TORCHKV_JOB_SECRET": OTHER_SECRET}, SECRETS_DIFFER, SECRETS_DIFFER),
    "none": (
        {"TORCHKV_JOB_SECRET": ""},
        r"secrets differ: one on rank 0; none on rank 1$",
        r"expected a secret in the environment variable TORCHKV_JOB_SECRET",
    ),
    "short": (
        {"TORCHKV_JOB_SECRET": SECRET[:15]},
        r"secrets differ: one on rank 0; none on rank 1$",
        r"at least 16 bytes",
    ),
}


def create_twice(rank, secret):
    """The second time with the right secret."""
    first = outcome(lambda: torchkv.create("dist_sync", timeout=30))
    os.environ["TORCHKV_JOB_SECRET"] = secret
    kv = torchkv.create("dist_sync", timeout=30)
    kv.barrier()
    kv.close()
    return first


@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_another_secret_on_one_rank_is_an_error_of_all_at_once(hosts, case):
    environment, *messages = NOT_THE_SAME[case]
    results = ranks.run(
        *(create_twice, 2, SECRET),
        hosts=hosts,
        environment={"TORCHKV_JOB_SECRET": SECRET},
        environments={1: environment},
    )
    for (kind, text, elapsed), message in zip(results, messages, strict=True):
        assert kind == "RuntimeError", text
        assert re.search(message, text), text
        assert "TORCHKV_JOB_SECRET" in text or case == "short"
        assert SECRET not in text and OTHER_SECRET not in text
        assert elapsed < 10


# -- partitions


def gradient(step, rank):
    return float((step * 7 + rank * 3) % 11 - 5)


def steps(rank, folder, options):
    """Trains and checks every weight until the file `stop`, or an error."""
    kv = torchkv.create("dist_sync", timeout=30, **options)
    out = [torch.zeros(size) for size in SIZES]
    stop = torch.zeros(1)
    kv.init([*KEYS, "stop"], [*out, stop])
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    expected, slowest, step = 0.0, 0.0, 0
    progress = os.path.join(folder, str(rank))
    while stop.item() == 0:
        open(progress, "w").close()
        number = gradient(step, rank)
        stopping = float(rank == 0 and os.path.exists(os.path.join(folder, "stop")))
        values = [torch.full(size, number) for size in SIZES]
        values.append(torch.full((1,), stopping))
        kind, text, elapsed = outcome(
            lambda values=values: kv.pushpull([*KEYS, "stop"], values, out=[*out, stop])
        )
        if kind is not None:
            return {"error": (kind, text), "at": time.monotonic(), "step": step}
        expected -= gradient(step, 0) + gradient(step, 1)
        for value in out:
            assert value.eq(expected).all(), (step, value, expected)
        slowest = max(slowest, elapsed)
        step += 1
        time.sleep(0.005)
    kv.close()
    return {"slowest": slowest, "step": step}


def start_steps(hosts, folder, options):
    return ranks.Ranks(
        *(steps, 2, str(folder), options),
        hosts=hosts,
        environment={"TORCHKV_JOB_SECRET": SECRET},
    )


def wait_for_steps(job, folder):
    """Both ranks' first steps, or their next ones."""
    start, end = time.time(), time.monotonic() + 30
    files = [folder / "0", folder / "1"]
    while not all(file.exists() and file.stat().st_mtime > start for file in files):
        job.check()
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.2)


def check_survival(hosts, folder, options, partitions):
    """Partitions of up to 3/8 of the silence that counts as a loss.

    TCP repeats what was lost r, 3 r, 7 r, 15 r, ... later, for an r of at least 0.2 s
    that grows with the delays it has seen: once between 3/8 and 7/8 of that silence.
    """
    with start_steps(hosts, folder, options) as job:
        wait_for_steps(job, folder)
        for seconds in partitions:
            hosts.connect(1, False)
            time.sleep(seconds)
            hosts.connect(1, True)
            wait_for_steps(job, folder)
        (folder / "stop").touch()
        for result in job.join():
            assert "error" not in result, result
            assert result["slowest"] > 0.8 * max(partitions)


def check_loss(hosts, folder, options, lost_s):
    try:
        with start_steps(hosts, folder, options) as job:
            wait_for_steps(job, folder)
            start = time.monotonic()
            hosts.connect(1, False)
            results = job.join(lost_s + 20)
    finally:
        hosts.connect(1, True)
    for rank, result in enumerate(results):
        kind, text = result["error"]
        assert kind in ("WorkerLostError", "ServerLostError"), text
        assert f"rank {1 - rank} is lost" in text
        # Silent for four heartbeats, the last of which came up to one ago.
        assert lost_s * 3 / 4 - 0.2 < result["at"] - start < lost_s * 5 / 4 + 1.5


@pytest.mark.parametrize("security", ["curve", "none"])
def test_a_partition_of_a_second_is_survived(hosts, tmp_path, security):
    options = {"heartbeat": HEARTBEAT_S, **security_options(security)}
    check_survival(hosts, tmp_path, options, [1.0])


@pytest.mark.parametrize("security", ["curve", "none"])
def test_a_longer_partition_is_an_error_on_both_sides(hosts, tmp_path, security):
    options = {"heartbeat": HEARTBEAT_S, **security_options(security)}
    check_loss(hosts, tmp_path, options, LOST_S)


@pytest.mark.slow
@pytest.mark.parametrize("security", ["curve", "none"])
def test_many_partitions_are_survived(hosts, tmp_path, security):
    check_survival(hosts, tmp_path, security_options(security), [1.5, 0.1, 1.5, 0.5])


@pytest.mark.slow
def test_a_partition_of_the_default_four_seconds_is_an_error(hosts, tmp_path):
    check_loss(hosts, tmp_path, {}, 4.0)


# -- a process that ends


def end_with_a_child(rank, folder):
    """Rank 1 ends, but not a child of it that has its connections: a DataLoader's."""
    kv = torchkv.create("dist_sync", timeout=30, heartbeat=HEARTBEAT_S)
    kv.init("w", torch.zeros(2))
    kv.barrier()
    if rank == 1:
        if os.fork() == 0:
            end = time.monotonic() + 60
            while time.monotonic() < end and not os.path.exists(f"{folder}/stop"):
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: kv.pushpull("w", torch.ones(2)))


def test_a_forked_child_of_a_killed_rank_does_not_hide_its_end(hosts, tmp_path):
    environment = {"TORCHKV_JOB_SECRET": SECRET}
    with ranks.Ranks(
        *(end_with_a_child, 2, str(tmp_path)), hosts=hosts, environment=environment
    ) as job:
        try:
            job.collect(ranks=[0])
        finally:
            (tmp_path / "stop").touch()
        result = job.results[0]
    assert result[0], result[1]
    kind, text, elapsed = result[1]
    assert kind in ("WorkerLostError", "ServerLostError"), text
    assert "rank 1 is lost" in text
    assert LOST_S * 3 / 4 - 0.2 < elapsed < LOST_S * 5 / 4 + 1.5


# -- slow links

SLOW_SIZE = 400_000  # 1.6 MB, of which half crosses the link


def train_slowly(rank, options):
    kv = torchkv.create("dist_sync", timeout=60, **options)
    kv.init("w", torch.zeros(SLOW_SIZE))
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    out = torch.empty(SLOW_SIZE)
    seen = []
    start = time.monotonic()
    for step in range(4):
        kv.pushpull("w", torch.full((SLOW_SIZE,), gradient(step, rank)), out=out)
        seen.append(out.unique().tolist())
    return seen, time.monotonic() - start, kv.num_dead_node()


@pytest.mark.parametrize("security", ["curve", "none"])
def test_a_slow_link_that_loses_packets_delays_and_changes_nothing(hosts, security):
    rate = 20e6  # bits a second
    try:
        hosts.limit(1, "20mbit")
    except ranks.NoHosts as error:
        pytest.skip(str(error))
    try:
        results = ranks.run(
            *(train_slowly, 2, security_options(security)),
            hosts=hosts,
            environment={"TORCHKV_JOB_SECRET": SECRET},
        )
        assert hosts.num_lost(1) > 0
    finally:
        hosts.remove_limit(1)
    total, expected = 0.0, []
    for step in range(4):
        total -= gradient(step, 0) + gradient(step, 1)
        expected.append([total])
    for seen, elapsed, num_dead in results:
        assert seen == expected
        assert num_dead == 0
        # Each way, half of a gradient and half of the new value in each step.
        assert elapsed > 4 * SLOW_SIZE * 4 * 8 / rate * 0.9


# -- addresses


def create_with_store(rank, address, port):
    """As with launchers that set no MASTER_ADDR."""
    del os.environ["MASTER_ADDR"]
    store = torch.distributed.TCPStore(address, port, is_master=False)
    kv = torchkv.create(
        "dist_sync", rank=rank, world_size=2, store=store, security="none", timeout=20
    )
    kv.init("w", torch.zeros(2))
    kv.push("w", torch.ones(2))
    return kv.pull("w").tolist()


def test_the_address_is_the_one_towards_the_store(hosts):
    with ranks.Ranks(len, 0, hosts=hosts) as other:  # its TCPStore
        address = hosts.ADDRESS, other.store.port
        results = ranks.run(create_with_store, 2, *address, hosts=hosts)
    assert results == [[2.0, 2.0]] * 2


def create_on_loopback(rank):
    return outcome(lambda: torchkv.create("dist_sync", security="none", timeout=20))


@pytest.mark.parametrize("interface, got", [("lo", "127.0.0.1"), ("eth7", "none")])
def test_an_address_that_others_do_not_reach_is_refused(hosts, interface, got):
    environments = {1: {"TORCHKV_INTERFACE": interface}}
    results = ranks.run(create_on_loopback, 2, hosts=hosts, environments=environments)
    for rank, (kind, text, elapsed) in enumerate(results):
        assert kind == "RuntimeError" and elapsed < 10
        assert "TORCHKV_INTERFACE" in text
        if rank == 0 or interface == "lo":
            assert "expected an address of rank 1" in text and f"got {got}" in text
