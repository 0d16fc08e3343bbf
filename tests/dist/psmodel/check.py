"""The history checker.

It reads what the workers called and what came back, and knows the programs; of the
servers it uses only the order of updates (staleness, quorum) and the values at the end.
"""
# size: one set of rules

import itertools
from collections import defaultdict

from .sim import DIGIT, RATES

MASK = (1 << DIGIT) - 1


def digits(value):
    """{number of a push: what it added} of one element."""
    found, uid = {}, 0
    while value:
        if value & MASK:
            found[uid] = value & MASK
        value >>= DIGIT
        uid += 1
    return found


def expand(rows):
    """A list push is one call, and for each of its keys a push."""
    for row in rows:
        if row.kind != "pushlist":
            yield row
        for item in row.ins["items"] if row.kind == "pushlist" else ():
            one = type(row)(**vars(row))
            one.__dict__.update(vars(row), kind="push", key=item["key"], ins=item)
            if row.result and "parts" in row.result:
                one.result = dict(
                    row.result,
                    parts={
                        n: p
                        for n, p in row.result["parts"].items()
                        if n.split("/")[0] == item["key"]
                    },
                )
            yield one


class Checker:
    def __init__(self, sim):
        self.sim, self.plan, self.problems, self.decoded = sim, sim.plan, [], {}
        self.immortal = {
            r for r in range(self.plan["W"]) if r not in sim.faulty_workers
        }

    def bad(self, rule, *what):
        self.problems.append(f"{rule}: {' '.join(map(str, what))}")

    def check(self):
        self.calls_end()
        self.errors_are_right()
        self.leases_end()
        for store in self.plan["programs"]:
            rows = list(expand(r for r in self.sim.history if r.store == store))
            if self.plan["mode"] == "sync" or store == 1:
                self.sync_values(store, rows)
            else:
                self.async_values(store, rows)
                self.bounds(store, rows)
            self.versions(rows)
        return self.problems

    # -- every call ends in time --

    def calls_end(self):
        sim = self.sim
        for row in sim.history:
            late = row.t0 + self.plan["timeout"] + 0.5 + row.paused
            if row.t1 is not None:
                if row.t1 > late:
                    self.bad(
                        "hang", row.kind, row.key, "rank", row.rank, row.t1 - row.t0
                    )
            elif (
                row.process
                and row.process.alive
                and not row.process.paused
                and sim.now > late
            ):
                self.bad("hang", row.kind, row.key, "rank", row.rank, "since", row.t0)
        for app in sim.apps:
            if app.process.alive and not app.process.paused and not app.done:
                self.bad(
                    "stuck", "rank", app.rank, "at", app.pc, "of", len(app.program)
                )

    def leases_end(self):
        """Only a session that lives holds a slot."""
        for server in self.sim.servers.values():
            for key in server.keys.values():
                for peer, opno in set().union(*key.leases):
                    if peer.state != "up" or peer not in server.peers.values():
                        self.bad(
                            "leak", key.name, "leased to", peer.inc, peer.state, opno
                        )

    # -- errors name the right rank, server and key --

    def errors_are_right(self):
        plan, sim = self.plan, self.sim
        profile, wrong = plan["profile"], plan["misuse"]
        seen = [
            (row, row.result["error"])
            for row in sim.history
            if row.result and "error" in row.result
        ]
        culprits = set()
        if wrong:
            culprits = {
                row.rank
                for row, e in seen
                if e[0] == "timeout" and wrong[1] in (e[1] or ())
            }
        for row, error in seen:
            code, who = error[0], error[1]
            right = (
                profile == "crash"
                and row.rank in sim.faulty_workers
                and code != "timeout"
                and (
                    code != "server_lost"
                    or bool(sim.faulty_servers)
                    or plan["mode"] == "sync"
                )
            )
            if code == "timeout" and profile == "crash" and plan["mode"] != "sync":
                # a lost shard, or one that only some have lost, keeps ranks from
                # meeting
                right = bool(sim.faulty_servers and who) or row.kind == "close"
            if right:
                pass
            elif code == "timeout" and row.ins.get("timeout"):
                right = True  # asked for
            elif code == "updater":  # the same for all; which rounds: see sync_values
                right = (
                    who is None
                    and row.kind in ("push", "pushpull", "pushlist")
                    and plan["poison"]
                )
            elif code == "write":
                right = row.kind == "snapshot" and who in sim.full_disks
            elif code == "worker_lost":
                right = (
                    who in sim.faulty_workers or wrong and who in culprits | {wrong[1]}
                )
                # a server that was cut off takes the others for lost
                right = (
                    right
                    or plan["mode"] != "sync"
                    and row.kind == "init"
                    and sim.faulty_servers
                )
            elif code == "server_lost":
                right = (
                    who in sim.faulty_servers
                    or wrong
                    and plan["colocated"]
                    and who in culprits | {wrong[1]}
                )
                if error[2] and row.key:
                    places = sim.model.place(
                        row.key, row.ins.get("numel") or 9, plan["S"]
                    )
                    right = right and who in [p[0] for p in places]
            elif code in ("expired", "superseded"):
                right = plan["mode"] != "sync" and (
                    row.rank in sim.faulty_workers or who in sim.faulty_servers
                )
            elif wrong:
                if (
                    code == "timeout"
                ):  # a ring of ranks waiting: one of them names the cause
                    right = (
                        wrong[0] == "skip"
                        and bool(culprits)
                        or wrong[1] in (who or ())
                        or (plan["mode"] != "sync" and plan["colocated"] and bool(who))
                    )
                else:
                    names = {"skip": "never_pushed", "early_close": "left"}
                    right = (
                        code == names.get(wrong[0], wrong[0])
                        and who == wrong[1]
                        and (
                            error[2] is None
                            or error[2].split("/")[0] == wrong[2]
                            or code == "left"
                        )
                    )
                    if wrong[0] == "skip" and code in ("left", "group"):
                        right = who == wrong[1]
            if not right:
                self.bad(
                    "error",
                    row.kind,
                    row.key,
                    "rank",
                    row.rank,
                    error,
                    "faulty",
                    sim.faulty_workers,
                    sim.faulty_servers,
                    wrong,
                )
        if profile in ("calm", "flaky"):
            for app in sim.apps:
                if not app.done or app.rows:
                    self.bad("unfinished", app.rank)
        if wrong and not any(e[1] == wrong[1] or e[0] == "timeout" for _, e in seen):
            self.bad("unnoticed", wrong)
        if (
            profile == "restart"
            and sim.restarts
            and not any(
                row.job == sim.job
                and row.kind == "close"
                and row.result
                and "error" not in row.result
                for row in sim.history
            )
        ):
            self.bad("unfinished", "after restart")

    # -- helpers on values --

    def values(self, row):
        if row.kind in ("pull", "pushpull") and row.result and "parts" in row.result:
            yield from row.result["parts"].items()

    def content(self, row, name, part):
        """Digits of a pulled slice; every element must tell the same."""
        if len(set(part["vector"])) != 1:
            self.bad("torn", row.kind, name, "rank", row.rank)
        value = part["vector"][0]
        if value not in self.decoded:
            self.decoded[value] = digits(value)
        return self.decoded[value]

    def versions(self, rows):
        """One version is one value for everybody; for one worker versions never go
        back."""
        known, done = {}, defaultdict(list)
        for row in rows:
            for name, part in self.values(row):
                at = (name, part["kid"], part["version"])
                if known.setdefault(at, part["digest"]) != part["digest"]:
                    self.bad("diverged", at, "rank", row.rank)
                done[row.job, row.rank, name].append((row, part))
        for seen in done.values():
            best = (0, 0)
            ended = sorted(seen, key=lambda x: x[0].end)
            i = 0
            for row, part in sorted(seen, key=lambda x: x[0].start):
                while ended[i][0].end < row.start:
                    best = max(best, (ended[i][1]["kid"], ended[i][1]["version"]))
                    i += 1
                if (part["kid"], part["version"]) < best:
                    self.bad(
                        "backwards", row.key, "rank", row.rank, part["version"], best
                    )
        for row in rows:
            if row.kind == "push" and row.result and "parts" in row.result:
                for name, part in row.result["parts"].items():
                    bases = [
                        p["version"]
                        for r, p in done[row.job, row.rank, name]
                        if r.end < row.start
                        and r.inc == row.inc
                        and p["kid"] == done[row.job, row.rank, name][-1][1]["kid"]
                    ]
                    if (
                        part["age"] < 0
                        or bases
                        and part["age"] > part["version"] - 1 - 0
                    ):
                        self.bad("age", row.key, part)

    # -- sync: the program alone says what every pull must bring --

    def sync_values(self, store, rows):
        programs = self.plan["programs"][store]
        rounds = defaultdict(dict)  # (key, init, j) -> {rank: (uid, weight, poison)}
        rates, before = {}, {}  # (key, init, j) -> rate; (rank, pc) -> (key, init, j)
        steps, numels = {}, {}  # (key, init, j) -> those clipped together with it
        at_of = {}  # (rank, uid, key) -> (key, init, j)
        for rank, program in enumerate(programs):
            epoch, count, rate = defaultdict(int), defaultdict(int), 1
            for pc, ins in enumerate(program):
                key = ins.get("key")
                if ins["kind"] == "init":
                    epoch[key] += 1
                    count[key] = 0
                    numels.setdefault((key, epoch[key]), ins["numel"])
                elif ins["kind"] == "config":
                    rate = ins["rate"]
                members = []
                for push in [ins] if "uid" in ins else ins.get("items", ()):
                    name = push["key"]
                    count[name] += 1
                    at = (name, epoch[name], count[name])
                    at_of[rank, push["uid"], name] = at
                    rounds[at][rank] = (push["uid"], push["weight"], push["poison"])
                    members.append(at)
                    if rank == 0:
                        rates[at] = rate
                if rank == 0 and ins.get("two_phase"):
                    steps.update((at, members) for at in members)
                before[rank, pc] = (key, epoch[key], count[key])
        expected = {}

        def gradient(at):
            return sum(
                weight << (DIGIT * uid) for uid, weight, _ in rounds[at].values()
            )

        def poison(at):
            return next((p for _, (_, _, p) in sorted(rounds[at].items()) if p), None)

        def clip(at):
            if at not in steps:
                return 1
            return self.sim.model.factor(
                sum(gradient(m) % 1000003 * numels[m[:2]] for m in steps[at])
            )

        def expect(key, epoch, j, length):
            if j == 0:
                return [0] * length, 0
            at = (key, epoch, j, length)
            if at not in expected:
                value, digest = expect(key, epoch, j - 1, length)
                rate, threw = rates.get(at[:3], 0), poison(at[:3])
                added = rate * clip(at[:3]) * gradient(at[:3])
                value = [
                    x
                    + added
                    * (threw in (None, "all") or threw == "half" and i < length // 2)
                    for i, x in enumerate(value)
                ]
                for rank, (uid, weight, _) in sorted(rounds[at[:3]].items()):
                    digest = hash(
                        (digest, rate, rank, weight, (1 << (DIGIT * uid),) * length)
                    )
                expected[at] = value, digest
            return expected[at]

        told = {}  # a round's outcome is the same for all ranks
        for row in rows:
            if "uid" in row.ins and row.result and row.key is not None:
                error, threw = (
                    row.result.get("error"),
                    poison(at_of[row.rank, row.ins["uid"], row.key]),
                )
                if error and error[0] == "updater":
                    at = at_of[row.rank, row.ins["uid"], row.key]
                    if told.setdefault(at, error) != error:
                        self.bad(
                            "updater",
                            row.key,
                            "rank",
                            row.rank,
                            error,
                            "others",
                            told[at],
                        )
                    if (
                        error[2].split("/")[0] == row.key
                        and error[3] != f"threw {threw}"
                    ):
                        self.bad(
                            "updater", row.key, "rank", row.rank, error, "not", threw
                        )
                elif not error and threw:
                    self.bad("swallowed", row.key, "rank", row.rank, "threw", threw)
            for name, part in self.values(row):
                key, epoch, j = before[row.rank, row.pc]
                if len(rounds.get((key, epoch, j), ())) < self.plan["W"] and j:
                    self.bad("sum", "round", j, "of", name, "was never complete")
                value, digest = expect(key, epoch, j, len(part["vector"]))
                if part["vector"] != value or part["version"] != j:
                    self.bad(
                        "sum",
                        name,
                        "rank",
                        row.rank,
                        "version",
                        part["version"],
                        "not",
                        j,
                        digits(part["vector"][0]),
                        "not",
                        digits(value[0]),
                    )
                elif part["digest"] != digest:
                    self.bad("order", name, "rank", row.rank, "version", j)

    # -- async: each push that was acknowledged once, no other more than once --

    def async_values(self, store, rows):
        inits = defaultdict(dict)  # (rank, inc) -> {slice: kid}
        pushes = defaultdict(dict)  # (slice, kid) -> {uid: row}
        pulls = defaultdict(list)
        issued = 0
        barriers = defaultdict(int)
        for row in sorted(rows, key=lambda row: row.start):
            row.phase = barriers[row.rank]
            barriers[row.rank] += row.kind == "barrier"
            mine = inits[row.rank, row.inc]
            row.rates = issued
            if row.kind == "config":
                issued += 1
            elif row.kind == "init":
                row.kids = {}
                if row.result and "parts" in row.result:
                    for name in [n for n in mine if n.split("/")[0] == row.key]:
                        del mine[name]
                    for name, part in row.result["parts"].items():
                        mine[name] = part["kid"]
            elif "uid" in row.ins:
                if row.ins["poison"] and self.acked(row):
                    self.bad(
                        "swallowed",
                        row.key,
                        "rank",
                        row.rank,
                        "threw",
                        row.ins["poison"],
                    )
                for name, kid in mine.items():
                    if name.split("/")[0] == row.key:
                        refused = (
                            row.result
                            and row.result.get("error", " ")[0] == "superseded"
                        )
                        if not (
                            refused and row.ins["uid"] in pushes[name, kid]
                        ):  # its heir's
                            pushes[name, kid][row.ins["uid"]] = row
            for name, part in self.values(row):
                pulls[name, part["kid"]].append((row, name, part))
        for (name, kid), pushed in pushes.items():
            observed = [
                (row, part, self.content(row, name, part))
                for row, name, part in pulls[name, kid]
            ]
            final = None
            for (st, _), server in self.sim.servers.items():
                key = server.keys.get(name)
                if st == store and key and key.kid == kid and not key.busy:
                    final = digits(key.value[0])
                    if len(set(key.value)) != 1:
                        self.bad("torn", "end", name)
            for uid, row in pushed.items():
                server = self.sim.servers[
                    store,
                    self.sim.model.place(name.split("/")[0], 9, self.plan["S"])[
                        int(name.split("/")[1])
                    ][0],
                ]
                if final is not None and self.acked(row) and uid not in final:
                    self.bad("lost", "push", uid, "of", name)
            for contents in [final] if final else []:
                self.once(name, contents, pushed, None, issued)
            for row, _, contents in observed:
                self.once(name, contents, pushed, row, issued)
                for uid, push in pushed.items():
                    own = (
                        push.rank == row.rank
                        and push.inc == row.inc
                        and push.start <= row.start
                    )
                    own = own and not (push.result and "error" in push.result)
                    # its list may not have ended when the process did
                    own = own and not (push.ins["poison"] and push.result is None)
                    acked = self.acked(push) and push.end < row.start
                    acked = (
                        acked
                        or self.plan["profile"] in ("calm", "flaky")
                        and push.phase < row.phase
                        and not (push.result and "error" in push.result)
                    )
                    if (own or acked) and uid not in contents:
                        self.bad(
                            "unseen",
                            "push",
                            uid,
                            "of",
                            name,
                            "by",
                            push.rank,
                            "in a pull by",
                            row.rank,
                        )
            observed.sort(key=lambda x: x[1]["version"])
            for (_, a, x), (_, b, y) in itertools.pairwise(observed):
                if not x.keys() <= y.keys():
                    self.bad("shrunk", name, a["version"], b["version"])

    def acked(self, row):
        return row.result is not None and "error" not in row.result

    def once(self, name, contents, pushed, pull, issued):
        for uid, amount in contents.items():
            push = pushed.get(uid)
            if push is None or pull and push.start > pull.end:
                self.bad("ghost", "push", uid, "of", name)
                continue
            rate, rest = divmod(amount, push.ins["weight"])
            if rest or rate not in RATES[: issued + 1]:
                self.bad(
                    "twice",
                    "push",
                    uid,
                    "of",
                    name,
                    "added",
                    amount,
                    "weight",
                    push.ins["weight"],
                )
            elif push.rank == 0 and push.inc == 1 and RATES.index(rate) < push.rates:
                self.bad(
                    "rate",
                    "push",
                    uid,
                    "of",
                    name,
                    "with",
                    rate,
                    "after",
                    RATES[push.rates],
                )

    # -- staleness and quorum --

    def bounds(self, store, rows):
        quorum, bound, grace = self.plan["policy"]
        gone = {}  # (rank, key) -> since when it counts no more
        for row in rows:
            if row.kind == "delete":
                gone.setdefault((row.rank, row.key), row.t0)
            elif row.kind == "close":
                gone[row.rank] = row.t0

        def counts(rank, key, now):
            return (
                rank in self.immortal
                and rank not in self.sim.failed
                and now < gone.get((rank, key), now + 1)
                and now < gone.get(rank, now + 1)
            )

        pauses = {row.rank for row in rows if row.inc > 1}
        for (st, sid), server in self.sim.servers.items():
            applied = defaultdict(int)
            for event in (
                server.trace
                if st == store and sid not in self.sim.faulty_servers
                else ()
            ):
                if event[0] != "apply":
                    continue
                _, now, name, kid, version, rate, parts, clock, waited = event
                ranks = [rank for rank, _, _ in parts]
                key = name.split("/")[0]
                if len(set(ranks)) != len(ranks):
                    self.bad("counted twice", name, ranks)
                for rank in ranks:
                    applied[name, kid, rank] += 1
                alive = [
                    r
                    for r in range(self.plan["W"])
                    if counts(r, key, now)
                    and r not in pauses
                    and not self.in_barrier(rows, r, now, now, key)
                ]
                if (
                    waited > max(grace + 0.15, 1.15)
                    and not self.sim.faulty_servers
                    and (self.plan["profile"] != "flaky")
                ):
                    self.bad("grace", name, "waited", waited)
                if len(set(ranks)) < min(quorum, len(alive)) and waited < 0.99:
                    self.bad("quorum", name, ranks, "of", quorum)
                if bound is not None and kid == 1:
                    for rank in ranks:
                        for other in alive:
                            ahead = (
                                applied[name, kid, rank] - applied[name, kid, other] - 1
                            )
                            if rank not in pauses and ahead > bound:
                                self.bad(
                                    "stale",
                                    name,
                                    "rank",
                                    rank,
                                    "is",
                                    ahead,
                                    "before",
                                    other,
                                )
        if (
            bound is None or self.plan["poison"]
        ):  # what an updater threw away is not in the value
            return
        own = defaultdict(int)
        for row in sorted(rows, key=lambda row: row.start):
            if "uid" in row.ins:  # a list is refused as a whole
                own[row.rank, row.key] += (row.result or {}).get("error", " ")[
                    0
                ] != "server_lost"
            elif row.kind == "delete":
                own[row.rank, row.key] = -(10**6)
            for name, part in self.values(row):
                if row.inc > 1 or part["kid"] > 1:
                    continue
                seen = defaultdict(int)
                for uid in self.content(row, name, part):
                    seen[uid % self.plan["W"]] += 1
                for other in range(self.plan["W"]):
                    if (
                        counts(other, row.key, row.t1)
                        and other not in pauses
                        and not self.in_barrier(rows, other, row.t0, row.t1, row.key)
                        and (seen[other] < own[row.rank, row.key] - bound)
                    ):
                        self.bad(
                            "stale", "pull of", name, "by", row.rank, "lacks", other
                        )

    def in_barrier(self, rows, rank, begin, end, key):
        """In a barrier; after a fault also until its next push to this key is through,
        which ends an idleness that a failed barrier may have left behind at its
        server."""
        for row in rows:
            if row.rank == rank and row.kind == "barrier" and row.t0 <= end:
                out = row.t1
                if out is not None and self.plan["profile"] == "crash":
                    out = min(
                        [
                            r.t1
                            for r in rows
                            if r.rank == rank
                            and r.t0 >= out
                            and r.t1
                            and r.kind in ("push", "pushpull")
                            and r.key == key
                            and self.acked(r)
                        ],
                        default=None,
                    )
                if out is None or out >= begin:
                    return True
        return False


def check(sim):
    return Checker(sim).check()
