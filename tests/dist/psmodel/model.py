# size: one text, to be read beside the protocol's
"""Reference model of torchkv's parameter-server protocol: the sans-I/O core.

Server and Worker are deterministic state machines. They own no thread, clock,
socket, file or random number: a driver calls on_message / on_timer / on_peer_lost /
on_written / on_measured / on_applied / on_copied / call and carries out the actions
that come back, a list of
    ("send", address, message)    address = ("s", server) or ("w", rank); may be lost,
                                  late, twice
    ("measure", slice, round)     heavy: call round.measure, then
                                  on_measured(slice, round)
    ("apply", slice, round)       heavy: sum and updater, then
                                  on_applied(slice, round, error or None)
    ("copy", opno, region)        copy a lease out, then
                                  on_copied(opno, data, the region's stamp after)
    ("fill", region, data)        copy a push into its region, before what follows
    ("slots", slice, kid, slots)  with leases: a slice is born, these are its two slots
    ("erase", slice, kid)         a slice is no more
    ("wake", time)                call on_timer then at the latest
    ("write", name, data)         write a file atomically, then call on_written(name)
    ("return", call, result)      a worker's call ends; result is a dict, an error has
                                  "error" in it
One pair of cores per store; the driver routes by (job, store).
"""

import heapq
from collections import deque, namedtuple

HEARTBEAT = 0.5  # seconds between heartbeats
# silence after which a peer is lost: three heartbeats, and the time to the first
LOST = 2.0
JOIN = 4.0  # silence of a rank that has not said hello yet
RETRY = 0.25  # an operation without an answer is asked for again
PIECE = 2  # elements in a piece (1 MB in life)
FRAME = 4  # pieces and small operations that may share a frame
CREDIT = 2  # frames with pieces under way to one peer
ITEM = 8  # bytes of an element
SPLIT = 40  # bytes from which a key is split
ALIGN = 16  # slices begin at multiples of so many elements, if they have as many
BUFFERS = 2  # regions for the pushes of one slice
BATCHED = {
    "INIT",
    "PUSH",
    "PUSHPULL",
    "PULL",
    "DELETE",
    "CONFIG",
    "ENTER",
    "MEET",
    "SNAPSHOT",
    "CLOSE",
    "NORM",
    "FACTOR",
    "GOT",
    "DONE",
    "VALUE",
    "WAIT",
    "ERROR",
}

# quorum: None = every rank (dist_sync), 1 = dist_async. staleness: None = no bound.
# grace: seconds to wait for more after the quorum. patience: seconds below the quorum.
Policy = namedtuple(
    "Policy", "quorum staleness grace patience", defaults=(None, None, 0.0, 1.0)
)
# push_ref: pushes name a region of the worker's memory. lease: pulls are answered with
# a region.
Config = namedtuple(
    "Config", "job store W S policy digest push_ref lease", defaults=(False, False)
)


class Msg:
    """A message, an operation or a call: named fields."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


def num_pieces(numel):
    return max(1, -(-numel // PIECE))


def piece(vector, i):
    return vector[i * PIECE : (i + 1) * PIECE]


class Region:
    """Memory that processes of one host share. A message that holds it carries only its
    name."""

    def __init__(self, data):
        self.data = data
        self.stamp = None  # (kid, version) in it; changed before data is


def factor(total):
    """What becomes of a step, by the exact norm of all its gradients (0: skipped)."""
    return total % 4


class Round:
    """One update of one slice: all that the heavy work needs. Work comes in two halves,
    so that the simulator can let things happen in between."""

    def __init__(self, key, pushes, rate, slot, waited, begun):
        self.name, self.kid, self.pushes, self.rate, self.slot = (
            key.name,
            key.kid,
            pushes,
            rate,
            slot,
        )
        self.source, self.target = key.slots[key.cur], key.slots[slot]
        self.version, self.waited, self.begun = key.version + 1, waited, begun
        self.group, self.number = pushes[0].group, pushes[0].round
        self.partial, self.factor, self.measured = 0, 1, False
        self.read = {op.rank: [] for op in pushes}  # what was read of each push
        self.poison = next((op.poison for op in pushes if op.poison), None)

    def halves(self):
        middle = len(self.source.data) // 2
        return (0, middle), (middle, len(self.source.data))

    def measure(self, half):
        for i in range(*self.halves()[half]):
            self.partial += (
                sum(op.weight * op.vector[i] for op in self.pushes) % 1000003
            )

    def apply(self, half):
        if half == 0 and self.target is not self.source:
            self.target.data[:] = self.source.data
        for i in range(*self.halves()[half]):
            total = 0
            for op in self.pushes:  # in rank order
                self.read[op.rank].append(op.vector[i])
                total += op.weight * op.vector[i]
            if self.poison in (None, "all") or self.poison == "half" and half == 0:
                self.target.data[i] += self.rate * self.factor * total


class PieceQueue:
    """What waits for one peer: highest priority first, at most CREDIT frames
    unacknowledged."""

    def __init__(self):
        self.heap, self.waiting, self.flying, self.count = [], set(), {}, 0
        self.frames = {}  # number -> (sent, its pieces without GOT)

    def put(self, ident, priority):
        if ident not in self.waiting and ident not in self.flying:
            self.waiting.add(ident)
            self.count += 1
            heapq.heappush(self.heap, (-priority, self.count, ident))

    def ack(self, ident):
        number = self.flying.pop(ident, None)
        if number is not None:
            self.frames[number][1].discard(ident)
            if not self.frames[number][1]:
                del self.frames[number]

    def pop(self, now):
        """(number, pieces) of the next frame. A frame unheard of for RETRY gives its
        credit back."""
        for number, (sent, idents) in list(self.frames.items()):
            if now - sent >= RETRY:
                for ident in idents:
                    del self.flying[ident]
                del self.frames[number]
        idents = []
        if len(self.frames) < CREDIT:
            while self.heap and len(idents) < FRAME:
                ident = heapq.heappop(self.heap)[2]
                self.waiting.discard(ident)
                idents.append(ident)
        if idents:
            self.count += 1
            self.frames[self.count] = (now, set(idents))
            self.flying.update((ident, self.count) for ident in idents)
        return self.count, idents


class Core:
    """What both cores share: the list of actions, and a clock that notices its own
    stops."""

    def __init__(self, now):
        self.out, self.ticked, self.now = [], now, now
        self.ready_to_pump = set()  # peers to which pieces may be sent

    def _take(self):
        """What goes to one peer at one time goes in one frame: so pieces are sent
        last."""
        for peer in sorted(self.ready_to_pump):
            self._pump(peer, self.now)
        self.ready_to_pump.clear()
        out, frames = [], {}
        for action in self.out:
            if action[0] != "send" or action[2].kind not in BATCHED:
                out.append(action)
                continue
            at = action[1], action[2].frame
            if at not in frames:
                frames[at] = []
                out.append(("send", action[1], frames[at]))
            frames[at].append(action[2])
        self.out = []
        for i, (what, *rest) in enumerate(out):
            if what == "send" and isinstance(rest[1], list):
                m = (
                    rest[1][0]
                    if len(rest[1]) == 1
                    else Msg(kind="FRAME", parts=rest[1])
                )
                out[i] = (what, rest[0], m)
        return out

    def _tick(self, now, peers):
        """A process that was stopped must not blame the silence on its peers."""
        gap = now - self.ticked
        self.ticked = now
        if gap <= HEARTBEAT:
            return 0.0
        for peer in peers:
            peer.heard = min(now, peer.heard + gap)
        return gap


# ----------------------------------------------------------------------
# Server
# ----------------------------------------------------------------------


class Stream:
    """The operations of one worker on one key (or, key "", on the server), in program
    order."""

    def __init__(self):
        self.last = 0  # number of the last operation begun
        self.ended = False  # that was a delete
        self.held = {}  # prev -> operation, complete, that came too early
        self.staged = {}  # opno -> operation of which pieces are missing
        self.replies = {}  # opno -> the answer, until the worker says it has it
        self.failed = None  # an error that all later operations get


class Peer:
    """A worker, as a server sees it."""

    def __init__(self, inc, state, now):
        self.inc, self.state, self.heard = inc, state, now  # expected, up, lost, closed
        self.floor = 0  # every operation below has been answered, and the worker knows
        self.streams = {}
        self.queue = PieceQueue()
        self.answers = {}  # opno -> pulled value, until the worker says it has it
        self.leases = {}  # opno -> (key, slot) that the worker may be reading
        self.entered = None  # (phase, opno) of the barrier that it entered
        self.meeting = None  # its operation, while it waits for the others in one


class Key:
    def __init__(self, name, total, whole, value, kid):
        self.name, self.total, self.whole, self.kid = name, total, whole, kid
        self.slots = [Region(value), Region(list(value))]
        self.cur = 0  # the slot of this version
        self.slots[0].stamp = kid, 0
        self.leases = [set(), set()]  # of each slot: (peer, opno)
        self.busy = (
            None  # the round that is being worked on: nothing reads or writes meanwhile
        )
        self.norms = []  # operations that wait for its norm
        self.dying = False  # the last member has gone while it was busy
        self.version = 0  # updates applied
        self.gen = 0  # generation of the hyper-parameters last used; never goes back
        self.snap = 0  # number of the last snapshot that this key is in
        self.digest = 0  # chain over everything applied, in order
        self.clock = {}  # member -> its pushes applied (its round)
        self.received = {}  # member -> its pushes begun
        self.attached, self.gone = set(), set()
        self.pend = {}  # rank -> deque of contributions not yet applied
        self.pulls = []  # (operation, own round it needs)
        self.first_at = self.quorum_at = None  # since when the open round waits
        self.waited = 0.0

    @property
    def value(self):
        return self.slots[self.cur].data


class Server(Core):
    def __init__(self, sid, sinc, config, now, restored=None):
        super().__init__(now)
        self.sid, self.sinc, self.config, self.policy = sid, sinc, config, config.policy
        self.sync = config.policy.quorum is None
        self.peers = {r: Peer(0, "expected", now) for r in range(config.W)}
        self.keys, self.births = {}, {}
        self.waiting_init = {}  # name -> operations
        self.open = {}  # (rank, opno) -> operation begun, not answered
        self.configs, self.committed = {0: 1}, 0
        self.phase = 0  # barriers left, as far as known here
        self.entering = []  # operations
        self.snaps, self.captures, self.snap_seen = {}, {}, 0
        self.fatal = None
        self.got = {}  # (rank, inc) -> pieces of the frame at hand
        self.trace = []  # for the checker only
        if restored:
            self._restore(restored)

    # -- what the driver calls --

    def on_message(self, m, now):
        self.now = now
        for part in m.parts if m.kind == "FRAME" else [m]:
            self._message(part, now)
        for (rank, inc), got in self.got.items():
            self._send(rank, "GOT", inc=inc, opno=None, got=got)
        self.got = {}
        return self._take()

    def _message(self, m, now):
        config = self.config
        if (m.job, m.store) != (config.job, config.store):
            return  # of an earlier job, or another store
        peer = self.peers[m.rank]
        if m.kind == "HELLO":
            self._hello(peer, m, now)
        elif m.inc != peer.inc or peer.state == "lost" or m.sinc != self.sinc:
            if m.inc <= peer.inc:
                self._send(m.rank, "EXPIRED", inc=m.inc, by=peer.inc)
        else:
            peer.heard = now
            self.committed = max(self.committed, m.committed)
            self.phase = max(self.phase, m.phase)
            if m.floor > peer.floor:
                peer.floor = m.floor
                self._forget(peer, now)
            if m.kind == "HEARTBEAT":
                if m.fatal and self.sync:
                    self._fail(m.fatal)
                self._send(m.rank, "ALIVE", fatal=self.fatal)
            elif m.kind == "GOT":
                for ident in m.got:
                    peer.queue.ack(ident)
            elif m.kind == "FREE":
                for opno in m.opnos:
                    self._end_lease(peer, opno, now)
                self._send(m.rank, "FREED", opnos=m.opnos)
            elif m.kind == "BYE":
                if peer.state == "up":
                    peer.state = "closed"
                    self._leave(m.rank, now)
            else:
                self._operation(peer, m, now)
            self.ready_to_pump.add(m.rank)

    def on_timer(self, now):
        self.now = now
        self._tick(now, self.peers.values())
        for rank, peer in self.peers.items():
            limit = {"expected": JOIN, "up": LOST}.get(peer.state)
            if limit and now - peer.heard > limit:
                self._lose(rank, now)
            self.ready_to_pump.add(rank)
        for key in list(self.keys.values()):
            if key.first_at is not None:
                self._advance(key, now)
        return self._take()

    def on_peer_lost(self, rank, now):
        self.now = now
        if self.peers[rank].state == "up":
            self._lose(rank, now)
        return self._take()

    def on_written(self, name, now, error=None):
        self.now = now
        snap = self.snaps.pop(name[1], None)
        if snap:  # also those of older ones that nobody asks for any more
            for n in [n for n in self.captures if n <= name[1] and n not in self.snaps]:
                del self.captures[n]
            if error:
                self._error(snap, ("write", self.sid, None, error))
            else:
                self._reply(snap, "DONE")
        return self._take()

    # -- sessions --

    def _hello(self, peer, m, now):
        if m.digest != self.config.digest:
            return self._send(
                m.rank, "REJECT", inc=m.inc, error=("config", m.rank, None)
            )
        if m.inc < peer.inc or (m.inc == peer.inc and peer.state == "lost"):
            return self._send(m.rank, "EXPIRED", inc=m.inc, by=peer.inc)
        if m.inc > peer.inc:
            if m.inc > 1:  # the process was replaced, perhaps unseen here
                self._lose(m.rank, now)
            self.peers[m.rank] = peer = Peer(m.inc, "up", now)
        peer.heard = now
        gen = max(self.configs)
        self._send(
            m.rank,
            "WELCOME",
            inc=m.inc,
            gen=gen,
            rate=self.configs[gen] if m.rank == 0 and m.inc > 1 else None,
            snap=self.snap_seen,
            phase=self.phase,
        )

    def _lose(self, rank, now):
        peer = self.peers[rank]
        if peer.state in ("lost", "closed"):
            return
        peer.state, peer.streams = (
            "lost",
            {},
        )  # half-received pieces go with the streams
        self.open = {at: op for at, op in self.open.items() if at[0] != rank}
        self.entering = [op for op in self.entering if op.rank != rank]
        peer.meeting = None
        self.trace.append(("lost", now, rank))
        if self.sync:
            self._fail(("worker_lost", rank, None))
        else:
            self._leave(rank, now)
        self._end_leases(peer, now)

    def _leave(self, rank, now):
        """A worker is lost or closed: nothing waits for it any more, nothing of it
        remains but what it has in a round that is being applied: that round takes its
        course."""
        for name, ops in self.waiting_init.items():
            self.waiting_init[name] = [op for op in ops if op.rank != rank]
        for key in list(self.keys.values()):
            self._detach(key, rank, now)
        self._end_leases(
            self.peers[rank], now
        )  # its pulls went first: else they would be answered now
        if rank == 0:
            self.snaps, self.captures = {}, {}
            for name in [n for n in self.waiting_init if n not in self.keys]:
                for op in self.waiting_init.pop(name):
                    self._do_init(op, now)
        self._check_barriers(now)
        self._check_closed()

    def _fail(self, error):
        if self.fatal:
            return
        self.fatal = error
        for op in list(self.open.values()):
            self._error(op, error)
        for rank, peer in self.peers.items():
            if peer.state == "up":
                self._send(rank, "FATAL", inc=peer.inc, fatal=error)

    # -- streams: each operation once, in program order --

    def _operation(self, peer, m, now):
        if m.opno < peer.floor:
            return  # a late copy of something long answered
        stream = peer.streams.setdefault(m.key, Stream())
        self._drop_replies(peer, stream, m.acked, now)
        if m.index is not None:
            self.got.setdefault((m.rank, m.inc), []).append((m.opno, m.index))
        if m.opno in stream.replies:
            return self._answer(m.rank, stream.replies[m.opno], m.have, m.priority)
        if self.fatal and m.kind != "CLOSE":
            return self._send(m.rank, "ERROR", opno=m.opno, error=self.fatal)
        if m.opno <= stream.last or any(
            op.opno == m.opno for op in stream.held.values()
        ):
            return self._send(m.rank, "WAIT", opno=m.opno, missing=self._missing(m))
        if m.pieces:
            op = stream.staged.setdefault(m.opno, m)
            if op is m:
                op.data = {}
            if m.index is not None:
                op.data[m.index] = m.payload
            if len(op.data) < m.pieces:
                return
            del stream.staged[m.opno]
            region = isinstance(
                op.data[0], Region
            )  # read when the round is applied, not before
            op.vector = (
                op.data[0].data
                if region
                else [x for i in range(m.pieces) for x in op.data[i]]
            )
            m = op
        stream.held[m.prev] = m
        while True:
            op = stream.held.pop(stream.last, None)
            if op is None and (stream.last == 0 or stream.ended):
                op = stream.held.pop(0, None)  # an init begins a stream anew
            if op is None:
                break
            stream.last, stream.ended = op.opno, op.kind == "DELETE"
            if peer.entered and op.opno > peer.entered[1] and op.kind != "MEET":
                peer.entered = None  # it has left, perhaps with an error
            self.open[op.rank, op.opno] = op
            if stream.failed and op.kind not in ("INIT", "DELETE"):
                self._error(op, stream.failed)
            else:
                getattr(self, "_do_" + op.kind.lower())(op, now)

    def _forget(self, peer, now):
        """Answers that the worker has; streams of deleted keys with them."""
        for name, stream in list(peer.streams.items()):
            self._drop_replies(peer, stream, peer.floor, now)
            if (
                stream.ended
                and stream.last < peer.floor
                and not stream.held
                and not stream.staged
            ):
                del peer.streams[name]

    def _drop_replies(self, peer, stream, below, now):
        for opno in [n for n in stream.replies if n < below]:
            stream.replies.pop(opno, None)
            peer.answers.pop(opno, None)
            self._end_lease(peer, opno, now)

    # A lease is a promise not to write to the slot. It ends when the worker has copied
    # it out, or with
    # the worker's session: then the stamp tells a worker that is not as lost as it
    # seemed.

    def _end_lease(self, peer, opno, now):
        key, slot = peer.leases.pop(opno, (None, None))
        if key:
            key.leases[slot].discard((peer, opno))
            if self.keys.get(key.name) is key:
                self._advance(key, now)  # an update may have waited for the slot

    def _end_leases(self, peer, now):
        for opno in list(peer.leases):
            self._end_lease(peer, opno, now)

    def _reply(self, op, kind, **fields):
        if self.open.get((op.rank, op.opno)) is not op:
            return  # its worker has gone; its heir may use the same number
        del self.open[op.rank, op.opno]
        reply = Msg(kind=kind, opno=op.opno, **fields)
        self.peers[op.rank].streams[op.key].replies[op.opno] = reply
        self._answer(op.rank, reply, (), op.priority)

    def _answer(self, rank, reply, have, priority):
        if reply.kind == "VALUE" and not reply.lease:
            peer = self.peers[rank]
            peer.answers[reply.opno] = reply
            for i in range(num_pieces(len(reply.vector))):
                if i not in have:
                    peer.queue.put((reply.opno, i), priority)
                    self.ready_to_pump.add(rank)
        else:
            self._send(rank, **vars(reply))

    def _pump(self, rank, now):
        peer = self.peers[rank]
        while peer.state == "up":
            frame, idents = peer.queue.pop(now)
            if not idents:
                return
            for opno, i in idents:
                reply = peer.answers.get(opno)
                if reply is None:
                    peer.queue.ack((opno, i))  # the worker has it meanwhile
                    continue
                self._send(
                    rank,
                    "VALUE",
                    opno=opno,
                    index=i,
                    pieces=num_pieces(len(reply.vector)),
                    payload=piece(reply.vector, i),
                    version=reply.version,
                    kid=reply.kid,
                    digest=reply.digest,
                    round=reply.round,
                    lease=None,
                    frame=frame,
                )

    def _error(self, op, error):
        self._reply(op, "ERROR", error=error)

    def _reject(self, op, code):
        """An operation that no right program sends."""
        error = (code, op.rank, op.key)
        if self.sync:
            self._fail(error)  # its round can never be complete
        else:
            self.peers[op.rank].streams[op.key].failed = error
            self._error(op, error)
        self._check_barriers(0)

    def _send(self, rank, kind, **fields):
        fields.setdefault("inc", self.peers[rank].inc)
        fields.setdefault("frame", 0)
        self.out.append(
            (
                "send",
                ("w", rank),
                Msg(
                    kind=kind,
                    job=self.config.job,
                    store=self.config.store,
                    sid=self.sid,
                    sinc=self.sinc,
                    committed=self.committed,
                    **fields,
                ),
            )
        )

    def _missing(self, m):
        """Whom an operation waits for."""
        key = self.keys.get(m.key)
        if (
            key
            and key.busy
            and m.kind != "INIT"
            and (
                self.sync
                or any(
                    op.opno == m.opno and op.rank == m.rank for op in key.busy.pushes
                )
            )
        ):
            return []  # for this server itself
        if m.kind == "MEET":  # the caller itself, if others wait for its push
            if self.sync and any(
                any(k.pend.values()) and not k.pend.get(m.rank)
                for k in self.keys.values()
            ):
                return [m.rank]
            return [r for r in self._members() if not self.peers[r].meeting]
        if m.kind in ("ENTER", "SNAPSHOT"):  # for pushes that others hold up
            key = next(
                (
                    k
                    for k in self.keys.values()
                    if m.counts.get(k.name, 0) > k.clock.get(m.rank, 1e9)
                ),
                None,
            )
        if m.kind == "INIT":  # for rank 0's value, or for others to delete the old key
            return [r for r in key.clock if r != m.rank] if key else [0]
        if key and self.sync:
            return [r for r in range(self.config.W) if not key.pend.get(r)]
        if key and key.clock:
            return [r for r, c in key.clock.items() if c == min(key.clock.values())]
        return []

    def _members(self):
        return [r for r, p in self.peers.items() if p.state in ("expected", "up")]

    # -- keys --

    def _do_init(self, op, now):
        key = self.keys.get(op.key)
        if key is None and op.rank == 0 and op.pieces:
            key = self._create(op.key, op.total, op.whole, op.vector, op.snap)
        if key is None and self.peers[0].state == "lost":
            return self._error(op, ("worker_lost", 0, op.key))
        if key is None or op.rank in key.gone or key.dying or self._deletes(key, op):
            self.waiting_init.setdefault(op.key, []).append(op)
            return
        if (key.total, key.whole) != (op.total, op.whole):
            self._reject(op, "shape")
            return
        rank = op.rank
        self.peers[rank].streams[op.key].failed = None
        if rank not in key.clock:  # came late: as far as the slowest
            key.clock[rank] = key.received[rank] = min(key.clock.values(), default=0)
        key.attached.add(rank)
        self._reply(
            op, "DONE", round=key.received[rank], version=key.version, kid=key.kid
        )
        if rank == 0:
            for other in self.waiting_init.pop(op.key, []):
                self._do_init(other, now)

    def _deletes(self, key, op):
        """Whether the rank's delete waits for its pushes."""
        return any(o.rank == op.rank and o.kind == "DELETE" for o, _ in key.pulls)

    def _create(self, name, total, whole, value, snap):
        self.births[name] = self.births.get(name, 0) + 1
        key = self.keys[name] = Key(name, total, whole, list(value), self.births[name])
        key.snap = snap  # born after that snapshot, so not in it
        if self.config.lease:
            self.out.append(("slots", name, key.kid, key.slots))
        for rank in range(self.config.W) if self.sync else self._members():
            if self.sync or self.peers[rank].inc <= 1 or rank == 0:
                key.clock[rank] = key.received[rank] = 0
        return key

    def _do_delete(self, op, now):
        key = self.keys.get(op.key)
        if key is None or op.rank not in key.clock:
            return self._reject(op, "unknown")
        key.pulls.append((op, key.received[op.rank]))
        self._advance(key, now)

    def _detach(self, key, rank, now, deleted=False):
        key.clock.pop(rank, None)
        key.received.pop(rank, None)
        key.pend.pop(rank, None)
        key.attached.discard(rank)
        key.pulls = [(op, need) for op, need in key.pulls if op.rank != rank]
        if deleted:
            key.gone.add(rank)
        if key.gone and not key.clock:  # the last one deletes
            key.dying = True
            if not key.busy:
                self._free(key, now)
        else:
            self._advance(key, now)

    def _free(self, key, now):
        if self.keys.get(key.name) is key:
            del self.keys[key.name]
            self.out.append(("erase", key.name, key.kid))
            waiting = self.waiting_init.pop(key.name, [])
            for op in sorted(waiting, key=lambda op: op.rank):
                self._do_init(op, now)

    def _do_push(self, op, now):
        key = self.keys.get(op.key)
        if key is None or op.rank not in key.attached:
            return self._reject(op, "unknown")
        if op.total != key.total or len(op.vector) != len(key.value):
            return self._reject(op, "shape")
        if op.round != key.received[op.rank] + 1:
            return self._reject(op, "round")
        key.received[op.rank] += 1
        key.pend.setdefault(op.rank, deque()).append(op)
        if op.kind == "PUSHPULL":
            key.pulls.append((op, op.round))
        self._advance(key, now)

    _do_pushpull = _do_push

    def _do_pull(self, op, now):
        key = self.keys.get(op.key)
        if key is None or op.rank not in key.attached:
            return self._reject(op, "unknown")
        key.pulls.append((op, key.received[op.rank]))
        self._advance(key, now)

    # -- rounds --

    def _advance(self, key, now):
        if not key.busy and not self.fatal:
            self._answer_pulls(key, now)  # between updates
            if not key.busy and not all(key.leases):
                take = self._close_round(key, now)
                if take:
                    self._begin_round(key, take, now)
        if self.sync and len(key.clock) < self.config.W and any(key.pend.values()):
            lacking = min(set(range(self.config.W)) - set(key.clock))
            self._fail(
                ("left", lacking, key.name)
            )  # closed, or deleted the key, too early
        self._check_barriers(now)

    def _close_round(self, key, now):
        """The ranks whose first waiting pushes make the next update; none: not yet."""
        ready = [r for r in sorted(key.pend) if key.pend[r] and self._admitted(key, r)]
        quorum, grace = self.policy.quorum, self.policy.grace
        if self.sync:
            return ready if len(ready) == self.config.W else None
        if not ready:
            key.first_at = key.quorum_at = None
            return None
        if quorum == 1 and not grace:
            return ready[:1]
        able = [r for r in key.clock if key.pend.get(r) or not self._idle(r)]
        if len(ready) < len(able):
            if key.first_at is None:
                key.first_at = now
                self.out.append(("wake", now + self.policy.patience))
            if len(ready) < min(quorum, len(able)):
                key.quorum_at = None  # also when one of those who made it up is lost
            elif key.quorum_at is None:
                key.quorum_at = now
                self.out.append(("wake", now + grace))
            if now < key.first_at + self.policy.patience and (
                key.quorum_at is None or now < key.quorum_at + grace
            ):
                return None
        key.waited = now - key.first_at if key.first_at is not None else 0.0
        key.first_at = key.quorum_at = None
        return ready

    def _admitted(self, key, rank):
        if key.pend[rank][0].gen > max(self.configs) and self.peers[0].state in (
            "expected",
            "up",
        ):
            return False  # rank 0's change of numbers is still under way
        return self._within(key, rank, key.clock[rank])

    def _within(self, key, rank, clock):
        """Who came back has skipped some pushes: to bind it key by key could be a
        deadlock."""
        bound = self.policy.staleness
        return (
            bound is None
            or self.peers[rank].inc > 1
            or clock - self._slowest(key) <= bound
        )

    def _slowest(self, key):
        """Who waits in a barrier cannot push, and holds nobody up: that would be a
        deadlock."""
        return min(
            [
                c
                for r, c in key.clock.items()
                if not self._idle(r) and self.peers[r].inc <= 1
            ],
            default=max(key.clock.values()),
        )

    def _idle(self, rank):
        entered = self.peers[rank].entered
        return entered is not None and entered[0] >= self.phase

    # A round is one step to everybody: from here to on_applied nothing else touches the
    # slice.

    def _begin_round(self, key, take, now):
        pushes = [key.pend[r].popleft() for r in take]
        lead = pushes[0] if pushes[0].rank == 0 else None
        for op in pushes:
            if op.group != pushes[0].group:
                return self._fail(("group", op.rank, key.name))
        if lead:
            self._capture(
                key, lead.snap
            )  # first the snapshot that this push comes after
        key.gen = max(key.gen, lead.gen if lead else max(op.gen for op in pushes))
        rate = self.configs[
            min((g for g in self.configs if g >= key.gen), default=max(self.configs))
        ]
        slot = self._room(key)
        key.busy = Round(key, pushes, rate, slot, key.waited, now)
        if key.busy.group:
            self.out.append(("measure", key.name, key.busy))
        else:
            self._apply(key)

    def _room(self, key):
        """The slot to write to: this version's, if nobody reads it. A lease is waited
        for; what only a snapshot reads is copied: the snapshot may wait for a push that
        waits for this update."""
        free = [slot for slot in (key.cur, 1 - key.cur) if not key.leases[slot]]
        return min(free, key=lambda slot: len(self._shots(key, key.slots[slot])))

    def _shots(self, key, region):
        return [
            captured[key.name]
            for captured in self.captures.values()
            if key.name in captured and captured[key.name]["region"] is region
        ]

    def _apply(self, key):
        work = key.busy
        for shot in self._shots(key, work.target):
            shot.update(region=None, value=list(work.target.data))
        work.target.stamp = key.kid, work.version
        self.out.append(("apply", key.name, work))

    def on_measured(self, name, work, now):
        self.now = now
        work.measured = True
        key = self.keys.get(name)
        if key and key.busy is work and not self.fatal:
            self._answer_norms(key)
        self._check_closed()
        return self._take()

    def on_applied(self, name, work, error, now):
        """The updater may have thrown: the round counts all the same, the value is what
        it left."""
        self.now = now
        key = self.keys.get(name)
        if key is None or key.busy is not work:
            return self._take()
        key.busy, key.cur = None, work.slot
        key.version += 1
        for op in work.pushes:
            key.digest = hash(
                (key.digest, work.rate, op.rank, op.weight, tuple(work.read[op.rank]))
            )
            if op.rank in key.clock and op.inc == self.peers[op.rank].inc:
                key.clock[op.rank] += 1  # not the heir's of one that was lost meanwhile
        self.trace.append(
            (
                "apply",
                work.begun,
                key.name,
                key.kid,
                key.version,
                work.rate,
                [(op.rank, op.round, key.version - 1 - op.base) for op in work.pushes],
                dict(key.clock),
                work.waited,
            )
        )
        self._reached_snapshots(key)
        if error:
            key.pulls = [(op, need) for op, need in key.pulls if op not in work.pushes]
        for op in work.pushes:
            if error:
                self._error(op, ("updater", None, key.name, error))
            elif op.kind == "PUSH":
                self._reply(
                    op, "DONE", version=key.version, age=key.version - 1 - op.base
                )
        if key.dying:
            self._free(key, now)
            self._check_barriers(now)
        else:
            self._advance(key, now)
        self._check_closed()
        return self._take()

    # -- steps in two phases (sync): rank 0's worker asks for the norms and tells the
    # factor --

    def _do_norm(self, op, now):
        key = self.keys.get(op.key)
        if key is None or op.rank not in key.attached:
            return self._reject(op, "unknown")
        key.norms.append(op)
        self._answer_norms(key)

    def _answer_norms(self, key):
        for op in list(key.norms):
            if key.busy and key.busy.measured and key.busy.number == op.round:
                key.norms.remove(op)
                self._reply(op, "DONE", partial=key.busy.partial)

    def _do_factor(self, op, now):
        key = self.keys.get(op.key)
        if (
            key is None
            or not key.busy
            or not key.busy.measured
            or key.busy.number != op.round
        ):
            return self._reject(op, "unknown")
        key.busy.factor = op.factor
        self._reply(op, "DONE")
        self._apply(key)

    def _answer_pulls(self, key, now):
        pulls, key.pulls = key.pulls, []
        leaving = []
        for op, need in pulls:
            if not self._may_read(key, op, need):
                key.pulls.append((op, need))
            elif op.kind == "DELETE":
                self._capture(key, op.snap if op.rank == 0 else 0)
                self._reply(op, "DONE")
                leaving.append(op.rank)
            else:
                lease = key.slots[key.cur] if self.config.lease else None
                if lease and self.open.get((op.rank, op.opno)) is op:
                    peer = self.peers[op.rank]
                    peer.leases[op.opno] = key, key.cur
                    key.leases[key.cur].add((peer, op.opno))
                self._reply(
                    op,
                    "VALUE",
                    vector=None if lease else list(key.value),
                    lease=lease,
                    version=key.version,
                    kid=key.kid,
                    digest=key.digest,
                    round=need,
                    index=None,
                    pieces=0,
                )
        for rank in leaving:
            self._detach(key, rank, now, deleted=True)

    def _may_read(self, key, op, need):
        if key.clock[op.rank] < need or key.version < op.min_version:
            return False
        return op.kind == "DELETE" or self._within(key, op.rank, need)

    # -- the server's own operations --

    def _do_config(self, op, now):
        self.configs[op.gen] = op.rate
        for gen in [g for g in self.configs if g < op.retire]:
            if not any(key.gen == gen for key in self.keys.values()):
                del self.configs[gen]
        self._reply(op, "DONE")
        for key in list(self.keys.values()):
            self._advance(key, now)

    # A barrier: ENTER at every server (not in sync), then MEET at server 0, which alone
    # decides
    # who meets whom. Each server deciding for itself would pair them differently after
    # a loss.

    def _do_enter(self, op, now):
        self.peers[op.rank].entered = op.phase, op.opno
        self.entering.append(op)
        for key in list(self.keys.values()):
            self._advance(key, now)
        self._check_barriers(now)

    def _do_meet(self, op, now):
        self.peers[op.rank].meeting = op
        self._check_barriers(now)

    def _check_barriers(self, now):
        for op in list(self.entering):  # until what it pushed before is applied
            failed = [
                s.failed
                for name, s in self.peers[op.rank].streams.items()
                if name in op.counts and s.failed
            ]
            waits = any(
                count > self.keys[name].clock.get(op.rank, count)
                for name, count in op.counts.items()
                if name in self.keys and op.rank in self.keys[name].attached
            )
            if failed or not waits:
                self.entering.remove(op)
                self._reply(op, "ERROR", error=failed[0]) if failed else self._reply(
                    op, "DONE"
                )
        meeting = [self.peers[r].meeting for r in self._members()]
        if not meeting or not all(meeting):
            return
        if self.sync:
            for name in sorted(set().union(*[op.counts for op in meeting])):
                most = max(op.counts.get(name, 0) for op in meeting)
                for op in meeting:
                    if op.counts.get(name, 0) < most:
                        return self._fail(("never_pushed", op.rank, name))
        self.phase += 1
        for op in meeting:
            self.peers[op.rank].meeting = None
            self._reply(op, "DONE", phase=self.phase)

    def _do_close(self, op, now):
        self.peers[op.rank].state = "closed"
        self.trace.append(("closed", now, op.rank))
        self._leave(op.rank, now)

    def _check_closed(self):
        """close() ends when no worker needs this server any more: its process may
        exit."""
        working = any(
            key.busy and not (self.fatal and key.busy.measured)
            for key in self.keys.values()
        )
        if not self._members() and not working:
            for op in [o for o in self.open.values() if o.kind == "CLOSE"]:
                self._reply(op, "DONE")

    # -- snapshots: key k as it was after rank 0's pushes before its snapshot call --

    def _do_snapshot(self, op, now):
        self.snap_seen = max(self.snap_seen, op.snap)
        self.snaps[op.snap] = op
        for key in list(self.keys.values()):
            self._reached_snapshots(key)
        self._check_snapshots()

    def _reached_snapshots(self, key):
        """Rank 0 may never push this key again, so its stamp alone is not enough."""
        if key.busy or self.fatal:
            return  # on_applied comes back to it
        for number in sorted(self.snaps):
            count = self.snaps[number].counts.get(key.name)
            if count is not None and key.clock.get(0, count) >= count:
                self._capture(key, number)

    def _capture(self, key, number):
        """Puts the key as it is now into the snapshots up to `number` that lack it."""
        for n in range(key.snap + 1, number + 1):
            self.captures.setdefault(n, {})[key.name] = dict(
                total=key.total,
                whole=key.whole,
                region=key.slots[key.cur],
                value=None,
                version=key.version,
                gen=key.gen,
                kid=key.kid,
                digest=key.digest,
            )
        if number > key.snap:
            key.snap = number
            self.snap_seen = max(self.snap_seen, number)
            self._check_snapshots()

    def _check_snapshots(self):
        for number, op in self.snaps.items():
            captured = self.captures.get(number, {})
            if not op.written and all(name in captured for name in op.counts):
                op.written = True
                keys = {name: captured[name] for name in op.counts}
                self.out.append(
                    (
                        "write",
                        ("shard", number, self.sid, self.config.job),
                        dict(
                            number=number,
                            keys=keys,
                            gen=op.gen,
                            births=dict(self.births),
                            rates={
                                g: rate
                                for g, rate in self.configs.items()
                                if g <= op.gen
                            },
                        ),
                    )
                )

    def _restore(self, data):
        self.configs = dict(data["rates"])
        self.committed = data["gen"]
        self.snap_seen = data["number"]
        self.births = dict(data["births"])  # an incarnation's number is not used again
        for name, was in data["keys"].items():
            self.births[name] = was["kid"] - 1
            key = self._create(
                name, was["total"], was["whole"], was["value"], data["number"]
            )
            self.births[name] = data["births"][name]
            key.version, key.gen, key.digest = was["version"], was["gen"], was["digest"]
            key.slots[0].stamp = key.kid, key.version
            if self.sync:
                key.clock = dict.fromkeys(key.clock, key.version)
                key.received = dict(key.clock)


# ----------------------------------------------------------------------
# Worker
# ----------------------------------------------------------------------


class Link:
    """A server, as a worker sees it."""

    def __init__(self, now):
        self.state, self.heard, self.beat = "hello", now, -1.0  # hello, up, lost
        self.sinc = 0
        self.gen = 0  # of the options that it had when it said welcome
        self.queue = PieceQueue()
        self.outstanding = set()
        self.freeing, self.freed_at = set(), 0.0  # leases that have ended, unconfirmed


class Table:
    """A slice of a key, as a worker sees it."""

    def __init__(self, server, numel=0):
        self.server, self.numel, self.kid = server, numel, 0
        self.regions, self.free = [], []  # of pushes; those that no operation owns
        self.round, self.base, self.last, self.ready = 0, 0, 0, False
        self.outstanding = set()


def place(key, numel, S, whole=False):
    """[(server, name, low, high)]: a pure function, so that ranks need not agree first.

    The first slice is at home whatever the size: there ranks that disagree about it
    meet."""
    home = stable_hash(key) % S
    parts = min(S, numel) if numel * ITEM >= SPLIT and not whole else 1
    cut, rest = divmod(numel, parts)

    def begin(i):
        even = i * cut + i * rest // parts
        if i == parts:
            return numel
        return i * cut if cut < ALIGN else even - even % ALIGN

    return [
        ((home + i) % S, f"{key}/{i}", begin(i), begin(i + 1)) for i in range(parts)
    ]


def stable_hash(key):
    """64-bit FNV-1a."""
    value = 14695981039346656037
    for byte in key.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


class Worker(Core):
    def __init__(self, rank, inc, config, now):
        super().__init__(now)
        self.rank, self.inc, self.config = rank, inc, config
        self.sync = config.policy.quorum is None
        self.links = {s: Link(now) for s in range(config.S)}
        self.opno = 0
        self.ops, self.calls = {}, {}  # opno -> operation, id -> call
        self.next_call = 0
        self.keys = {}  # key -> (numel, places)
        self.deleted = set()  # keys whose delete has been sent: unknown to calls
        self.tables = {}  # slice -> Table
        self.control = {s: Table(s) for s in range(config.S)}
        self.gen = self.committed = self.snap = self.phase = 0
        self.fatal = None  # an error that every call gets
        self.closing = None
        self.groups = {}  # of rank 0: id -> list push of which norms are awaited
        self.got = {}  # server -> pieces of the frame at hand
        self.stalled = None  # call that waits for a region; so does the program
        self.deleting = set()  # calls that wait for others on their key
        # Of rank 0: the predecessor's latest options; whether all servers have them.
        self.options, self.completed = None, False

    def ready(self):
        """Calls may begin: rank 0 must know the servers' generation and snapshot
        numbers."""
        return self.fatal or all(link.state != "hello" for link in self.links.values())

    # -- what the driver calls --

    def on_message(self, m, now):
        self.now = now
        for part in m.parts if m.kind == "FRAME" else [m]:
            self._message(part, now)
        for sid, got in self.got.items():
            self._send(sid, "GOT", opno=None, got=got)
        self.got = {}
        return self._take()

    def _message(self, m, now):
        if (m.job, m.store, m.inc) != (self.config.job, self.config.store, self.inc):
            return
        link = self.links[m.sid]
        if link.state == "lost":
            return
        if m.kind == "WELCOME" and link.state == "hello":
            link.state, link.sinc, link.gen = "up", m.sinc, m.gen
            if m.gen > self.gen:
                self.gen, self.options = m.gen, m.rate
            self.snap, self.phase = max(self.snap, m.snap), max(self.phase, m.phase)
            for opno in sorted(link.outstanding):
                self._transmit(self.ops[opno], now)
            self._complete_config(now)
        elif m.kind == "REJECT":
            self._fail(m.error, now)
        elif link.state == "up" and m.sinc != link.sinc:
            self._lose(m.sid, now)  # another process answers in its place
        elif m.kind == "EXPIRED":
            self._fail(
                ("worker_lost", self.rank, None)
                if self.sync
                else ("superseded" if m.by > self.inc else "expired", m.sid, None),
                now,
            )
        elif m.kind in ("FATAL", "ALIVE") and m.fatal:
            self._fail(m.fatal, now)
        link.heard = now
        self.committed = max(self.committed, m.committed)
        op = self.ops.get(getattr(m, "opno", None))
        if m.kind == "GOT":
            for opno, index in m.got:
                link.queue.ack((opno, index))
                if opno in self.ops:
                    self.ops[opno].got.add(index)
        elif m.kind == "FREED":
            link.freeing.difference_update(m.opnos)
        elif m.kind == "WAIT" and op:
            op.missing = m.missing
            op.got.update(range(op.pieces))
        elif m.kind == "VALUE" and m.lease:
            if op and not op.lease:
                op.lease = m
                self.out.append(("copy", op.opno, m.lease))
        elif m.kind == "VALUE":
            self.got.setdefault(m.sid, []).append((m.opno, m.index))
            if op:
                op.have[m.index] = m.payload
                if len(op.have) == m.pieces:
                    vector = [x for i in range(m.pieces) for x in op.have[i]]
                    self._finish(
                        op,
                        now,
                        vector=vector,
                        version=m.version,
                        kid=m.kid,
                        digest=m.digest,
                        round=m.round,
                    )
        elif m.kind == "DONE" and op:
            self._finish(
                op,
                now,
                **{
                    f: getattr(m, f)
                    for f in ("version", "age", "round", "kid", "phase", "partial")
                    if hasattr(m, f)
                },
            )
        elif m.kind == "ERROR" and op:
            self._finish(op, now, error=m.error)
            if self.sync and m.error[0] not in ("updater", "write"):
                self._fail(m.error, now)
        self.ready_to_pump.add(m.sid)

    def _complete_config(self, now):
        """Rank 0's predecessor may have been lost before all servers had its last
        options: pushes that carry their number would wait for ever."""
        if self.rank != 0 or self.inc == 1 or self.completed:
            return
        if self.fatal or not self.ready():
            return
        self.completed = True
        for sid, link in self.links.items():
            if link.state == "up" and link.gen < self.gen:
                self._issue(0, "CONFIG", self.control[sid], "", now, rate=self.options)

    def on_copied(self, opno, data, stamp, now):
        self.now = now
        op = self.ops.get(opno)
        if op and stamp != (op.lease.kid, op.lease.version):
            op.lease = None  # our session had ended meanwhile: asking again tells
        elif op:
            m, link = op.lease, self.links[op.server]
            link.freeing.add(opno)
            self._free(op.server, now)
            self._finish(
                op,
                now,
                vector=data,
                version=m.version,
                kid=m.kid,
                digest=m.digest,
                round=m.round,
            )
        return self._take()

    def _free(self, sid, now):
        link = self.links[sid]
        link.freed_at = now
        self._send(sid, "FREE", opno=None, opnos=sorted(link.freeing))

    def on_timer(self, now):
        self.now = now
        stopped = self._tick(now, self.links.values())
        for call in self.calls.values():
            call.deadline += stopped
        for sid, link in self.links.items():
            if link.state == "lost":
                continue
            if now - link.heard > (LOST if link.state == "up" else JOIN):
                self._lose(sid, now)
            elif now - link.beat >= HEARTBEAT:
                link.beat = now
                self._beat(sid)
        for op in list(self.ops.values()):
            if now - op.sent_at >= RETRY:
                self._transmit(op, now)
        self.ready_to_pump.update(self.links)
        for sid, link in self.links.items():
            if link.freeing and link.state == "up" and now - link.freed_at >= RETRY:
                self._free(sid, now)
        for cid, call in list(self.calls.items()):
            if now >= call.deadline:
                ops = [self.ops[n] for n in sorted(call.left)]
                if self.stalled == cid:  # then those that have the regions tell
                    ops = [op for op in self.ops.values() if op.region]
                elif cid in self.deleting:  # and here those on the key
                    names = {p[1] for p in self.keys.get(call.key, (0, ()))[1]}
                    ops = [op for op in self.ops.values() if op.key in names]
                missing = sorted(set().union(*[op.missing or () for op in ops]))
                self._return(
                    cid, error=("timeout", missing, ops[0].key if ops else None)
                )
        self._begin_deletes(now)
        return self._take()

    def on_peer_lost(self, sid, now):
        self.now = now
        if self.links[sid].state == "up":
            self._lose(sid, now)
        return self._take()

    def on_written(self, name, now, error=None):
        self.now = now
        for cid, call in list(self.calls.items()):
            if call.kind == "snapshot" and call.number == name[1]:
                failed = {"error": ("write", self.rank, None, error)} if error else {}
                self._return(cid, **failed)
        return self._take()

    def call(self, kind, now, timeout, key=None, **a):
        """Begins a call. Its end is the action ("return", id, result), perhaps already
        here."""
        self.now = now
        self.next_call += 1
        cid = self.next_call
        call = self.calls[cid] = Msg(
            kind=kind,
            key=key,
            left=set(),
            results={},
            deadline=now + timeout,
            begun=False,
            met=False,
            number=None,
            args=a,
        )
        if self.fatal:
            self._return(cid, error=self.fatal)
        elif kind in ("push", "pushpull", "pushlist") and not self._room(call):
            self.stalled = (
                cid  # the caller waits: later calls must not overtake this one
            )
        else:
            getattr(self, "_begin_" + kind)(cid, call, now, **a)
        return cid, self._take()

    # -- calls --

    def _room(self, call):
        """With dist_async a push may wait for a region: nobody's program can keep it.
        In other modes a region is added: ranks that push in different orders would wait
        for each other for ever."""
        if (
            not self.config.push_ref
            or self.config.policy.quorum != 1
            or self.config.policy.staleness is not None
        ):
            return True
        names = [call.key] if call.key else [item["key"] for item in call.args["items"]]
        tables = [
            self.tables[p[1]]
            for key in names
            if key in self.keys
            for p in self.keys[key][1]
        ]
        return any(self._cannot(key) for key in names) or all(
            table.free or len(table.regions) < BUFFERS for table in tables
        )

    def _unstall(self, now):
        cid = self.stalled
        if cid and (cid not in self.calls or self._room(self.calls[cid])):
            self.stalled = None
            if cid in self.calls:
                call = self.calls[cid]
                getattr(self, "_begin_" + call.kind)(cid, call, now, **call.args)

    def _begin_init(self, cid, call, now, numel, vector, whole=False):
        places = place(call.key, numel, self.config.S, whole)
        self.keys[call.key] = (
            numel,
            places,
        )  # and, if a server is lost, remembered as such
        self.deleted.discard(call.key)
        for sid, name, _, _ in places:
            if self.links[sid].state == "lost":
                return self._return(cid, error=("server_lost", sid, name))
        for sid, name, low, high in places:
            old = self.tables.get(name)  # of an init or delete that has timed out
            if old is None or (old.server, old.numel) != (sid, high - low):
                self.tables[name] = Table(sid, high - low)
                self.tables[name].last = old.last if old else 0
            else:
                old.base, old.ready = 0, False
            part = vector[low:high] if self.rank == 0 else None
            self._issue(
                cid,
                "INIT",
                self.tables[name],
                name,
                now,
                total=numel,
                vector=part,
                whole=whole,
            )

    def _each(self, cid, call, kind, now, **fields):
        error = self._cannot(call.key)
        if error:
            return self._return(cid, error=error)
        self._slices(cid, call.key, kind, now, **fields)

    def _cannot(self, key):
        if key not in self.keys or key in self.deleted:
            return ("unknown", self.rank, key)
        for sid, name, _, _ in self.keys[key][1]:  # all or nothing
            if self.links[sid].state == "lost":
                return ("server_lost", sid, name)

    def _begin_pushlist(self, cid, call, now, items, two_phase):
        """Many keys at once: one call, one frame per server (or a few), one outcome."""
        for item in items:
            error = self._cannot(item["key"])
            if error:
                return self._return(cid, error=error)
        names = [p[1] for item in items for p in self.keys[item["key"]][1]]
        tables = {name: self.tables[name] for name in names}
        group = (
            min((name, t.kid, t.round + 1) for name, t in tables.items())
            if two_phase
            else None
        )
        for item in items:
            self._slices(
                cid,
                item["key"],
                "PUSH",
                now,
                vector=item["vector"],
                weight=item["weight"],
                priority=item["priority"],
                poison=item["poison"],
                group=group,
            )
        if two_phase and self.rank == 0:
            self.groups[group] = Msg(
                rounds={name: t.round for name, t in tables.items()},
                partials={},
                cid=cid,
            )
            for name, table in tables.items():
                self._issue(
                    cid, "NORM", table, name, now, round=table.round, group=group
                )

    def _measured(self, group, name, partial, now):
        """The norm of one slice of a step is known; the last one decides the factor for
        all."""
        step = self.groups.get(group)
        if step is None:
            return
        step.partials[name] = partial
        if len(step.partials) == len(step.rounds):
            del self.groups[group]
            for name, number in step.rounds.items():
                self._issue(
                    step.cid,
                    "FACTOR",
                    self.tables[name],
                    name,
                    now,
                    round=number,
                    factor=factor(sum(step.partials.values())),
                )

    def _slices(self, cid, key, kind, now, **fields):
        vector = fields.pop("vector", None)
        total, places = self.keys[key]
        if kind == "DELETE":
            self.deleted.add(key)
        for _, name, low, high in places:
            part = vector[low:high] if vector is not None else None
            table = self.tables[name]
            if part is not None:
                table.round += 1
            self._issue(
                cid,
                kind,
                table,
                name,
                now,
                vector=part,
                round=table.round,
                base=table.base,
                total=total,
                **fields,
            )

    def _begin_push(self, cid, call, now, **a):
        self._each(cid, call, "PUSH", now, **a)

    def _begin_pull(self, cid, call, now, **a):
        self._each(cid, call, "PULL", now, **a)

    def _begin_pushpull(self, cid, call, now, **a):
        self._each(cid, call, "PUSHPULL", now, **a)

    def _begin_delete(self, cid, call, now):
        """It waits for other calls on the key: the server forgets what a rank that
        leaves has asked for."""
        if not self._cannot(call.key) and any(
            self.ops[opno].cid in self.calls
            for _, name, _, _ in self.keys[call.key][1]
            for opno in self.tables[name].outstanding
        ):
            self.deleting.add(cid)
        else:
            self._each(cid, call, "DELETE", now)

    def _begin_deletes(self, now):
        cids, self.deleting = sorted(self.deleting), set()
        for cid in cids:
            if cid in self.calls:
                self._begin_delete(cid, self.calls[cid], now)

    def _everywhere(self, cid, kind, now, **fields):
        lost = [s for s, link in self.links.items() if link.state == "lost"]
        for sid, table in self.control.items():
            if sid in lost:
                continue  # nothing of ours is under way there
            self._issue(cid, kind, table, "", now, counts=self._counts({sid}), **fields)
        if len(lost) == len(self.links):
            self._complete(cid, self.calls[cid], now)

    def _begin_config(self, cid, call, now, rate):
        """REQUIRES: rank 0. Not waited for: what is pushed from now on carries the
        number."""
        oldest = min([op.gen for op in self.ops.values()], default=self.gen)
        self.gen += 1
        call.number = self.gen
        self._everywhere(cid, "CONFIG", now, rate=rate, retire=oldest)

    def _begin_barrier(self, cid, call, now):
        if self.sync or self.links[0].state == "lost":
            self._meet(cid, now)
        else:
            self._everywhere(cid, "ENTER", now)

    def _meet(self, cid, now):
        self.calls[cid].met = True
        if self.links[0].state == "lost":
            return self._return(cid, error=("server_lost", 0, None))
        self._issue(
            cid, "MEET", self.control[0], "", now, counts=self._counts(self.links)
        )

    def _counts(self, servers):
        """The pushes of each slice on these servers."""
        gone = {p[1] for key in self.deleted for p in self.keys[key][1]}
        return {
            name: t.round
            for name, t in sorted(self.tables.items())
            if t.server in servers and t.ready and name not in gone
        }

    def skew(self, key, by):
        """For simulations of programs that go wrong: rounds that are out of order."""
        for name, table in self.tables.items():
            if name.startswith(key):
                table.round += by

    def _begin_snapshot(self, cid, call, now, step):
        for sid, link in self.links.items():
            if link.state == "lost":
                return self._return(cid, error=("server_lost", sid, None))
        self.snap += 1  # only now: what carries a number is captured for it
        call.number = self.snap
        call.manifest = {
            k: numel for k, (numel, _) in self.keys.items() if k not in self.deleted
        }
        self._everywhere(cid, "SNAPSHOT", now, step=step)

    def _begin_close(self, cid, call, now):
        self.closing = cid
        self._close_if_idle(now)

    def _close_if_idle(self, now):
        """Calls must have ended before anybody hears that we go; abandoned operations
        need not."""
        call = self.calls.get(self.closing)
        if call and not call.begun and len(self.calls) == 1:
            self._everywhere(self.closing, "CLOSE", now)

    # -- operations --

    def _issue(self, cid, kind, table, name, now, vector=None, priority=0, **fields):
        sid = table.server
        link, call = self.links[sid], self.calls.get(cid)
        self.opno += 1
        region = None
        if self.config.push_ref and kind in ("PUSH", "PUSHPULL"):
            if not table.free:
                table.regions.append(Region([0] * table.numel))
                table.free.append(table.regions[-1])
            region = table.free.pop(0)  # the server's until its final answer
            region.data[:] = vector
            self.out.append(("fill", region, vector))
        fields.setdefault("gen", self.gen if self.rank == 0 else self.committed)
        op = Msg(
            opno=self.opno,
            prev=table.last,
            kind=kind,
            key=name,
            server=sid,
            cid=cid,
            vector=vector,
            region=region,
            lease=None,
            pieces=1
            if region
            else num_pieces(len(vector))
            if vector is not None
            else 0,
            got=set(),
            have={},
            table=table,
            sent_at=now,
            missing=None,
            priority=priority,
            gen=fields.pop("gen"),
            snap=self.snap,
            fields=fields,
        )
        table.last = op.opno
        table.outstanding.add(op.opno)
        link.outstanding.add(op.opno)
        self.ops[op.opno] = op
        if call:
            call.begun = True
            call.left.add(op.opno)
        self._transmit(op, now)

    def _transmit(self, op, now):
        """Sends what the server has not confirmed; if it has all, asks what keeps
        it."""
        op.sent_at = now
        if self.links[op.server].state != "up":
            return
        missing = [i for i in range(op.pieces) if i not in op.got]
        for i in missing:
            self.links[op.server].queue.put((op.opno, i), op.priority)
            self.ready_to_pump.add(op.server)
        if not missing:
            self._send_op(op, None)

    def _send_op(self, op, index, frame=0):
        fields = dict(
            round=0,
            base=0,
            total=0,
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
        fields.update(op.fields)
        payload = None
        if index is not None:
            payload = op.region or piece(op.vector, index)
        self._send(
            op.server,
            op.kind,
            opno=op.opno,
            prev=op.prev,
            key=op.key,
            pieces=op.pieces,
            index=index,
            payload=payload,
            frame=frame,
            acked=min(op.table.outstanding),
            have=tuple(op.have),
            gen=op.gen,
            snap=op.snap,
            priority=op.priority,
            written=False,
            **fields,
        )

    def _pump(self, sid, now):
        link = self.links[sid]
        while link.state == "up":
            frame, idents = link.queue.pop(now)
            if not idents:
                return
            for ident in idents:
                op = self.ops.get(ident[0])
                if op is None or ident[1] in op.got:
                    link.queue.ack(ident)
                else:
                    op.sent_at = now
                    self._send_op(op, ident[1], frame)

    def _send(self, sid, kind, **fields):
        link = self.links[sid]
        fields.setdefault("frame", 0)
        self.out.append(
            (
                "send",
                ("s", sid),
                Msg(
                    kind=kind,
                    job=self.config.job,
                    store=self.config.store,
                    rank=self.rank,
                    inc=self.inc,
                    sinc=link.sinc,
                    floor=min(link.outstanding, default=self.opno + 1),
                    committed=self.committed,
                    phase=self.phase,
                    digest=self.config.digest,
                    **fields,
                ),
            )
        )

    def _beat(self, sid):
        if self.links[sid].state == "hello":
            self._send(sid, "HELLO")
        else:
            self._send(sid, "HEARTBEAT", fatal=self.fatal if self.sync else None)

    def _finish(self, op, now, **result):
        del self.ops[op.opno]
        table, name = op.table, op.key
        table.outstanding.discard(op.opno)
        self.links[op.server].outstanding.discard(op.opno)
        if op.region and result.get("error", " ")[0] != "server_lost":
            table.free.append(op.region)  # who seems lost may still be reading
        if "error" not in result:
            if op.kind == "INIT":
                table.round, table.base, table.ready = (
                    result["round"],
                    result["version"],
                    True,
                )
                table.kid = result["kid"]
            elif op.kind == "NORM":
                self._measured(op.fields["group"], name, result["partial"], now)
            elif op.kind == "MEET":
                self.phase = max(self.phase, result["phase"])
            elif op.kind in ("PULL", "PUSHPULL"):
                table.base = max(table.base, result["version"])
        if op.kind == "DELETE":
            self._forget(name)
        call = self.calls.get(op.cid)
        if call:
            call.left.discard(op.opno)
            if op.kind not in ("NORM", "FACTOR"):
                call.results[name or op.server] = result
            thrown = sorted(r["error"] for r in call.results.values() if "error" in r)
            if result.get("error", ("updater",))[0] != "updater":
                self._return(
                    op.cid, error=result["error"]
                )  # at once: other slices may wait for ever
            elif (
                not call.left and thrown
            ):  # all have answered: every rank names the same slice
                self._return(op.cid, error=thrown[0])
            elif not call.left:
                self._complete(op.cid, call, now)
        self._unstall(now)
        self._begin_deletes(now)
        self._close_if_idle(now)

    def _forget(self, name):
        """Of a key, when all servers have answered its delete: until then, an init goes
        on with its streams."""
        for key in [k for k in self.deleted if name in {p[1] for p in self.keys[k][1]}]:
            names = [p[1] for p in self.keys[key][1]]
            if all(self.tables[n].last not in self.ops for n in names):
                del self.keys[key]
                self.deleted.discard(key)
                for n in names:
                    del self.tables[n]

    def _complete(self, cid, call, now):
        if call.kind == "barrier" and not call.met:
            return self._meet(cid, now)
        if call.kind == "config":
            self.committed = max(self.committed, call.number)
        elif call.kind == "snapshot":  # every shard is on disk: now it counts
            self.out.append(
                (
                    "write",
                    ("manifest", call.number),
                    dict(
                        number=call.number,
                        job=self.config.job,
                        step=call.args["step"],
                        keys=call.manifest,
                    ),
                )
            )
            return
        elif call.kind == "close":
            for sid in self.links:
                self._send(sid, "BYE")
        self._return(cid, parts=call.results)

    def _return(self, cid, **result):
        if self.stalled == cid:
            self.stalled = None
        if self.calls.pop(cid, None):
            self.out.append(("return", cid, result))
            if self.closing:
                self._close_if_idle(self.now)

    # -- failures --

    def _lose(self, sid, now):
        link = self.links[sid]
        link.state = "lost"
        if self.sync and not self.closing:
            return self._fail(("server_lost", sid, None), now)
        for opno in sorted(link.outstanding):
            op = self.ops[opno]
            error = {"error": ("server_lost", sid, op.key)}
            if op.kind in ("CLOSE", "ENTER", "CONFIG"):
                error = {}  # the other servers carry on
            self._finish(op, now, **error)
        self._complete_config(now)

    def _fail(self, error, now):
        if self.fatal:
            return
        self.fatal = error
        for sid, link in self.links.items():
            if link.state != "hello":
                self._beat(sid)  # the others should hear of the cause, not of us
        for cid in list(self.calls):
            self._return(cid, error=error)
