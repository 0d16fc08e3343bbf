"""Virtual time, a faulty network, processes, files, and the workers' programs.

Everything that happens follows from (seed, mode, profile). Two generators: one for the
program, one for faults and delays, so that one program can be run under many schedules.
"""
# size: one world
# ruff: noqa: B023 - what `each` is given runs at once

import heapq
import random

from . import model as default_model

DIGIT = 24  # a push adds 1 << (DIGIT * its number), so a value says what is in it
RATES = [
    1,
    101,
    211,
    307,
    401,
    503,
    601,
    701,
    809,
    907,
    1009,
    1103,
    1201,
    1301,
    1409,
    1511,
]
MODES = ("sync", "async", "ssp", "quorum")
PROFILES = ("calm", "flaky", "crash", "misuse", "restart")


class Row:
    """One call in the history."""

    def __init__(self, **fields):
        self.__dict__.update(fields)
        self.t1 = self.end = self.result = None


def make_plan(seed, mode, profile):
    r = random.Random(f"plan {seed} {mode} {profile}")
    x = random.Random(f"more {seed} {mode} {profile}")
    W = r.choice((2, 3, 3, 4)) if profile != "calm" else r.choice((1, 2, 3, 4))
    S = r.choice((1, 2, 2, 3))
    colocated = r.random() < 0.5 and S <= W
    policy = {
        "sync": (None, None, 0.0),
        "async": (1, None, 0.0),
        "ssp": (1, r.choice((0, 1, 2, 4)), 0.0),
        "quorum": (r.randint(1, W), None, r.choice((0.0, 0.05, 0.3))),
    }[mode]
    stores = 2 if profile in ("calm", "flaky") and r.random() < 0.15 else 1
    plan = dict(
        seed=seed,
        mode=mode,
        profile=profile,
        W=W,
        S=S,
        colocated=colocated,
        policy=policy,
        programs={},
        misuse=None,
        push_ref=x.random() < 0.5,
        lease=x.random() < 0.5,
        work=x.choice((0.0, 0.005, 0.05, 0.2)),
        copy=x.choice((0.0, 0.005, 0.05, 0.2)),
        lists=x.choice((0.0, 0.3, 0.6)),
        poison=x.choice((0.0, 0.0, 0.05)),
        hasty=x.choice((0.0, 0.0, 0.2)),
        prompt=x.random() < 0.5,
        timeout=6.0 if profile in ("crash", "misuse") else 20.0,
    )
    for store in range(stores):
        plan["programs"][store] = make_programs(
            r, plan, "sync" if store else mode, profile, store
        )
    return plan


def make_programs(r, plan, mode, profile, store):
    """For each rank a list of instructions; in every mode but async they march in
    step."""
    W = plan["W"]
    keys = {k: r.choice((1, 2, 3, 5, 7, 9)) for k in "abcd"[: r.randint(1, 4)]}
    aligned = mode != "async"
    progs = [[] for _ in range(W)]
    number = [{} for _ in range(W)]
    rate = 0

    def each(make):
        for rank in range(W):
            progs[rank].append(make(rank))

    def lead(**ins):
        each(lambda rank: dict(ins) if rank == 0 else dict(kind="nop"))

    def push_of(rank, key, kind):
        j = number[rank][key] = number[rank].get(key, -1) + 1
        modes = ("none", "half", "all") if mode == "sync" else ("none", "all")
        poison = r.choice(modes) if r.random() < plan["poison"] else None
        timeout = (
            r.uniform(0.001, 0.1) if r.random() < plan["hasty"] else None
        )  # and the program goes on
        return dict(
            kind=kind,
            key=key,
            uid=j * W + rank,
            weight=r.randint(1, 3),
            priority=r.randint(0, 3),
            poison=poison,
            timeout=timeout,
        )

    def list_of(rank, chosen, two_phase):
        items = [push_of(rank, k, "push") for k in r.sample(chosen, len(chosen))]
        progs[rank].append(dict(kind="pushlist", items=items, two_phase=two_phase))

    whole = {k: r.random() < 0.2 for k in keys}
    for k in keys:
        each(
            lambda rank: dict(
                kind="init", key=k, numel=keys[k], whole=whole[k], block=True
            )
        )
    pauses = r.choice((0.0, 0.05, 0.3))
    may_delete = profile != "crash" or mode == "sync"
    steps = r.randint(2, 7) if profile != "restart" else r.randint(5, 9)
    for _ in range(steps):
        if r.random() < 0.35 and rate + 1 < len(RATES):
            rate += 1
            lead(kind="config", rate=RATES[rate])
        if r.random() < 0.15:
            each(lambda rank: dict(kind="barrier", block=True))
        if r.random() < (0.6 if profile == "restart" else 0.15):
            lead(kind="snapshot")
        if r.random() < 0.15 and may_delete:
            k = r.choice(sorted(keys))
            keys[k] = r.choice((1, 2, 3, 5, 7, 9))
            if not plan["prompt"]:  # else the worker waits
                each(lambda rank: dict(kind="wait"))
            each(lambda rank: dict(kind="delete", key=k, block=True))
            each(
                lambda rank: dict(
                    kind="init", key=k, numel=keys[k], whole=whole[k], block=True
                )
            )
        each(lambda rank: dict(kind="sleep", time=r.uniform(0, pauses)))
        chosen = r.sample(sorted(keys), r.randint(1, len(keys)))
        shape = [
            (k, r.choice(("push", "pushpull", "both", "both", "double")))
            for k in chosen
        ]
        listed, two_phase = (
            r.random() < plan["lists"],
            mode == "sync" and r.random() < 0.6,
        )
        if listed and aligned:
            shape = [(k, "pull") for k in chosen if r.random() < 0.6]
        for rank in range(W):
            if listed:
                list_of(rank, chosen, two_phase)
            mine = (
                shape
                if aligned
                else [
                    (k, r.choice(("push", "pushpull", "both", "pull")))
                    for k in r.sample(sorted(keys), r.randint(1, len(keys)))
                ]
            )
            mine = r.sample(mine, len(mine))
            for k, what in mine:
                pull = dict(kind="pull", key=k, priority=r.randint(0, 3))
                parts = {
                    "push": ["push"],
                    "pushpull": ["pushpull"],
                    "both": ["push", pull],
                    "double": ["push", "push", pull],
                    "pull": [pull],
                }[what]
                for part in parts:
                    progs[rank].append(part if part is pull else push_of(rank, k, part))
        waits = r.random() < 0.7
        for rank in range(W):
            if waits if aligned else r.random() < 0.6:
                progs[rank].append(dict(kind="wait"))
    if profile == "misuse" and store == 0:
        plan["misuse"] = misuse(r, plan, progs, keys)
    each(lambda rank: dict(kind="barrier", block=True))
    for k in keys:
        each(lambda rank: dict(kind="pull", key=k, priority=0))
    each(lambda rank: dict(kind="wait"))
    each(lambda rank: dict(kind="barrier", block=True))
    each(lambda rank: dict(kind="close", block=True))
    return progs


def misuse(r, plan, progs, keys):
    """One rank's program goes wrong in one way. Returns (kind, rank, key)."""
    sync = plan["mode"] == "sync"
    kind = r.choice(
        ("shape", "skip", "round", "config", "early_close")
        if sync
        else ("shape", "round", "config")
    )
    rank = r.randrange(1, len(progs))
    prog = progs[rank]
    if kind == "shape":
        at = r.choice([i for i, ins in enumerate(prog) if ins["kind"] == "init"])
        if r.random() < 0.3:
            prog[at] = dict(prog[at], whole=not prog[at]["whole"])
        else:
            prog[at] = dict(prog[at], numel=prog[at]["numel"] + r.choice((1, 4)))
        return kind, rank, prog[at]["key"]
    if kind == "config" or not any("uid" in ins for ins in prog):
        return "config", rank, None
    at = r.choice([i for i, ins in enumerate(prog) if "uid" in ins])
    key = prog[at]["key"]
    if kind == "round":
        prog[at] = dict(prog[at], corrupt=True)
    elif kind == "skip":
        prog[at] = dict(kind="nop")
    else:
        del prog[at:]
        prog += [dict(kind="wait"), dict(kind="close", block=True), dict(kind="stop")]
    return kind, rank, key


# ----------------------------------------------------------------------


class Process:
    def __init__(self, name):
        self.name, self.alive, self.paused, self.backlog = name, True, False, []
        self.cores = {}  # address -> core;  address = (store, "s"/"w", number)
        self.apps = {}  # address -> App


class App:
    """Runs one worker's program; keeps its part of the history."""

    def __init__(self, sim, process, address, program, pc, inc, prelude=()):
        self.sim, self.process, self.address = sim, process, address
        self.store, _, self.rank = address
        self.program, self.pc, self.inc = program, pc, inc
        self.prelude = list(prelude)  # what a worker that comes back does first
        self.rows, self.blocked, self.busy, self.done, self.asleep = (
            {},
            None,
            False,
            False,
            False,
        )
        self.dead_keys = set()
        digest = "good"
        bad = sim.plan["misuse"]
        if bad and bad[0] == "config" and bad[1] == self.rank:
            digest = "bad"
        self.config = sim.config(self.store, digest)
        process.cores[address] = self.core = sim.model.Worker(
            self.rank, inc, self.config, sim.now
        )
        process.apps[address] = self

    def run(self):
        if self.busy or self.asleep:
            return
        self.busy = True
        while not self.done and self.process.alive and self.core.ready():
            if self.blocked is not None or self.core.stalled:
                break
            if self.prelude:
                ins = self.prelude.pop(0)
                at = -1
            elif self.pc < len(self.program):
                ins, at = self.program[self.pc], self.pc
                if ins["kind"] == "wait" and any(
                    r.kind not in ("config", "snapshot") for r in self.rows.values()
                ):
                    break
                self.pc += 1
            else:
                self.done = True
                break
            kind = ins["kind"]
            if kind == "sleep":
                self.asleep = True
                self.sim.at(ins["time"], self.wake)
                break
            if kind == "stop":
                self.done = True
            if kind == "pushlist":
                ins = dict(
                    ins,
                    items=[i for i in ins["items"] if i["key"] not in self.dead_keys],
                )
            if (
                kind in ("nop", "wait", "stop")
                or ins.get("key") in self.dead_keys
                or ins.get("items") == []
            ):
                continue
            self.issue(ins, at)
        self.busy = False

    def wake(self):
        self.asleep = False
        if not self.process.paused:
            self.run()
        else:
            self.process.backlog.append(self.run)

    def issue(self, ins, at):
        sim, kind = self.sim, ins["kind"]
        args = {}
        if kind == "init":
            args = dict(
                numel=ins["numel"], vector=[0] * ins["numel"], whole=ins["whole"]
            )
        elif "uid" in ins:
            args = self.push_args(ins)
        elif kind == "pushlist":
            args = dict(
                items=[dict(self.push_args(i), key=i["key"]) for i in ins["items"]],
                two_phase=ins["two_phase"],
            )
        elif kind == "pull":
            args = dict(priority=ins["priority"], min_version=self.least_version(ins))
        elif kind == "config":
            args = dict(rate=ins["rate"])
        elif kind == "snapshot":
            args = dict(step=self.pc)
        if ins.get("corrupt"):
            self.core.skew(ins["key"], 1)
        row = Row(
            store=self.store,
            rank=self.rank,
            inc=self.inc,
            job=sim.job,
            pc=at,
            kind=kind,
            key=ins.get("key"),
            ins=ins,
            t0=sim.now,
            start=sim.tick(),
            paused=0.0,
            process=self.process,
        )
        sim.history.append(row)
        cid, actions = self.core.call(
            kind,
            sim.now,
            ins.get("timeout") or sim.plan["timeout"],
            key=ins.get("key"),
            **args,
        )
        self.rows[cid] = row
        if ins.get("corrupt") and self.core.stalled != cid:
            self.core.skew(ins["key"], -1)
        if ins.get("block"):
            self.blocked = cid
        sim.perform(self.process, self.address, actions)

    def push_args(self, ins):
        return dict(
            weight=ins["weight"],
            priority=ins["priority"],
            poison=ins["poison"],
            vector=[1 << (DIGIT * ins["uid"])] * self.numel(ins["key"]),
        )

    def least_version(self, ins):
        """None that the pull would not wait for anyway: its own pushes."""
        tables = [
            t for name, t in self.core.tables.items() if name.startswith(ins["key"])
        ]
        return min([t.round for t in tables], default=0) if ins["priority"] % 2 else 0

    def numel(self, key):
        return self.core.keys[key][0] if key in self.core.keys else 1

    def returned(self, cid, result):
        sim, row = self.sim, self.rows.pop(cid)
        row.t1, row.end, row.result = sim.now, sim.tick(), result
        if self.blocked == cid:
            self.blocked = None
        error = result.get("error")
        if error:
            self.failed(error, row)
        if not self.process.paused:
            self.run()

    def failed(self, error, row):
        sim = self.sim
        if self.done:
            return
        asked_for = error[0] == "timeout" and row.ins.get("timeout")
        if error[0] in ("updater", "write") or asked_for:
            return  # the store stays usable
        if error[0] == "expired":
            self.done = True
            sim.at(sim.rng.uniform(0.1, 1.0), self.rejoin)
        elif error[0] == "server_lost" and sim.plan["mode"] != "sync":
            if row.kind in ("barrier", "snapshot", "config", "close"):
                return
            self.dead_keys.add(row.key or error[2].split("/")[0])
        else:
            self.done = True
            sim.failed.add(self.rank)
            sim.at(1.2, self.exit)

    def exit(self):
        if self.sim.plan["mode"] != "sync" and self.sim.plan["profile"] == "crash":
            self.sim.blame(
                self.process
            )  # what it takes along is lost for the others, too
        self.sim.kill(self.process, polite=True)

    def rejoin(self):
        """The same process comes back (not in sync), unless another has its rank: what
        the server said may be older than that, so the rendezvous has the last word."""
        if (
            self.sim.incs.get(self.address, 1) != self.inc
            or not self.process.alive
            or self.process.cores.get(self.address) is not self.core
        ):
            return
        comeback(self.sim, self.process, self)


def inits(program):
    """The keys that a program has so far."""
    return list({ins["key"]: ins for ins in program if ins["kind"] == "init"}.values())


def comeback(sim, process, old):
    prelude = [
        ins for ins in inits(old.program[: old.pc]) if ins["key"] not in old.dead_keys
    ]
    sim.incs[old.address] = sim.incs.get(old.address, 1) + 1  # the rendezvous counts
    app = App(
        sim, process, old.address, old.program, old.pc, sim.incs[old.address], prelude
    )
    app.dead_keys = set(old.dead_keys)
    sim.apps.append(app)
    sim.rejoins += 1


class Sim:
    def __init__(self, seed, mode, profile, model=None, schedule=0):
        self.model = model or default_model
        self.plan = make_plan(seed, mode, profile)
        self.rng = random.Random(f"net {seed} {mode} {profile} {schedule}")
        self.now, self.events, self.n, self.order = 0.0, [], 0, 0
        self.history, self.disk, self.links = [], {}, {}
        self.job, self.rejoins, self.messages, self.restarts = 1, 0, 0, []
        self.failed, self.incs = set(), {}
        self.faulty_workers, self.faulty_servers = set(), set()
        self.blocked_links = {}
        r, profile = self.rng, profile
        self.jitter = r.choice((0.002, 0.02, 0.2))
        disk = self.disk_rng = random.Random(f"disk {seed} {mode} {profile} {schedule}")
        self.p_full, self.full_disks = disk.choice((0.0, 0.0, 0.1, 0.4)), set()
        self.p_break = 0.0 if profile == "calm" else r.choice((0.0, 0.005, 0.03))
        self.start(0, None)
        self.plan_faults()

    # -- time --

    def at(self, delay, do, *args):
        self.n += 1
        heapq.heappush(self.events, (self.now + delay, self.n, do, args))

    def tick(self):
        self.order += 1
        return self.order

    def run(self, limit=60.0):
        while self.events:
            self.now, _, do, args = heapq.heappop(self.events)
            if self.now > limit or self.finished():
                break
            do(*args)
        return self

    def finished(self):
        return (
            self.idle_restart is False
            and all(
                app.done and not app.rows or not app.process.alive for app in self.apps
            )
            and not self.pending
        )

    # -- processes --

    def config(self, store, digest="good"):
        plan = self.plan
        policy = plan["policy"]
        if store == 1:  # a second store in the same processes is dist_sync
            policy = (None, None, 0.0)
        return self.model.Config(
            self.job,
            store,
            plan["W"],
            plan["S"],
            self.model.Policy(*policy),
            digest,
            plan["push_ref"],
            plan["lease"],
        )

    def start(self, pc, restored):
        plan = self.plan
        W, S = plan["W"], plan["S"]
        self.processes, self.apps, self.servers = [], [], {}
        self.idle_restart, self.pending = False, 0
        hosts = [Process(i) for i in range(W if plan["colocated"] else W + S)]
        self.hosts = hosts
        self.processes = list(hosts)
        for store, programs in plan["programs"].items():
            for sid in range(S):
                host = hosts[sid if plan["colocated"] else W + sid]
                data = None
                if restored:
                    data = self.disk["shard", restored["number"], sid, restored["job"]]
                core = self.model.Server(
                    sid, self.job * 100 + sid, self.config(store), self.now, data
                )
                host.cores[store, "s", sid] = core
                self.servers[store, sid] = core
            for rank in range(W):
                app = App(
                    self,
                    hosts[rank],
                    (store, "w", rank),
                    programs[rank],
                    pc,
                    1,
                    inits(programs[rank][:pc]) if restored else (),
                )
                self.apps.append(app)
        for host in hosts:
            self.at(self.rng.uniform(0, 0.1), self.ticks, host)

    def ticks(self, process):
        if not process.alive:
            return
        if not process.paused:
            self.timers(process)
        self.at(0.1, self.ticks, process)

    def timers(self, process):
        for address, core in list(process.cores.items()):
            if process.alive and process.cores.get(address) is core:
                self.perform(process, address, core.on_timer(self.now))
        for app in list(process.apps.values()):
            app.run()

    def perform(self, process, address, actions):
        for action in actions:
            what = action[0]
            if what == "send":
                self.send(process, address, (address[0],) + action[1], action[2])
            elif what == "wake":
                self.at(action[1] - self.now + 1e-6, self.woken, process, address)
            elif what == "write":
                self.pending += 1
                self.at(
                    self.rng.choice((0.01, 0.3)),
                    self.written,
                    process,
                    address,
                    action[1],
                    action[2],
                )
            elif what == "measure":
                self.heavy(
                    process,
                    address,
                    "work",
                    action[2].measure,
                    lambda core, a=action: core.on_measured(a[1], a[2], self.now),
                )
            elif what == "apply":
                error = action[2].poison and f"threw {action[2].poison}"
                self.heavy(
                    process,
                    address,
                    "work",
                    action[2].apply,
                    lambda core, a=action, e=error: core.on_applied(
                        a[1], a[2], e, self.now
                    ),
                )
            elif what == "copy":
                self.copy_out(process, address, action[1], action[2])
            elif what == "return":
                app = process.apps[address]
                if app.core is process.cores[address] and action[1] in app.rows:
                    app.returned(action[1], action[2])

    def heavy(self, process, address, kind, half, end):
        """Work beside the core, half now and half later. A stopped process stops in
        between."""
        core, longest = process.cores[address], self.plan[kind]
        half(0)

        def rest():
            if process.paused:
                process.backlog.append(rest)
            elif process.alive and process.cores.get(address) is core:
                half(1)
                self.perform(process, address, end(core))
                if address in process.apps:
                    process.apps[address].run()

        self.at(
            self.rng.choice((0.0, longest / 10, self.rng.uniform(0, longest))), rest
        )

    def copy_out(self, process, address, opno, region):
        data, middle = [], len(region.data) // 2
        self.heavy(
            process,
            address,
            "copy",
            lambda half: data.extend(
                region.data[middle:] if half else region.data[:middle]
            ),
            lambda core: core.on_copied(opno, data, region.stamp, self.now),
        )

    def woken(self, process, address):
        if process.alive and not process.paused and address in process.cores:
            self.perform(process, address, process.cores[address].on_timer(self.now))

    def written(self, process, address, name, data):
        self.pending -= 1
        error = "full" if self.disk_rng.random() < self.p_full else None
        if not process.alive:  # a crash before the rename leaves nothing
            return
        if error:
            self.full_disks.add(address[2])
        else:
            if name[0] == "shard":  # the values are read as late as this
                keys = {
                    k: dict(
                        shot,
                        region=None,
                        value=list(
                            shot["region"].data if shot["region"] else shot["value"]
                        ),
                    )
                    for k, shot in data["keys"].items()
                }
                data = dict(data, keys=keys)
            self.disk[name] = data
            if name[0] == "manifest":
                self.disk["latest"] = data
        if address in process.cores:
            core = process.cores[address]
            self.perform(process, address, core.on_written(name, self.now, error))

    # -- network: in order on one connection; a broken one loses, delays and repeats --

    def send(self, process, source, target, m):
        self.messages += 1
        r = self.rng
        if (source[0], source[1], source[2]) == target or process.cores.get(
            target
        ) is not None:
            self.at(
                0.00005, self.deliver, target, m, None
            )  # the shard in the same process
            return
        to = self.home(target)
        link = self.links.setdefault((id(process), target), dict(last=0.0, flying=[]))
        block = self.blocked_links.get(frozenset((process.name, to)))
        delay = r.uniform(0.0002, self.jitter if r.random() < 0.2 else 0.002)
        if block and self.now < block[0]:
            if not block[1]:
                return  # lost
            delay += block[0] - self.now  # kept until the partition heals
        beat = m.kind in ("HEARTBEAT", "ALIVE", "HELLO", "WELCOME")
        if r.random() < self.p_break and not beat:
            for flight in link["flying"]:
                dice = r.random()
                if flight["done"] or flight["beat"]:
                    continue
                if dice < 0.5:
                    flight["dead"] = True
                if (
                    dice < 0.15 or dice > 0.8
                ):  # the old pipe is read late; or it comes twice
                    self.at(
                        r.uniform(0.0, r.choice((0.1, 1.0, 3.0))),
                        self.deliver,
                        flight["target"],
                        flight["m"],
                        None,
                    )
            link["last"] = self.now
            if r.random() < 0.5:
                return
            if r.random() < 0.3:
                self.at(
                    r.uniform(0.0, r.choice((0.1, 1.0, 3.0))),
                    self.deliver,
                    target,
                    m,
                    None,
                )
        time = max(self.now + delay, link["last"] + 1e-6)
        link["last"] = time
        flight = dict(dead=False, done=False, beat=beat, target=target, m=m)
        link["flying"] = [f for f in link["flying"] if not f["done"]]
        link["flying"].append(flight)
        self.at(time - self.now, self.deliver, target, m, flight)

    def home(self, address):
        store, role, number = address
        return (
            number if role == "w" or self.plan["colocated"] else self.plan["W"] + number
        )

    def deliver(self, target, m, flight):
        if flight:
            if flight["dead"]:
                return
            flight["done"] = True
        for process in self.processes:
            if target in process.cores and process.alive:
                if process.paused:
                    process.backlog.append((target, m))
                else:
                    self.handle(process, target, m)

    def handle(self, process, target, m):
        if process.alive and target in process.cores:
            copy = self.model.Msg(**vars(m))
            if m.kind == "FRAME":
                copy.parts = [self.model.Msg(**vars(part)) for part in m.parts]
            self.perform(
                process, target, process.cores[target].on_message(copy, self.now)
            )
            app = process.apps.get(target)
            if app:
                app.run()

    # -- faults --

    def plan_faults(self):
        plan, r = self.plan, self.rng
        hosts = self.hosts
        profile = plan["profile"]
        if profile == "flaky":
            t = r.uniform(0.05, 1.5)
            for _ in range(r.randint(0, 2)):
                if r.random() < 0.5:
                    self.at(t, self.pause, r.choice(hosts), r.uniform(0.1, 0.6))
                elif len(hosts) > 1:
                    a, b = r.sample(hosts, 2)
                    self.at(
                        t, self.partition, a, b, r.uniform(0.1, 0.6), r.random() < 0.5
                    )
                t += 2.5
        elif profile in ("crash", "restart"):
            t = r.uniform(0.02, 1.2) if profile == "crash" else r.uniform(0.1, 2.0)
            dice = r.random()
            victim = r.choice(hosts)
            if dice < 0.6 or profile == "restart":
                self.at(t, self.crash, victim)
            elif dice < 0.8 or len(hosts) == 1:
                self.blame(victim)
                self.at(t, self.pause, victim, r.uniform(2.0, 5.0), r.random() < 0.5)
            else:
                a, b = r.sample(hosts, 2)
                self.blame(a)
                self.blame(b)
                self.at(t, self.partition, a, b, 4.0, r.random() < 0.5)

    def blame(self, process):
        for _, role, number in process.cores:
            (self.faulty_workers if role == "w" else self.faulty_servers).add(number)

    def crash(self, process):
        if not process.alive:
            return
        self.blame(process)
        self.kill(process)
        if self.plan["profile"] == "restart":
            self.idle_restart = True
            self.at(self.rng.uniform(0.5, 3.0), self.restart)
        elif self.plan["mode"] != "sync" and process.apps and self.rng.random() < 0.5:
            self.at(self.rng.uniform(0.05, 3.0), self.replace, process)

    def replace(self, process):
        """A new process for the worker of a dead one (its server shard stays lost)."""
        fresh = Process(process.name)
        for app in process.apps.values():
            if not app.done:
                comeback(self, fresh, app)
        self.processes.append(fresh)
        self.ticks(fresh)

    def kill(self, process, polite=False):
        if not process.alive:
            return
        process.alive = False
        fast = self.rng.random() < 0.5
        for other in self.processes:
            if fast and other is not process:
                for address, core in list(other.cores.items()):
                    for store, role, number in process.cores:
                        if store == address[0] and role != address[1]:
                            self.at(
                                self.rng.uniform(0.05, 0.1),
                                self.notice,
                                other,
                                address,
                                core,
                                number,
                                self.job,
                            )

    def notice(self, process, address, core, number, job):
        if (
            process.alive
            and not process.paused
            and process.cores.get(address) is core
            and job == self.job
        ):
            current = next(
                (
                    p
                    for p in self.processes
                    if p.alive
                    and p.name != process.name
                    and (address[0], "w" if address[1] == "s" else "s", number)
                    in p.cores
                ),
                None,
            )
            if current is None:
                self.perform(process, address, core.on_peer_lost(number, self.now))

    def pause(self, process, duration, replaced=False):
        if process.alive and not process.paused:
            process.paused = True
            for row in self.history:
                if row.process is process and row.t1 is None:
                    row.paused += duration
            self.at(duration, self.resumed, process)
            if (
                replaced
                and self.plan["mode"] != "sync"
                and process.apps
                and not any(role == "s" for _, role, _ in process.cores)
            ):
                self.at(duration * 0.6, self.replace, process)

    def resumed(self, process):
        process.paused = False
        if self.rng.random() < 0.5:
            self.timers(process)  # the hard order: timers before what has arrived
        backlog, process.backlog = process.backlog, []
        for item in backlog:
            if callable(item):
                item()
            else:
                self.handle(process, *item)

    def partition(self, a, b, duration, keep):
        self.blocked_links[frozenset((a.name, b.name))] = (self.now + duration, keep)

    def restart(self):
        """The launcher ends what is left of the job and starts it again from the last
        snapshot."""
        for process in self.processes:
            process.alive = False
        for row in self.history:
            row.process = None
        self.job += 1
        self.incs = {}
        restored = self.disk.get("latest")
        self.restarts.append(restored)
        self.start(restored["step"] if restored else 0, restored)
