"""The protocol of peers/mxnet_worker.py without MXNet: calls take a fixed time.

The fewer letters engine, store and way have, the shorter it is, so that one is fastest.
"""

import json
import os
import sys

ENGINE_S = float(os.environ.get("FAKE_ENGINE_S", "1"))


def answer(command):
    match command.pop("do"):
        case "versions":
            return {"mxnet": "0.0", "environment": dict(os.environ)}
        case "run":
            calls = command["calls"]
            letters = len(command["store"]) + len(command["way"])
            return {"seconds": calls * (ENGINE_S + letters)}
        case "check":
            return {"agrees": command["store"] != "wrong"}
        case "fail":
            return {"error": "Traceback: as asked"}
        case "end":
            sys.exit("no MXNet to be found")
    return {}


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
