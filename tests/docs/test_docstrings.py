"""The blocks of code in docstrings run, with the names that each takes for granted.

A block is what is indented behind a `::`. A new one fails until NAMES says with what it
runs.
"""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torchkv
from helpers import check_in_child
from pages import ROOT, needs_sources

PACKAGE = Path(torchkv.__file__).parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree):
    """Those of the module, its classes, functions and attributes, by their names."""
    named = [("", tree)]
    while named:
        name, node = named.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield name, text
        body = getattr(node, "body", [])
        for statement, after in zip(body, [*body[1:], None], strict=True):
            if hasattr(statement, "name"):
                named.append((f"{name}.{statement.name}", statement))
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(
                getattr(getattr(after, "value", None), "value", None), str
            ):
                yield (
                    f"{name}.{ast.unparse(statement).split()[0]}",
                    inspect.cleandoc(after.value.value),
                )


def blocks_in(text):
    """What is indented behind lines that end with `::`."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line.endswith("::"):
            continue
        indent = len(line) - len(line.lstrip())
        block = []
        for other in lines[i + 1 :]:
            if other.strip() and len(other) - len(other.lstrip()) <= indent:
                break
            block.append(other)
        yield textwrap.dedent("\n".join(block)).strip() + "\n"


def all_texts():
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        module = relative.as_posix().replace("/", ".")
        for name, text in docstrings(ast.parse(path.read_text())):
            yield f"{module.removesuffix('.__init__')}{name}", text
    for path in sorted(ROOT.glob("docs/**/*.rst")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


BLOCKS = {
    f"{name}[{i}]": block
    for name, text in all_texts()
    for i, block in enumerate(blocks_in(text))
}

# --- The names ------------------------------------------------------------------


def batches():
    return [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0])) for _ in range(2)]


def pairs():
    return [(torch.tensor([0, 5, 5, 9]), torch.tensor([0, 1, 1, 0]))] * 2


class Model(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.last = torch.nn.Linear(64, 2)

    def forward(self, ids):
        return self.last(self.embedding(ids))


class Doubles(torch.nn.Linear):
    def forward(self, input, return_dict):
        output = super().forward(input)
        return {"output": output} if return_dict else output


def trained():
    """A model, and the trainer that has its gradients."""
    model = torch.nn.Linear(3, 2)
    return model, torchkv.Trainer(model, "sgd", {"learning_rate": 0.5})


def of_a_scaler():
    model, trainer = trained()
    loss = model(torch.ones(4, 3)).sum()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return {"trainer": trainer, "scaler": scaler, "loss": loss, "model": model}


def of_replicas(make=torch.nn.Linear, kvstore="device"):
    replicas = torchkv.replicate(make(3, 2), ["cpu", "cpu"])
    trainer = torchkv.Trainer(replicas, "sgd", kvstore=kvstore)
    images, labels = batches()[0]
    batch = {"input": images}
    return {
        **{"replicas": replicas, "trainer": trainer, "batch": batch},
        **{"images": images, "labels": labels},
    }


def of_a_store(type):
    kv = torchkv.create(type)
    kv.init("w", torch.zeros(2, 3))
    return {"kv": kv}


def model_of(names):
    return names.get("model") or names["replicas"].module


def has_trained(names, before):
    after = [p.cpu() for p in model_of(names).parameters()]
    assert not all(map(torch.equal, before, after))


def is_compressed(names, before):
    assert names["kv"].gradient_compression == torchkv.compression.TwoBit(threshold=0.5)


def has_a_table(names, before):
    row = names["kv"].row_sparse_pull("table", row_ids=torch.tensor([3]))
    assert row.shape == (1, 64) and 0 < row.std() < 0.02


def has_repeated(names, before):
    assert names["output"]["output"].shape == (4, 2)


def is_registered(names, before):
    assert issubclass(names["Horovod"], torchkv.KVStoreBase)
    with pytest.raises(TypeError, match="abstract"):
        torchkv.create("horovod")


# By block: the names that it takes for granted, and what it has done.
NAMES = {
    "torchkv.compression[0]": (lambda: of_a_store("device"), is_compressed),
    "torchkv.initializers[0]": (lambda: of_a_store("local"), has_a_table),
    "torchkv.nn.embedding.StoreEmbedding[0]": (
        lambda: {"Model": Model, "loader": pairs()},
        lambda names, before: names["store"].version("table") == 2,
    ),
    "torchkv.registered.register[0]": (dict, is_registered),
    "torchkv.trainer.replicas.Replicas[0]": (
        lambda: {"model": torch.nn.Linear(3, 2), "loader": batches()},
        has_trained,
    ),
    "torchkv.trainer.replicas.Replicas[1]": (
        lambda: of_replicas(Doubles),
        has_repeated,
    ),
    "torchkv.trainer.replicas.Replicas.backward[0]": (of_replicas, has_trained),
    "torchkv.trainer.trainer.Trainer[0]": (
        lambda: {"model": torch.nn.Linear(3, 2), "loader": batches()},
        has_trained,
    ),
    "torchkv.trainer.trainer.Trainer[1]": (of_a_scaler, has_trained),
}


def test_each_block_has_its_names():
    assert sorted(NAMES) == sorted(BLOCKS)
    assert sum(len([*blocks_in(text)]) for _, text in all_texts()) == len(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_runs(name):
    source = BLOCKS[name]
    if torch.cuda.device_count() < 2:
        source = re.sub(r'"cuda:\d"', '"cpu"', source)

    def run():
        make, check = NAMES[name]
        names = {"torchkv": torchkv, "torch": torch, "F": F, **make()}
        before = None
        if {"model", "replicas"} & names.keys():
            before = [p.detach().cpu().clone() for p in model_of(names).parameters()]
        exec(compile(source, name, "exec"), names)
        assert check(names, before) in (None, True)

    # A registered type stays for the rest of the process.
    if "register" in source:
        check_in_child(run)
    else:
        run()


# --- Other forms ----------------------------------------------------------------


def test_other_forms_of_blocks_are_not_used():
    """The extraction above would not find them."""
    for name, text in all_texts():
        for form in (">>>", "```", "code-block::", "literalinclude::", "doctest::"):
            assert form not in text, name


@needs_sources
def test_headers_have_no_blocks():
    """There is no test that would compile one in a comment."""
    headers = [*ROOT.glob("csrc/**/*.h")]
    assert len(headers) > 50
    for header in headers:
        for comment in re.findall(r"//.*$", header.read_text(), re.MULTILINE):
            assert not re.search(r"[@\\](code|verbatim)|```|~~~|<pre>", comment), header


def test_the_extraction_finds_blocks():
    text = "A block::\n\n    a = 1\n\n    b\n\nText.\n\n::\n\n    c\n"
    assert [*blocks_in(text)] == ["a = 1\n\nb\n", "c\n"]
    source = '''
class A:
    """A.

    ::

        a
    """

    b: int
    """B::

        b

    Text.
    """

    def c():
        """C."""
'''
    found = {name: [*blocks_in(text)] for name, text in docstrings(ast.parse(source))}
    assert found == {".A": ["a\n"], ".A.b:": ["b\n"], ".A.c": []}
