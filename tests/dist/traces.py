"""What the model's cores do, as text that the C++ cores are compared with.

trace() simulates one (seed, mode, profile) and writes for each core how it was made,
every event, and after it the actions that came back. tests/cpp/dist/replay.cpp reads
the lines and gives the events to the C++ cores, whose actions it writes in the same
form: the lines must be equal.

    core server|worker ...      a new core
    restored ...                and what it begins with
    ! event ...                 an event of this core
    action ...                  what came back, in order

Fields are separated by blanks, most are NAME=VALUE; "-" is an empty list or nothing.
An element of a value is a 64-bit number, the model's modulo a prime.
"""

import argparse
import sys
import types

from psmodel import model as default_model
from psmodel.sim import Sim

PRIME = 2**61 - 1
ITEM = default_model.ITEM
ANSWERS = "WELCOME REJECT EXPIRED ALIVE FATAL FREED DONE VALUE WAIT ERROR".split()
# The fields that a message of each kind has beside those of its header.
OPERATION = "opno slice prev acked pieces index priority gen snap ".split()
FIELDS = {
    "HELLO": [],
    "HEARTBEAT": ["error"],
    "FREE": ["opnos"],
    "BYE": [],
    "GOT": ["got"],
    "INIT": [*OPERATION, "total", "whole", "payload"],
    "PUSH": [*OPERATION, "total", "round", "base", "group", "payload"],
    "PUSHPULL": [*OPERATION, "total", "round", "base", "group", "payload", "have"],
    "PULL": [*OPERATION, "round", "min_version", "have"],
    "DELETE": OPERATION,
    "CONFIG": [*OPERATION, "options", "retire"],
    "ENTER": [*OPERATION, "counts"],
    "MEET": [*OPERATION, "counts"],
    "SNAPSHOT": [*OPERATION, "counts", "step"],
    "CLOSE": [*OPERATION, "counts"],
    "NORM": [*OPERATION, "round", "group"],
    "FACTOR": [*OPERATION, "round", "factor"],
    "WELCOME": ["gen", "snap", "passed", "options"],
    "REJECT": ["error"],
    "EXPIRED": ["by"],
    "ALIVE": ["error"],
    "FATAL": ["error"],
    "FREED": ["opnos"],
    "DONE": "opno version kid round age passed partial".split(),
    "VALUE": "opno index pieces payload version kid round".split(),
    "WAIT": ["opno", "missing"],
    "ERROR": ["opno", "error"],
}


def number(x):
    return format(x, ".17g")


def listed(items):
    return ",".join(map(str, items)) or "-"


def tokens(vector):
    return listed(x % PRIME for x in vector)


def slice_name(name):
    """Of a slice; of a key, its first slice; of a server, nothing."""
    return (name if "/" in name else name + "/0") if name else "-"


def text_of(error=None):
    return error.replace(" ", "_") if error else "-"


def error_text(error):
    """CODE:WHO:SLICE:TEXT:MISSING."""
    if not error:
        return "-"
    if error[0] == "timeout":
        return f"timeout:-1:{slice_name(error[2])}:-:{listed(error[1])}"
    code, who, name, *text = error
    text = text_of(*text)
    return f"{code}:{-1 if who is None else who}:{slice_name(name)}:{text}:-"


def group_text(group):
    return ":".join(map(str, group)) if group else "-"


def counts_text(counts):
    return listed(f"{name}:{n}" for name, n in sorted((counts or {}).items()))


def payload_text(m):
    payload = getattr(m, "lease", None) or m.payload
    if payload is None:
        return "-"
    return tokens(payload) if isinstance(payload, list) else "at:" + payload.name


def field(m, name):
    value = getattr(m, name, None)
    if name == "slice":
        return slice_name(m.key)
    if name == "index":
        return -1 if value is None else value
    if name == "error":
        return error_text(m.error if m.kind in ("REJECT", "ERROR") else m.fatal)
    if name == "payload":
        return payload_text(m)
    if name == "passed":
        return getattr(m, "phase", 0)
    if name == "options":
        return 1 if m.rate is None else m.rate
    if name == "whole":
        return int(m.whole)
    if name == "group":
        return group_text(m.group)
    if name == "counts":
        return counts_text(m.counts)
    if name in ("factor", "partial"):
        return number(value or 0)
    if name == "got":
        return listed(f"{opno}.{index}" for opno, index in m.got)
    if name in ("opnos", "have", "missing"):
        return listed(value)
    return value or 0


def message_text(m, rank, server):
    head = [f"job={m.job} store={m.store} rank={rank} server={server} inc={m.inc}"]
    head.append(f"sinc={m.sinc} committed={m.committed}")
    if m.kind not in ANSWERS and not hasattr(m, "sid"):
        digest = int(m.digest == "good")
        head.append(f"floor={m.floor} phase={m.phase} digest={digest}")
    return " ".join([m.kind, *head, *(f"{f}={field(m, f)}" for f in FIELDS[m.kind])])


def parts_of(m):
    return m.parts if m.kind == "FRAME" else [m]


def frame_text(m, rank, server):
    return "".join(" | " + message_text(part, rank, server) for part in parts_of(m))


def shard_text(data, job):
    """As it is when it is about to be written."""
    shots = []
    for name, shot in sorted(data["keys"].items()):
        value = shot["region"].data if shot["region"] else shot["value"]
        head = [shot["total"], int(shot["whole"]), shot["version"], shot["gen"]]
        shots.append(":".join(map(str, [name, *head, shot["kid"], tokens(value)])))
    births = listed(f"{name}:{n}" for name, n in data["births"].items())
    rates = listed(f"{gen}:{rate}" for gen, rate in sorted(data["rates"].items()))
    return (
        f"number={data['number']} job={job} gen={data['gen']} births={births}"
        f" options={rates} slices={';'.join(shots) or '-'}"
    )


def work_text(work):
    pushes = (
        f"{op.rank}.{op.inc}.{op.opno}.{op.round}.{op.base}" for op in work.pushes
    )
    return (
        f"{work.name} kid={work.kid} version={work.version} number={work.number}"
        f" pushes={listed(pushes)}"
    )


def call_text(kind, key, a):
    head = f"{kind} two_phase={int(a.get('two_phase', False))} step={a.get('step', 0)}"
    items = a.get("items", [dict(a, key=key)] if key else [])
    lines = [head + f" options={a.get('rate', 0)}"]
    for item in items:
        vector = item.get("vector")
        value = tokens(vector) if vector is not None else "-"
        lines.append(
            f" | key={item['key']} total={item.get('numel', 0)}"
            f" whole={int(item.get('whole', False))}"
            f" priority={item.get('priority', 0)}"
            f" min_version={item.get('min_version', 0)} value={value}"
        )
    return "".join(lines)


class Recorder:
    """Writes one core's lines."""

    def begin(self, trace, head, config):
        self.lines, self.regions = [], 0
        trace.append(self.lines)
        policy = config.policy
        staleness = -1 if policy.staleness is None else policy.staleness
        self.lines.append(
            f"core {head} job={config.job} store={config.store}"
            f" workers={config.W} servers={config.S}"
            f" quorum={-1 if policy.quorum is None else policy.quorum}"
            f" staleness={staleness} grace={number(policy.grace)}"
            f" patience={number(policy.patience)}"
            f" digest={int(config.digest == 'good')}"
            f" regions={int(config.push_ref)} leases={int(config.lease)}"
        )

    def event(self, text):
        self.lines.append("! " + text)

    def name(self, region, segment, numel):
        """Called in the order in which a driver allocates regions."""
        if not hasattr(region, "name"):
            self.regions += 1
            region.name = f"{segment}:{self.regions}:{numel * ITEM}"
        return region.name

    def done(self, actions):
        self.lines += [self.action(*action) for action in actions]
        return actions

    def action(self, what, *rest):
        if what == "send":
            (role, to), m = rest
            rank, server = self.ends(to)
            return f"send {role}{to}" + frame_text(m, rank, server)
        if what == "wake":
            return "wake " + number(rest[0])
        if what == "write":
            return self.write_text(*rest)
        if what in ("measure", "apply"):
            return f"{what} " + self.round_text(what, rest[1])
        if what == "slots":
            name, kid, slots = rest
            for region in slots:
                self.name(region, 500000 + self.sid, len(slots[0].data))
            return f"slots {name} kid={kid}"
        if what == "erase":
            return f"erase {rest[0]} kid={rest[1]}"
        if what == "fill":
            region, vector = rest
            segment = self.rank * 1000 + self.inc
            return f"fill {self.name(region, segment, len(vector))} {tokens(vector)}"
        if what == "copy":
            return f"copy {rest[0]} {rest[1].name}"
        assert what == "return", what
        return self.return_text(*rest)

    def write_text(self, name, data):
        if name[0] == "shard":
            return "shard " + shard_text(data, self.config.job)
        keys = listed(f"{key}:{numel}" for key, numel in data["keys"].items())
        return (
            f"manifest number={data['number']} job={data['job']}"
            f" step={data['step']} keys={keys}"
        )

    def round_text(self, what, work):
        text = work_text(work) + f" group={group_text(work.group)} rate={work.rate}"
        text += f" in_snapshot={int(work.in_snapshot)}"
        if what == "apply":
            text += f" factor={number(work.factor)}"
        return text + (f" slot={work.slot}" if self.config.lease else "")

    def return_text(self, cid, result):
        lines = [f"return {cid} error={error_text(result.get('error'))}"]
        parts = result.get("parts", {}).items()
        for name, part in sorted((str(name), part) for name, part in parts):
            fields = (
                f"{f}={part.get(f, 0)}" for f in ("version", "kid", "round", "age")
            )
            value = tokens(part["vector"]) if "vector" in part else "-"
            lines.append(f" | {name} {' '.join(fields)} value={value}")
        return "".join(lines)


def recorded(model, trace):
    """The model, with cores that are recorded."""

    class Server(Recorder, model.Server):
        def __init__(self, sid, sinc, config, now, restored=None):
            self.begin(trace, f"server id={sid} sinc={sinc} now={number(now)}", config)
            if restored:
                self.lines.append("restored " + shard_text(restored, config.job))
            model.Server.__init__(self, sid, sinc, config, now, restored)

        def ends(self, rank):
            return rank, self.sid

        def _room(self, key):
            self.in_snapshot = bool(self._shots(key, key.slots[key.cur]))
            return super()._room(key)

        def _begin_round(self, key, take, now):
            begun = len(self.out)
            super()._begin_round(key, take, now)
            for action in self.out[begun:]:
                if action[0] in ("measure", "apply") and action[2] is key.busy:
                    key.busy.in_snapshot = self.in_snapshot

        def on_message(self, m, now):
            first = parts_of(m)[0]
            frame = frame_text(m, first.rank, self.sid)
            self.event(f"message {number(now)}{frame}")
            return self.done(super().on_message(m, now))

        def on_timer(self, now):
            self.event(f"timer {number(now)}")
            return self.done(super().on_timer(now))

        def on_peer_lost(self, rank, now):
            self.event(f"lost {number(now)} {rank}")
            return self.done(super().on_peer_lost(rank, now))

        def on_written(self, name, now, error=None):
            self.event(f"written {number(now)} {name[1]} {text_of(error)}")
            return self.done(super().on_written(name, now, error))

        def on_measured(self, name, work, now):
            what = f"{name} {work.kid} {work.version}"
            self.event(f"measured {number(now)} {what} {number(work.partial)}")
            return self.done(super().on_measured(name, work, now))

        def on_applied(self, name, work, error, now):
            what = f"{name} {work.kid} {work.version}"
            value = tokens(work.target.data)
            self.event(f"applied {number(now)} {what} {text_of(error)} {value}")
            return self.done(super().on_applied(name, work, error, now))

    class Worker(Recorder, model.Worker):
        def __init__(self, rank, inc, config, now):
            head = f"worker id={rank} inc={inc} now={number(now)}"
            self.begin(trace, head, config)
            model.Worker.__init__(self, rank, inc, config, now)

        def ends(self, server):
            return self.rank, server

        def on_message(self, m, now):
            first = parts_of(m)[0]
            frame = frame_text(m, self.rank, first.sid)
            self.event(f"message {number(now)}{frame}")
            return self.done(super().on_message(m, now))

        def on_timer(self, now):
            self.event(f"timer {number(now)}")
            return self.done(super().on_timer(now))

        def on_peer_lost(self, sid, now):
            self.event(f"lost {number(now)} {sid}")
            return self.done(super().on_peer_lost(sid, now))

        def on_written(self, name, now, error=None):
            self.event(f"written {number(now)} {name[1]} {text_of(error)}")
            return self.done(super().on_written(name, now, error))

        def on_copied(self, opno, data, stamp, now):
            kid, version = stamp
            text = f"{opno} {tokens(data)} {kid} {version}"
            self.event(f"copied {number(now)} {text}")
            return self.done(super().on_copied(opno, data, stamp, now))

        def call(self, kind, now, timeout, key=None, **a):
            text = call_text(kind, key, a)
            self.event(f"call {number(now)} {number(timeout)} {text}")
            cid, actions = super().call(kind, now, timeout, key, **a)
            return cid, self.done(actions)

        def skew(self, key, by):
            self.event(f"skew {key} {by}")
            super().skew(key, by)

    return types.SimpleNamespace(**{**vars(model), "Server": Server, "Worker": Worker})


def trace(seed, mode, profile, model=default_model):
    """The lines of one simulation, one core after the other."""
    cores = []
    Sim(seed, mode, profile, recorded(model, cores)).run()
    return [line for core in cores for line in core]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("mode")
    parser.add_argument("profile")
    args = parser.parse_args()
    for line in trace(args.seed, args.mode, args.profile):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
