"""Planted bugs: each is a patch of model.py's text.

run() tells which of them the checker finds, and how soon.
"""
# size: one list

import inspect
import time
import types

from . import model as default_model
from . import run as runner

# name: (cells to try, [(old, new), ...])
MUTANTS = {
    "retried push is not recognised": (
        "sync async",
        [
            (
                """\
        if m.opno < peer.floor:
""",
                """\
        if m.opno < peer.floor and m.kind != "PUSH":
""",
            ),
            (
                """\
        if m.opno in stream.replies:
            return self._answer(m.rank, stream.replies[m.opno], m.have, m.priority)
        if self.fatal and m.kind != "CLOSE":
            return self._send(m.rank, "ERROR", opno=m.opno, error=self.fatal)
        if m.opno <= stream.last or any(
""",
                """\
        if m.opno in stream.replies and m.kind != "PUSH":
            return self._answer(m.rank, stream.replies[m.opno], m.have, m.priority)
        if self.fatal and m.kind != "CLOSE":
            return self._send(m.rank, "ERROR", opno=m.opno, error=self.fatal)
        if (m.opno <= stream.last and m.kind != "PUSH") or any(
""",
            ),
            (
                """\
            op = stream.held.pop(stream.last, None)
""",
                """\
            op = stream.held.pop(stream.last, None) or (
                stream.held.popitem()[1]
                if m.kind == "PUSH" and stream.held and m.opno <= stream.last
                else None
            )
""",
            ),
            (
                """\
        if op.round != key.received[op.rank] + 1:
""",
                """\
        if op.round > key.received[op.rank] + 1:
""",
            ),
        ],
    ),
    "lost reply: push applied again": (
        "sync/flaky async/flaky",
        [
            (
                """\
            self.got.setdefault((m.rank, m.inc), []).append((m.opno, m.index))
""",
                """\
            self.got.setdefault((m.rank, m.inc), []).append((m.opno, m.index))
        if (
            m.opno in stream.replies
            and m.kind == "PUSH"
            and m.payload
            and m.key in self.keys
        ):
            again = self.keys[m.key].value
            more = getattr(m.payload, "data", m.payload)
            if len(again) == len(more):
                again[:] = [x + y * m.weight for x, y in zip(again, more)]
""",
            ),
        ],
    ),
    "program order of a key is not restored": (
        "sync async",
        [
            (
                """\
        stream.held[m.prev] = m
""",
                """\
        stream.held[stream.last] = m
""",
            ),
            (
                """\
        if op.round != key.received[op.rank] + 1:
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "push acknowledged before it is applied": (
        "async ssp",
        [
            (
                """\
        key.received[op.rank] += 1
""",
                """\
        key.received[op.rank] += 1
        self._reply(
            op, "DONE", version=key.version, age=0
        ) if op.kind == "PUSH" else None
""",
            ),
        ],
    ),
    "round number off by one after init": (
        "sync",
        [
            (
                """\
                    result["round"],
""",
                """\
                    result["round"] + 1,
""",
            ),
        ],
    ),
    "pull does not wait for own push": (
        "sync async quorum",
        [
            (
                """\
        if key.clock[op.rank] < need or key.version < op.min_version:
""",
                """\
        if key.version < op.min_version:
""",
            ),
        ],
    ),
    "staleness against the fastest": (
        "ssp",
        [
            (
                """\
        return min(
""",
                """\
        return max(
""",
            ),
        ],
    ),
    "staleness off by one": (
        "ssp",
        [
            (
                """\
            or clock - self._slowest(key) <= bound
""",
                """\
            or clock - self._slowest(key) <= bound + 1
""",
            ),
        ],
    ),
    "lost worker still counts as slowest": (
        "ssp",
        [
            (
                """\
        key.clock.pop(rank, None)
""",
                """\
""",
            ),
        ],
    ),
    "quorum counts a worker twice": (
        "quorum",
        [
            (
                """\
        if len(ready) < len(able):
""",
                """\
        if sum(map(len, key.pend.values())) < min(quorum, len(able)):
""",
            ),
            (
                """\
        pushes = [key.pend[r].popleft() for r in take]
""",
                """\
        pushes = [
            p
            for r in take
            for p in [key.pend[r].popleft() for _ in range(len(key.pend[r]))]
        ]
""",
            ),
        ],
    ),
    "sync goes on without the lost worker": (
        "sync",
        [
            (
                """\
        if self.sync:
            self._fail(("worker_lost", rank, None))
        else:
            self._leave(rank, now)
""",
                """\
        self._leave(rank, now)
""",
            ),
            (
                """\
        if self.sync and len(key.clock) < self.config.W and any(key.pend.values()):
""",
                """\
        if False:
""",
            ),
            (
                """\
            return ready if len(ready) == self.config.W else None
""",
                """\
            return ready if len(ready) >= len(key.clock) else None
""",
            ),
        ],
    ),
    "half-received push is counted": (
        "sync async quorum",
        [
            (
                """\
            if len(op.data) < m.pieces:
                return
            del stream.staged[m.opno]
            region = isinstance(
                op.data[0], Region
""",
                """\
            if len(op.data) < m.pieces - (m.pieces > 2):
                return
            del stream.staged[m.opno]
            region = isinstance(
                op.data.get(0), Region
""",
            ),
            (
                """\
                else [x for i in range(m.pieces) for x in op.data[i]]
""",
                """\
                else [x for i in range(m.pieces) for x in op.data.get(i, [0] * PIECE)]
""",
            ),
        ],
    ),
    "pull re-evaluated on retry": (
        "async sync",
        [
            (
                """\
                reply = peer.answers.get(opno)
""",
                """\
                reply = peer.answers.get(opno)
                name = next(
                    (n for n, s in peer.streams.items() if opno in s.replies), None
                )
                if reply and name in self.keys:
                    k = self.keys[name]
                    reply = Msg(
                        vector=k.value,
                        version=k.version,
                        kid=k.kid,
                        digest=k.digest,
                        round=reply.round,
                    )
""",
            ),
        ],
    ),
    "value updated in place under a reply": (
        "async",
        [
            (
                """\
                    vector=None if lease else list(key.value),
""",
                """\
                    vector=None if lease else key.value,
""",
            ),
        ],
    ),
    "sum in order of arrival": (
        "sync",
        [
            (
                """\
        ready = [r for r in sorted(key.pend) if key.pend[r] and self._admitted(key, r)]
""",
                """\
        ready = [r for r in list(key.pend) if key.pend[r] and self._admitted(key, r)]
""",
            ),
            (
                """\
        lead = pushes[0] if pushes[0].rank == 0 else None
""",
                """\
        lead = next((p for p in pushes if p.rank == 0), None)
""",
            ),
        ],
    ),
    "rate taken when the round closes": (
        "sync async",
        [
            (
                """\
        rate = self.configs[
            min((g for g in self.configs if g >= key.gen), default=max(self.configs))
        ]
""",
                """\
        rate = self.configs[max(self.configs)]
""",
            ),
        ],
    ),
    "push does not wait for its rate": (
        "sync async",
        [
            (
                """\
        if key.pend[rank][0].gen > max(self.configs) and self.peers[0].state in (
            "expected",
            "up",
        ):
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "followers stamp what is not committed": (
        "async/crash ssp/crash",
        [
            (
                """\
            self.committed = max(self.committed, m.committed)
            self.phase = max(self.phase, m.phase)
""",
                """\
            self.committed = max(self.committed, m.committed)
            self.phase = max(self.phase, m.phase)
            self.committed = max(self.configs)
""",
            ),
            (
                """\
        if key.pend[rank][0].gen > max(self.configs) and self.peers[0].state in (
            "expected",
            "up",
        ):
""",
                """\
        if key.pend[rank][0].gen > max(self.configs):
""",
            ),
        ],
    ),
    "snapshot when the marker comes": (
        "sync",
        [
            (
                """\
            self._capture(
                key, lead.snap
            )  # first the snapshot that this push comes after
""",
                """\
            pass  # first the snapshot that this push comes after
""",
            ),
            (
                """\
            if count is not None and key.clock.get(0, count) >= count:
""",
                """\
            if count is not None:
""",
            ),
        ],
    ),
    "snapshot without the stamp": (
        "sync/restart",
        [
            (
                """\
            self._capture(
                key, lead.snap
            )  # first the snapshot that this push comes after
""",
                """\
            pass  # first the snapshot that this push comes after
""",
            ),
        ],
    ),
    "manifest before all shards": (
        "sync/restart",
        [
            (
                """\
        self.snaps[op.snap] = op
""",
                """\
        self.snaps[op.snap] = op
        self._reply(op, "DONE")
""",
            ),
        ],
    ),
    "snapshot takes later rates along": (
        "sync/restart",
        [
            (
                """\
                            rates={
                                g: rate
                                for g, rate in self.configs.items()
                                if g <= op.gen
                            },
""",
                """\
                            rates=dict(self.configs),
""",
            ),
        ],
    ),
    "delete forgets the dedupe too early": (
        "sync async",
        [
            (
                """\
        if m.opno < peer.floor:
""",
                """\
        if False:
""",
            ),
            (
                """\
            if (
                stream.ended
                and stream.last < peer.floor
                and not stream.held
                and not stream.staged
            ):
""",
                """\
            if stream.ended and not stream.held and not stream.staged:
""",
            ),
            (
                """\
            elif op.kind == "DELETE":
""",
                """\
            elif op.kind == "DELETE":
                self.peers[op.rank].floor = 0
""",
            ),
        ],
    ),
    "delete leaves the key": (
        "sync async",
        [
            (
                """\
            del self.keys[key.name]
""",
                """\
            key.clock = dict.fromkeys(key.gone, 0)
            key.received = dict(key.clock)
            key.gone = set()
            key.dying = False
""",
            ),
        ],
    ),
    "init joins the old key again": (
        "sync",
        [
            (
                """\
        if key is None or op.rank in key.gone or key.dying or self._deletes(key, op):
""",
                """\
        if key is None:
""",
            ),
        ],
    ),
    "other job's messages accepted": (
        "sync",
        [
            (
                """\
        if (m.job, m.store) != (config.job, config.store):
""",
                """\
        if m.store != config.store:
""",
            ),
            (
                """\
        elif m.inc != peer.inc or peer.state == "lost" or m.sinc != self.sinc:
""",
                """\
        elif m.inc != peer.inc or peer.state == "lost" or False:
""",
            ),
            (
                """\
        if (m.job, m.store, m.inc) != (self.config.job, self.config.store, self.inc):
""",
                """\
        if (m.store, m.inc) != (self.config.store, self.inc):
""",
            ),
        ],
    ),
    "old incarnation accepted": (
        "async ssp",
        [
            (
                """\
        elif m.inc != peer.inc or peer.state == "lost" or m.sinc != self.sinc:
""",
                """\
        elif peer.state == "lost" or m.sinc != self.sinc:
""",
            ),
            (
                """\
        if m.inc < peer.inc or (m.inc == peer.inc and peer.state == "lost"):
""",
                """\
        if m.inc == peer.inc and peer.state == "lost":
""",
            ),
        ],
    ),
    "lost worker's replies kept for its heir": (
        "async/crash ssp/crash",
        [
            (
                """\
            self.peers[m.rank] = peer = Peer(m.inc, "up", now)
""",
                """\
            old, self.peers[m.rank] = peer, Peer(m.inc, "up", now)
            peer = self.peers[m.rank]
            peer.streams = old.streams
""",
            ),
            (
                """\
        peer.state, peer.streams = (
            "lost",
            {},
        )  # half-received pieces go with the streams
""",
                """\
        peer.state = "lost"  # half-received pieces go with the streams
""",
            ),
        ],
    ),
    "barrier paired by each server": (
        "async ssp quorum",
        [
            (
                """\
        if self.sync or self.links[0].state == "lost":
""",
                """\
        if True:
""",
            ),
        ],
    ),
    "no retry": (
        "sync async",
        [
            (
                """\
            if now - op.sent_at >= RETRY:
""",
                """\
            if False:
""",
            ),
        ],
    ),
    "stopped process blames its peers": (
        "async/crash sync/crash",
        [
            (
                """\
        if gap <= HEARTBEAT:
""",
                """\
        if True:
""",
            ),
        ],
    ),
    "lost server: the call waits": (
        "sync async",
        [
            (
                """\
            if now - link.heard > (LOST if link.state == "up" else JOIN):
                self._lose(sid, now)
            elif now - link.beat >= HEARTBEAT:
""",
                """\
            if now - link.heard > 1e9:
                self._lose(sid, now)
            if link.state != "lost" and now - link.beat >= HEARTBEAT:
""",
            ),
            (
                """\
        if self.links[sid].state == "up":
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "shape is not compared": (
        "sync async",
        [
            (
                """\
        if (key.total, key.whole) != (op.total, op.whole):
""",
                """\
        if False:
""",
            ),
            (
                """\
        if op.total != key.total or len(op.vector) != len(key.value):
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "cause of a failure is not passed on": (
        "sync/misuse sync/crash",
        [
            (
                """\
                self._send(rank, "FATAL", inc=peer.inc, fatal=error)
""",
                """\
                pass
""",
            ),
            (
                """\
        elif m.kind in ("FATAL", "ALIVE") and m.fatal:
""",
                """\
        elif False:
""",
            ),
            (
                """\
            self._send(sid, "HEARTBEAT", fatal=self.fatal if self.sync else None)
""",
                """\
            self._send(sid, "HEARTBEAT", fatal=None)
""",
            ),
            (
                """\
            if link.state != "hello":
""",
                """\
            if False:
""",
            ),
        ],
    ),
    "grace for ever": (
        "quorum",
        [
            (
                """\
            if now < key.first_at + self.policy.patience and (
                key.quorum_at is None or now < key.quorum_at + grace
            ):
""",
                """\
            if now < key.first_at + 5 and (True):
""",
            ),
        ],
    ),
    # A: asynchronous apply
    "pull answered while busy": (
        "sync async",
        [
            (
                """\
        if not key.busy and not self.fatal:
""",
                """\
        if not self.fatal:
""",
            ),
        ],
    ),
    "next round begun while busy": (
        "sync async",
        [
            (
                """\
        if not key.busy and not self.fatal:
            self._answer_pulls(key, now)  # between updates
            if not key.busy and not all(key.leases):
""",
                """\
        if not self.fatal:
            if not key.busy:
                self._answer_pulls(key, now)
            if not all(key.leases):
""",
            ),
        ],
    ),
    "loss while busy: the heir's clock counts": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
            if op.rank in key.clock and op.inc == self.peers[op.rank].inc:
""",
                """\
            if op.rank in key.clock:
""",
            ),
        ],
    ),
    "loss while busy: clock of who has gone": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
            if op.rank in key.clock and op.inc == self.peers[op.rank].inc:
                key.clock[op.rank] += 1  # not the heir's of one that was lost meanwhile
""",
                """\
            if True:
                key.clock[op.rank] = (
                    key.clock.get(op.rank, 0) + 1
                )  # not the heir's of one that was lost meanwhile
""",
            ),
        ],
    ),
    "answer matched by number, not operation": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
        if self.open.get((op.rank, op.opno)) is not op:
""",
                """\
        if self.open.get((op.rank, op.opno)) is None:
""",
            ),
        ],
    ),
    "slice freed while busy": (
        "async/crash sync async",
        [
            (
                """\
            if not key.busy:
                self._free(key, now)
""",
                """\
            self._free(key, now)
""",
            ),
        ],
    ),
    "init attaches to a slice that is dying": (
        "async/crash quorum/crash",
        [
            (
                """\
        if key is None or op.rank in key.gone or key.dying or self._deletes(key, op):
""",
                """\
        if key is None or op.rank in key.gone or self._deletes(key, op):
""",
            ),
        ],
    ),
    "snapshot captured while busy": (
        "sync/restart",
        [
            (
                """\
        if key.busy or self.fatal:
""",
                """\
        if self.fatal:
""",
            ),
        ],
    ),
    "rounds go on after FATAL": (
        "sync/crash sync/restart sync/misuse",
        [
            (
                """\
        if not key.busy and not self.fatal:
""",
                """\
        if not key.busy:
""",
            ),
        ],
    ),
    # B: updaters that throw
    "thrown round does not count": (
        "sync async",
        [
            (
                """\
        key.version += 1
        for op in work.pushes:
""",
                """\
        key.version += not error
        for op in work.pushes if not error else ():
""",
            ),
        ],
    ),
    "only the thrower's pusher is told": (
        "sync quorum",
        [
            (
                """\
        for op in work.pushes:
            if error:
""",
                """\
        for op in work.pushes:
            if error and op.poison:
""",
            ),
        ],
    ),
    "thrown pushpull answered with a value": (
        "sync async",
        [
            (
                """\
        if error:
            key.pulls = [(op, need) for op, need in key.pulls if op not in work.pushes]
        for op in work.pushes:
            if error:
""",
                """\
        for op in work.pushes:
            if error and op.kind == "PUSH":
""",
            ),
        ],
    ),
    "updater's error is FATAL": (
        "sync",
        [
            (
                """\
            if self.sync and m.error[0] not in ("updater", "write"):
""",
                """\
            if self.sync:
""",
            ),
        ],
    ),
    "first slice that threw ends the call": (
        "sync",
        [
            (
                """\
            if result.get("error", ("updater",))[0] != "updater":
""",
                """\
            if "error" in result:
""",
            ),
        ],
    ),
    # C: regions and leases
    "region freed at GOT": (
        "sync async",
        [
            (
                """\
                    self.ops[opno].got.add(index)
""",
                """\
                    self.ops[opno].got.add(index)
                    if self.ops[opno].region:
                        self.ops[opno].table.free.append(self.ops[opno].region)
""",
            ),
            (
                """\
            table.free.append(op.region)  # who seems lost may still be reading
""",
                """\
            pass  # who seems lost may still be reading
""",
            ),
        ],
    ),
    "close does not wait for the apply": (
        "async",
        [
            (
                """\
        if not self._members() and not working:
""",
                """\
        if not self._members():
""",
            ),
        ],
    ),
    "segment named without the incarnation": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
        self.got = {}  # server -> pieces of the frame at hand
""",
                """\
        self.got = {}  # server -> pieces of the frame at hand
        if inc == 1:
            globals().setdefault("OLD", {})[rank] = {}
""",
            ),
            (
                """\
                table.regions.append(Region([0] * table.numel))
""",
                """\
                table.regions.append(
                    OLD[self.rank].setdefault(
                        (name, table.numel, len(table.regions)),
                        Region([0] * table.numel),
                    )
                )
""",
            ),
        ],
    ),
    "region freed at the time-out": (
        "sync async",
        [
            (
                """\
                ops = [self.ops[n] for n in sorted(call.left)]
""",
                """\
                ops = [self.ops[n] for n in sorted(call.left)]
                for op in ops:
                    if op.region:
                        op.table.free.append(op.region)
""",
            ),
        ],
    ),
    "retry names a newer region": (
        "sync async",
        [
            (
                """\
            payload = op.region or piece(op.vector, index)
""",
                """\
            payload = op.region and op.table.regions[-1] or piece(op.vector, index)
""",
            ),
        ],
    ),
    "new data in the region of an open push": (
        "sync async",
        [
            (
                """\
            region = table.free.pop(0)  # the server's until its final answer
""",
                """\
            region = table.free[0]  # the server's until its final answer
""",
            ),
        ],
    ),
    "regions are never added (stall in sync)": (
        "sync",
        [
            (
                """\
        if (
            not self.config.push_ref
            or self.config.policy.quorum != 1
            or self.config.policy.staleness is not None
        ):
""",
                """\
        if not self.config.push_ref:
""",
            ),
        ],
    ),
    "lease ended before copy-out": (
        "sync async",
        [
            (
                """\
                self.out.append(("copy", op.opno, m.lease))
""",
                """\
                self.out.append(("copy", op.opno, m.lease))
                link.freeing.add(op.opno)
                self._free(m.sid, now)
""",
            ),
            (
                """\
        if op and stamp != (op.lease.kid, op.lease.version):
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "update in place under a lease": (
        "sync async",
        [
            (
                """\
            if not key.busy and not all(key.leases):
""",
                """\
            if not key.busy and True:
""",
            ),
            (
                """\
        free = [slot for slot in (key.cur, 1 - key.cur) if not key.leases[slot]]
""",
                """\
        free = [key.cur]
""",
            ),
            (
                """\
        if op and stamp != (op.lease.kid, op.lease.version):
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "third update under two leases": (
        "sync async",
        [
            (
                """\
            if not key.busy and not all(key.leases):
""",
                """\
            if not key.busy and True:
""",
            ),
            (
                """\
        free = [slot for slot in (key.cur, 1 - key.cur) if not key.leases[slot]]
""",
                """\
        free = [1 - key.cur]
""",
            ),
            (
                """\
        if op and stamp != (op.lease.kid, op.lease.version):
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "stamp not compared after copy-out": (
        "async/crash ssp/crash sync/crash quorum/crash",
        [
            (
                """\
        if op and stamp != (op.lease.kid, op.lease.version):
""",
                """\
        if False:
""",
            ),
        ],
    ),
    "lost worker's lease never ends": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
        self._end_leases(peer, now)
""",
                """\
""",
            ),
            (
                """\
        self._end_leases(
            self.peers[rank], now
        )  # its pulls went first: else they would be answered now
""",
                """\
        pass  # its pulls went first: else they would be answered now
""",
            ),
        ],
    ),
    "end of a lease wakes nobody": (
        "sync async",
        [
            (
                """\
            if self.keys.get(key.name) is key:
                self._advance(key, now)  # an update may have waited for the slot
""",
                """\
            if False:
                pass  # an update may have waited for the slot
""",
            ),
        ],
    ),
    "end of a lease not repeated, nor in floor": (
        "sync/flaky async/flaky",
        [
            (
                """\
            peer.answers.pop(opno, None)
            self._end_lease(peer, opno, now)
""",
                """\
            peer.answers.pop(opno, None)
""",
            ),
            (
                """\
            if link.freeing and link.state == "up" and now - link.freed_at >= RETRY:
""",
                """\
            if False and link.state == "up" and now - link.freed_at >= RETRY:
""",
            ),
        ],
    ),
    "snapshot not copied": (
        "sync/restart",
        [
            (
                """\
            shot.update(region=None, value=list(work.target.data))
""",
                """\
            pass
""",
            ),
        ],
    ),
    "update waits for a snapshot": (
        "sync",
        [
            (
                """\
            self._reply(snap, "DONE")
""",
                """\
            self._reply(snap, "DONE")
            for key in list(self.keys.values()):
                self._advance(key, now)
""",
            ),
            (
                """\
            if not key.busy and not all(key.leases):
""",
                """\
            if not key.busy and not all(
                l or self._shots(key, s) for l, s in zip(key.leases, key.slots)
            ):
""",
            ),
        ],
    ),
    # D: frames
    "frame recognised by its first operation": (
        "sync async",
        [
            (
                """\
            self._restore(restored)

    # -- what the driver calls --

    def on_message(self, m, now):
        self.now = now
        for part in m.parts if m.kind == "FRAME" else [m]:
""",
                """\
            self._restore(restored)

    # -- what the driver calls --

    def on_message(self, m, now):
        self.now = now
        parts = m.parts if m.kind == "FRAME" else [m]
        first = self.peers[parts[0].rank].streams.get(getattr(parts[0], "key", None))
        if first and len(parts) > 1 and parts[0].opno <= first.last:
            parts = parts[:1]
        for part in parts:
""",
            ),
        ],
    ),
    "frame's GOT covers whole operations": (
        "sync/flaky async/flaky",
        [
            (
                """\
                    self.ops[opno].got.add(index)
""",
                """\
                    self.ops[opno].got.update(range(self.ops[opno].pieces))
""",
            ),
        ],
    ),
    # E: steps in two phases
    "factor of each slice by itself": (
        "sync",
        [
            (
                """\
                    factor=factor(sum(step.partials.values())),
""",
                """\
                    factor=factor(step.partials[name]),
""",
            ),
        ],
    ),
    "apply before the factor": (
        "sync",
        [
            (
                """\
        if key.busy.group:
""",
                """\
        if key.busy.group and len(key.busy.pushes) < 2:
""",
            ),
        ],
    ),
    "factor before all norms": (
        "sync",
        [
            (
                """\
        if len(step.partials) == len(step.rounds):
""",
                """\
        if len(step.partials) >= (len(step.rounds) + 1) // 2:
""",
            ),
        ],
    ),
    "norm told before it is measured": (
        "sync",
        [
            (
                """\
            if key.busy and key.busy.measured and key.busy.number == op.round:
""",
                """\
            if key.busy and key.busy.number == op.round:
""",
            ),
        ],
    ),
    # F, and flaws of the first model
    "whole is not compared": (
        "sync/misuse async/misuse",
        [
            (
                """\
        if (key.total, key.whole) != (op.total, op.whole):
""",
                """\
        if key.total != op.total:
""",
            ),
        ],
    ),
    "rank 0's heir does not send the last options": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
        self.completed = True
""",
                """\
        self.completed = True
        return
""",
            ),
        ],
    ),
    "rank 0's heir is not told the last options": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
            rate=self.configs[gen] if m.rank == 0 and m.inc > 1 else None,
""",
                """\
            rate=None,
""",
            ),
        ],
    ),
    "refused snapshot is counted": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
    def _begin_snapshot(self, cid, call, now, step):
""",
                """\
    def _begin_snapshot(self, cid, call, now, step):
        self.snap += 1
""",
            ),
            (
                """\
        self.snap += 1  # only now: what carries a number is captured for it
""",
                "",
            ),
        ],
    ),
    "captures of older snapshots are kept": (
        "async/crash ssp/crash quorum/crash",
        [
            (
                """\
            for n in [n for n in self.captures if n <= name[1] and n not in self.snaps]:
""",
                """\
            for n in [n for n in self.captures if n == name[1]]:
""",
            ),
        ],
    ),
    "snapshot that waits names nobody": (
        "sync/misuse quorum/crash",
        [
            (
                """\
        if m.kind in ("ENTER", "SNAPSHOT"):  # for pushes that others hold up
""",
                """\
        if m.kind == "ENTER":
""",
            ),
        ],
    ),
    "delete overtakes pulls": (
        "ssp async quorum",
        [
            (
                """\
            self.deleting.add(cid)
        else:
            self._each(cid, call, "DELETE", now)
""",
                """\
            pass
        self._each(cid, call, "DELETE", now)
""",
            ),
        ],
    ),
    "replaced before greeted: nothing re-evaluated": (
        "ssp/crash async/crash quorum/crash",
        [
            (
                """\
            if m.inc > 1:  # the process was replaced, perhaps unseen here
""",
                """\
            if peer.inc:  # the process was replaced, perhaps unseen here
""",
            ),
        ],
    ),
}


def mutate(patches):
    source = inspect.getsource(default_model)
    for old, new in patches:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    module = types.ModuleType("mutant")
    module.__file__ = "mutant.py"
    exec(compile(source, "mutant.py", "exec"), module.__dict__)
    return module


def run(limit, budget=25.0, only=""):
    caught = 0
    for name, (modes, patches) in MUTANTS.items():
        if not any(part in name for part in only.split(",")):
            continue
        model, start, found, tried = mutate(patches), time.time(), None, 0
        try:
            said = runner.scripts(model)
        except Exception as error:
            said = [f"script: exception {error!r}"]
        cells = [
            c
            for c in runner.CELLS
            if c[0] in modes.split() or "/".join(c) in modes.split()
        ]
        for seed in range(limit):
            for cell in cells:
                tried += 1
                _, problems = runner.one(seed, *cell, model=model)
                if problems:
                    found = (cell, problems[0])
                    break
            if found or time.time() - start > budget:
                break
        caught += bool(found or said)
        outcome = f"not in {tried} runs"
        if found:
            cell, problem = found
            outcome = f"after {tried:4} runs in {'/'.join(cell)}: {problem[:90]}"
        more = "; " + said[0] if said else "" if found else " NOT CAUGHT"
        print(f"{name:47} {outcome}{more}", flush=True)
    print(caught, "of", len(MUTANTS), "caught")
    return caught == len(MUTANTS)
