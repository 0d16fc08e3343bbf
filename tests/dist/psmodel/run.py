"""Runs the model: exits with 1 if a rule is broken.

python -m tests.dist.psmodel.run [--seeds N] [--start S] [--mode M] [--profile P]
    many seeds, one line for each cell
python -m tests.dist.psmodel.run --one SEED MODE PROFILE [-v]
    one seed
python -m tests.dist.psmodel.run --mutants [N]
    planted bugs: which are found, and how soon
python -m tests.dist.psmodel.run --scripts
    cases that seeds do not reach
"""

import argparse
import gc
import sys
import time
import traceback
from collections import Counter

from . import model as default_model
from .check import check
from .sim import MODES, PROFILES, Sim

CELLS = [(m, p) for m in MODES for p in PROFILES if p != "restart" or m == "sync"]


def one(seed, mode, profile, model=None):
    """(simulation, problems)"""
    s = Sim(seed, mode, profile, model)  # everything follows from these
    try:
        s.run()
        return s, check(s)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return s, [
            f"exception: {error!r} at {frame.filename.split('/')[-1]}:{frame.lineno}"
        ]


class Script:
    """One server core, driven by hand. W ranks, key "k/0" with four elements, made by
    rank 0."""

    def __init__(self, model, quorum, W=3, lease=False):
        self.model, self.now, self.opno, self.last, self.out = model, 0.0, {}, {}, []
        policy = model.Policy(quorum)
        self.server = model.Server(
            0, 7, model.Config(1, 0, W, 1, policy, "d", False, lease), 0.0
        )
        for rank in range(W):
            self.send(rank, "HELLO")
            self.op(rank, "INIT", pieces=2 * (rank == 0), total=4, vector=[0] * 4)

    def send(self, rank, kind, inc=1, **fields):
        m = dict(
            job=1,
            store=0,
            rank=rank,
            inc=inc,
            sinc=7,
            floor=0,
            committed=0,
            phase=0,
            digest="d",
            kind=kind,
        )
        m.update(fields)
        self.out += self.server.on_message(self.model.Msg(**m), self.now)

    def op(self, rank, kind, inc=1, key="k/0", vector=None, pieces=0, **fields):
        n = self.opno[rank, inc] = self.opno.get((rank, inc), 0) + 1
        m = dict(
            opno=n,
            prev=0 if kind == "INIT" else self.last.get((rank, inc, key), 0),
            key=key,
            index=None,
            pieces=pieces,
            payload=None,
            acked=0,
            have=(),
            gen=0,
            snap=0,
            priority=0,
            frame=0,
            written=False,
            round=0,
            base=0,
            total=4,
            weight=1,
            min_version=0,
            counts=None,
            rate=None,
            retire=0,
            step=None,
            whole=False,
            poison=None,
            group=None,
            factor=1,
        )
        m.update(fields)
        self.last[rank, inc, key] = n
        for i in range(pieces) if pieces else [None]:
            part = (
                dict(m)
                if i is None
                else dict(m, index=i, payload=vector[2 * i : 2 * i + 2])
            )
            self.send(rank, kind, inc, **part)
        return n

    def push(self, rank, number, inc=1, **fields):
        return self.op(
            rank, "PUSH", inc, vector=[1] * 4, pieces=2, round=number, **fields
        )

    def begun(self):
        return [a[2] for a in self.out if a[0] == "apply"]

    def apply(self, work):
        work.apply(0)
        work.apply(1)
        self.out += self.server.on_applied("k/0", work, None, self.now)

    def answers(self, rank, kind):
        sent = [a[2] for a in self.out if a[0] == "send" and a[1] == ("w", rank)]
        return [
            p.opno for m in sent for p in getattr(m, "parts", [m]) if p.kind == kind
        ]


class WorkerScript:
    """One worker core, driven by hand. Two servers, which have greeted it."""

    def __init__(self, model, rank, inc=1, gens=(0, 0)):
        config = model.Config(1, 0, 3, 2, model.Policy(1), "d")
        self.model, self.out, self.inc = model, [], inc
        self.worker = model.Worker(rank, inc, config, 0.0)
        for sid, gen in enumerate(gens):
            self.give(sid, "WELCOME", gen=gen, rate=100 + gen, snap=0, phase=0)

    def give(self, sid, kind, **fields):
        head = dict(kind=kind, job=1, store=0, inc=self.inc, sid=sid, sinc=7)
        m = self.model.Msg(**head, committed=0, **fields)
        self.out += self.worker.on_message(m, 0.0)

    def call(self, kind, key=None, **args):
        cid, out = self.worker.call(kind, 0.0, 9.0, key, **args)
        self.out += out

    def sent(self, kind):
        """(server, message) of each."""
        sent = [a[1:] for a in self.out if a[0] == "send"]
        parts = [(to[1], p) for to, m in sent for p in getattr(m, "parts", [m])]
        return [(sid, p) for sid, p in parts if p.kind == kind]

    def errors(self):
        return [a[2].get("error") for a in self.out if a[0] == "return"]


def worker_scripts(model, want):
    w = WorkerScript(model, 0, inc=2, gens=(3, 2))
    want(
        "rank 0's heir completes the last change",
        [(sid, m.gen, m.rate) for sid, m in w.sent("CONFIG")] == [(1, 3, 103)],
    )

    w = WorkerScript(model, 0)
    w.out += w.worker.on_peer_lost(1, 0.0)
    w.call("snapshot", step=1)
    want(
        "a refused snapshot is not counted",
        w.errors() == [("server_lost", 1, None)] and w.worker.snap == 0,
    )

    w = WorkerScript(model, 1)
    w.call("init", "a", numel=1, vector=[0])
    sid = w.sent("INIT")[0][0]
    w.give(sid, "DONE", opno=1, round=0, version=0, kid=1)
    w.call("pull", "a")
    w.call("delete", "a")
    want("a delete waits for a pull", not w.sent("DELETE"))
    value = dict(vector=[5], version=1, kid=1, digest=0, round=0, lease=None)
    w.give(sid, "VALUE", opno=2, index=0, pieces=1, payload=[5], **value)
    want("and follows it", [m.opno for _, m in w.sent("DELETE")] == [3])


def scripts(model):
    """Problems, as strings."""
    problems = []

    def want(what, ok):
        if not ok:
            problems.append("script: " + what)

    s = Script(
        model, 1
    )  # two have deleted, the third is lost while its push is applied
    for rank in (0, 1):
        s.op(rank, "DELETE")
    s.push(2, 1)
    work = s.begun()[0]
    s.out += s.server.on_peer_lost(2, s.now)
    s.send(2, "HELLO", inc=2)
    heir = s.op(2, "INIT", inc=2)
    again = s.op(0, "INIT", pieces=2, vector=[5] * 4)
    want(
        "init waits for a slice that is dying",
        again not in s.answers(0, "DONE") and len(s.answers(2, "DONE")) == heir,
    )
    want("the slice stays until on_applied", s.server.keys["k/0"].busy is work)
    s.apply(work)
    key = s.server.keys.get("k/0")
    want(
        "deleted and made anew after on_applied",
        key and key.kid == 2 and key.value == [5] * 4 and key.version == 0,
    )
    want(
        "init of the heir is answered with the new slice",
        len(s.answers(2, "DONE")) == 2 and key.clock[2] == 0,
    )

    s = Script(model, 1)  # rank 0's snapshot while rank 1's push is applied in place
    s.push(1, 1)
    work = s.begun()[0]
    work.apply(0)
    s.op(0, "SNAPSHOT", key="", snap=1, counts={"k/0": 0})
    work.apply(1)
    s.out += s.server.on_applied("k/0", work, None, s.now)
    shard = [a[2]["keys"]["k/0"] for a in s.out if a[0] == "write"]
    want(
        "snapshot is one version",
        len(shard) == 1 and shard[0]["region"].data == [shard[0]["version"]] * 4,
    )

    s = Script(model, None)  # a loss while round 1 is applied and round 2 is complete
    for number in (1, 2):
        for rank in range(3):
            s.push(rank, number)
    work = s.begun()[0]
    s.out += s.server.on_peer_lost(2, s.now)
    want("FATAL answers at once", len(s.answers(0, "ERROR")) == 2)
    s.apply(work)
    want("no round begins after FATAL", len(s.begun()) == 1)

    s = Script(model, None)  # close while a round is applied
    s.push(0, 1)
    s.push(1, 1)
    s.push(2, 1)
    work = s.begun()[0]
    closes = [s.op(rank, "CLOSE", key="") for rank in range(3)]
    want("close waits for on_applied", closes[0] not in s.answers(0, "DONE"))
    s.apply(work)
    want("close is answered then", closes[0] in s.answers(0, "DONE"))

    s = Script(
        model, 1, lease=True
    )  # both slots leased; the third update waits, others' loss frees
    s.op(1, "PULL")
    s.push(0, 1)
    s.apply(s.begun()[0])
    s.op(2, "PULL")
    s.push(0, 2)
    want("the update waits for a slot", len(s.begun()) == 1)
    s.out += s.server.on_peer_lost(1, s.now)
    want("a lost worker's lease ends", len(s.begun()) == 2)
    s.apply(s.begun()[1])
    want("the other's slot is untouched", s.server.keys["k/0"].slots[1].data == [1] * 4)
    s.push(0, 3)
    s.apply(s.begun()[2])
    s.send(2, "FREE", opnos=[2])
    want(
        "FREE ends a lease",
        not any(s.server.keys["k/0"].leases) and s.server.keys["k/0"].value == [3] * 4,
    )

    s = Script(model, 1)  # lost and replaced while its push is applied
    s.push(2, 1)
    s.push(0, 1)
    s.push(0, 2)
    s.out += s.server.on_peer_lost(2, s.now)
    s.send(2, "HELLO", inc=2)
    s.op(2, "INIT", inc=2)
    want("the heir starts as far as the slowest", s.server.keys["k/0"].received[2] == 0)
    same = s.push(2, 1, inc=2)  # the same opno as the old push
    s.apply(s.begun()[0])
    key = s.server.keys["k/0"]
    want(
        "an old round does not count for the heir",
        key.clock[2] == 0 and key.value == [1] * 4,
    )
    want("an old round does not answer the heir", same not in s.answers(2, "DONE"))

    s = Script(model, 1)  # replaced before it said hello here
    s.server.peers[2] = type(s.server.peers[2])(0, "expected", 0.0)
    s.send(2, "HELLO", inc=2)
    want("the predecessor leaves the clocks", 2 not in s.server.keys["k/0"].clock)

    s = Script(model, 1, lease=True)  # FREE is lost, a later floor tells the same
    s.op(1, "PULL")
    s.send(1, "HEARTBEAT", floor=3, fatal=None)
    want("floor ends a lease", not any(s.server.keys["k/0"].leases))

    s = Script(model, None)
    s.push(0, 1)
    for _ in range(2):  # again: it asks
        s.opno[0, 1], s.last[0, 1, ""] = 2, 0
        s.op(0, "SNAPSHOT", key="", snap=1, counts={"k/0": 1})
    waits = [a[2] for a in s.out if a[0] == "send" and a[2].kind == "WAIT"]
    want(
        "a snapshot that waits names who holds up its pushes",
        [m.missing for m in waits] == [[1, 2]],
    )

    s = Script(model, None, W=1)  # snapshot 1 was never asked for
    s.op(0, "SNAPSHOT", key="", snap=2, counts={"k/0": 0})
    s.out += s.server.on_written(("shard", 2), s.now)
    want("captures that nobody asks for are dropped", not s.server.captures)

    s = Script(model, 1)
    s.op(0, "CONFIG", key="", gen=1, rate=41)
    s.send(0, "HELLO", inc=2)
    greeting = [a[2] for a in s.out if a[0] == "send" and a[2].kind == "WELCOME"][-1]
    want("rank 0's heir is told the options", (greeting.gen, greeting.rate) == (1, 41))

    worker_scripts(model, want)

    s = Script(model, None, W=1)  # pending snapshots on both slots, a third update
    for number in (1, 2, 3):
        s.op(0, "SNAPSHOT", key="", snap=number, counts={"k/0": number - 1, "z/0": 1})
        s.push(0, number, snap=number)
        if len(s.begun()) == number:
            s.apply(s.begun()[-1])
    want("an update does not wait for snapshots", len(s.begun()) == 3)
    shots = [s.server.captures[n]["k/0"] for n in (1, 2, 3)]
    want(
        "each snapshot keeps its version",
        [x["value"] or x["region"].data for x in shots] == [[n] * 4 for n in range(3)],
    )

    s = Script(
        model, 1, lease=True
    )  # a worker leaves with a pull that waits: no lease after it
    s.push(1, 1)
    s.push(1, 2)
    s.op(1, "PULL", min_version=2)
    s.op(1, "PULL", min_version=1)
    s.apply(s.begun()[0])
    s.out += s.server.on_peer_lost(1, s.now)
    s.apply(s.begun()[-1])
    want(
        "no lease after the session",
        not any(s.server.keys["k/0"].leases) and not s.server.peers[1].leases,
    )
    return problems


def many(args):
    gc.set_threshold(50000)
    start, total, messages, failures = time.time(), Counter(), Counter(), []
    cells = [
        (m, p) for m, p in CELLS if args.mode in (None, m) and args.profile in (None, p)
    ]
    for seed in range(args.start, args.start + args.seeds):
        for cell in cells:
            s, problems = one(seed, *cell)
            total[cell] += 1
            messages.update(
                messages=s.messages,
                calls=len(s.history),
                rejoins=s.rejoins,
                restarts=len(s.restarts),
                resumed=sum(1 for x in s.restarts if x),
            )
            if problems:
                failures.append((seed,) + cell)
                print("FAIL", seed, *cell, problems[:2], flush=True)
        if (seed - args.start) % 100 == 99:
            print(f"{sum(total.values())} runs {time.time() - start:.0f} s", flush=True)
    for cell in cells:
        failed = sum(f[1:] == cell for f in failures)
        print(f"{cell[0]:7} {cell[1]:8} {total[cell]:5} seeds, {failed} failed")
    print(
        sum(total.values()),
        "runs,",
        dict(messages),
        len(failures),
        f"failed, {time.time() - start:.0f} s",
    )
    return not failures


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--mode")
    parser.add_argument("--profile")
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--scripts", action="store_true")
    parser.add_argument("-v", action="store_true")
    parser.add_argument("--mutants", nargs="?", type=int, const=400)
    args = parser.parse_args()
    if args.scripts:
        problems = scripts(default_model)
        print("\n".join(problems) or "scripts: clean")
        return not problems
    elif args.mutants:
        from . import mutants

        return mutants.run(args.mutants)
    elif args.one:
        s, problems = one(int(args.one[0]), *args.one[1:])
        if args.v:
            for row in s.history:
                end = f"{row.t1:.4f}" if row.t1 else ""
                who = f"store {row.store} rank {row.rank}.{row.inc} job {row.job}"
                print(
                    f"{row.t0:8.4f} {end:8}",
                    who,
                    row.kind,
                    row.key or "",
                    str(row.result)[:200],
                )
        print({k: v for k, v in s.plan.items() if k != "programs"}, "end", s.now)
        print("\n".join(problems) or "clean")
        return not problems
    else:
        return many(args)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
