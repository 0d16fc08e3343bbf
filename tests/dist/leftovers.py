"""What tests with several processes must not leave behind: processes and sockets."""

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import tempfile
import time
from pathlib import Path

import ranks

SOON_S = 10.0

# Of this session: others may run beside it.
_folder = tempfile.TemporaryDirectory(prefix="torchkv-test-")
os.environ["XDG_RUNTIME_DIR"] = _folder.name


def processes():
    """Children of this process and of its fork server, but for the server itself."""
    servers = {
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # has ended
            continue
        pid, parent = int(stat.parent.name), int(text.rpartition(")")[2].split()[1])
        if parent in {os.getpid(), *servers} and pid not in servers:
            found.add((pid, text.partition("(")[2].rpartition(")")[0]))
    return found


@contextlib.contextmanager
def none():
    """AssertionError if what runs within leaves any."""
    before = processes()
    num_killed = ranks.num_killed
    yield
    end = time.monotonic() + SOON_S
    while (left := processes() - before) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, f"the test left processes: {left}"
    folders = [*Path(_folder.name).iterdir()]
    # Those of killed ranks stay until the next job.
    if ranks.num_killed == num_killed:
        assert not folders, f"the test left {folders}"
    for folder in folders:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
