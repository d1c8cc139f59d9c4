"""Graph files that were damaged, and files made to do harm, their digests in order: none runs anything, none loads."""

import contextlib
import hashlib
import json
import random
import sys

import pytest
import torch

import fshard as fs
from fshard.ext.saved_graph.operators import find_operator
from tests.trees import one_axis

NAME = "graph-rank-00000.json"
PAYLOAD = "__import__('os').system('touch {}')"


def seal(body):
    """The file of a body, with the digest it needs: the encoder written once more."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return f'{{"format": "fshard.graph",\n "version": 2,\n "digest": "{digest}",\n "body": '.encode() + text + b"}\n"


def body_of(data):
    return json.loads(data)["body"]


class Watch:
    """Notes what Python runs, and which files and processes it opens, while a file is read."""

    def __init__(self):
        self.events = None
        sys.addaudithook(self.note)

    def note(self, event, args):
        if self.events is not None and event in ("exec", "compile", "open", "import", "os.system", "subprocess.Popen"):
            self.events.append((event, str(args[0])))


class Hostile:
    """A good file in a directory of its own, and others in its place."""

    def __init__(self, directory):
        self.directory = directory
        self.path = directory / NAME
        self.marker = directory / "it ran"
        # A hook stays for good; it notes nothing outside of `assert_refused`.
        self.watch = Watch()
        tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True))
        params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis()))
        self.state = fs.TrainState.create(params, tx)
        self.x = torch.arange(4.0)

        def step(state, x):
            def loss(params):
                h = (fs.gather(params)["w"] * x).softmax(-1).masked_fill(x > 2, -float("inf"))
                return h[x.nonzero().squeeze(-1)].clamp(-1, 1).sum() * x.nonzero().shape[0] ** 2

            value, grads = fs.value_and_grad(loss)(state.params)
            return {"state": fs.update(tx, state, grads), "losses": (value, [value.to(torch.float64)])}

        fs.save_graph(directory, fs.jit(step, donate_argnums=0), self.state, self.x)
        self.data = self.path.read_bytes()
        assert seal(self.body()) == self.data
        self.load = lambda: fs.load_graph(directory)
        self.call(self.load())

    def call(self, loaded):
        return loaded(fs.tree_map(torch.clone, self.state), self.x)

    def body(self):
        return body_of(self.data)

    def assert_refused(self, data, text=""):
        """Whatever stands in the file, an error of the load names it, and nothing runs and no other file is opened."""
        self.path.write_bytes(data)
        self.watch.events = []
        try:
            with pytest.raises(ValueError, match=r"^load_graph: ") as raised:
                self.load()
        finally:
            events, self.watch.events = self.watch.events, None
        assert str(self.path) in str(raised.value)
        assert text in str(raised.value)
        assert len(str(raised.value)) < 1500
        assert {event for event in events if event != ("open", str(self.path))} == set()
        assert not self.marker.exists()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return Hostile(tmp_path_factory.mktemp("graph"))


def places(value, path=()):
    """The path of every value of a body, the body's own first."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def replace_at(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copy


def rename_at(value, path, new):
    """The body with another key in the place of the last one of a path."""
    if len(path) > 1:
        return replace_at(value, path[:1], rename_at(value[path[0]], path[1:], new))
    return {new if key == path[0] else key: entry for key, entry in value.items()}


def test_a_name_of_a_keyword_is_no_code(hostile):
    """It would stand in the Python text that torch.fx makes of a graph."""
    run = PAYLOAD.format(hostile.marker)
    names = (
        f"**{{}} if {run} else {{}}, dtype",
        f"dtype = {run}, layout",
        f"x=0); {run}; (y",
        "self",
        "dtype ",
        "\uff44type",
        "lambda",
        "__class__",
        "",
    )
    body = hostile.body()
    numbers = [n for n, (_, _, kwargs) in enumerate(body["nodes"]) if kwargs]
    assert len(numbers) > 3
    for number in numbers:
        for name in names:
            path = ("nodes", number, 2, next(iter(body["nodes"][number][2])))
            hostile.assert_refused(seal(rename_at(body, path, name)), f"node {number + len(body['inputs'])} (")


def test_a_text_anywhere_is_no_code(hostile):
    """In the place of each text but those that only a call can tell from others."""
    run, body = PAYLOAD.format(hostile.marker), hostile.body()
    texts = [path for path in places(body) if isinstance(at(body, path), str)]
    assert {path[-1] for path in texts} >= {"torch", "device", "float", "fshard"}
    compared = ("arguments", "axes", "facts", "told", "result")
    for path in texts:
        if path[0] not in compared:
            hostile.assert_refused(seal(replace_at(body, path, run)))
    for name in compared:
        for path in [path for path in texts if path[0] == name][:3]:
            hostile.path.write_bytes(seal(replace_at(body, path, run)))
            with contextlib.suppress(ValueError):
                hostile.call(hostile.load())
            assert not hostile.marker.exists()


def at(value, path):
    for key in path:
        value = value[key]
    return value


OPERATORS = (
    *("os.system", "builtins.eval.default", "eval", "exec", "", ".", "..", "aten", "aten.", "aten..", "aten.sin"),
    *("aten.sin.", "aten.sin.default.", "aten.sin.default.__call__", "aten.sin.__class__", "aten.__class__.mro"),
    *("aten.__class__.__init__.__globals__", "aten.sin.default.__globals__", "aten.sin._op", "aten.sin.op"),
    *("aten._dir.append", "aten.sin.overloads", "__class__.__mro__.default", "_ops.sin.default", "aten.sin.default\n"),
    *("import_module.x.default", "load_library.x.default", "aten.__dict__.default", "fshard.__loader__.default"),
    # What opens files, prints, waits for streams, takes over storages or looks past their ends.
    *("aten.from_file.default", "aten.from_file.out", "aten._print.default", "aten.record_stream.default"),
    *("aten.set_.source_Storage", "aten.set_.source_Tensor", "aten.set_.default", "aten.resize_.default"),
    *("aten._reshape_alias.default", "aten.pin_memory.default", "aten._pin_memory.default", "aten.set_data.default"),
    # TorchScript's own.
    *("aten.save.default", "aten.warn.default", "aten.format.default", "aten.add.int", "aten.add.str", "aten.add.t"),
    *("aten.append.t", "aten.manual_seed.default", "aten.hash.generic", "aten.sort.any", "aten.add.complex"),
    # Other namespaces.
    *(
        "prim.Print.default",
        "prims.copy_to.default",
        "profiler._record_function_enter.default",
        "quantized.add.default",
    ),
    *(
        "inductor._reinterpret_tensor.default",
        "c10d.allreduce_.default",
        "fshard.record_facts.default",
        "fshard.wait.default",
    ),
    *("_c10d_functional.all_reduce.default", "_c10d_functional.broadcast_.default", "symm_mem.stream_write_value32_"),
)


def test_operators_that_are_not_listed_do_not_exist(hostile):
    body = hostile.body()
    for name in OPERATORS:
        assert find_operator(name) is None
        node = [name, [{"node": 0}], {}]
        hostile.assert_refused(seal({**body, "nodes": [node, *body["nodes"]]}), "expected an operator of torch")
    file = ["aten.from_file.default", ["/etc/passwd"], {}]
    hostile.assert_refused(seal({**body, "nodes": [file]}), "aten.from_file.default")


@pytest.mark.parametrize("wrong", ({"surprise": 0}, 2**70, [[[]]], {"node": 10**9}, float("nan")), ids=str)
def test_a_wrong_type_is_refused_in_every_place(hostile, wrong):
    body = hostile.body()
    # The texts that a call is compared by are a call's to refuse.
    inner = [path for path in places(body) if len(path) > 1 and path[0] != "arguments"]
    for path in [(name,) for name in body] + random.Random(0).sample(inner, 80):
        hostile.assert_refused(seal(replace_at(body, path, wrong)))


def test_nodes_that_make_no_graph(hostile):
    """References to later nodes, to what is no tensor, to results that there are none of, and too many values."""
    body = hostile.body()
    inputs = len(body["inputs"])
    first = {"node": inputs}
    for node, text in (
        (["aten.sin.default", [first], {}], "a node before it"),
        (["aten.sin.default", [{"node": -1}], {}], "a node before it"),
        (["aten.sin.default", [{"node": True}], {}], "a node before it"),
        (["aten.sin.default", [{"node": 0, "torch": "float32"}], {}], "'self' to be a tensor"),
        (["aten.sin.default", [], {}], "a value for 'self'"),
        (["aten.sin.default", [None], {}], "'self' to be a tensor"),
        (["aten.sin.default", [{"node": 0}, 1], {}], "at most 1 arguments"),
        (["aten.sin.default", [{"node": 0}], {"out": {"node": 0}}], "keywords of []"),
        (["aten.sin.default", {"self": {"node": 0}}, {}], "an operator's name"),
        (["aten.sin.default", [{"node": 0}]], "an operator's name"),
        (["aten.view.default", [{"node": 0}, [1.5]], {}], "'size' to be a whole number"),
        (["aten.view.default", [{"node": 0}, [True]], {}], "'size' to be a whole number"),
        (["aten.view.default", [{"node": 0}, [2**63]], {}], "'size' to be a whole number"),
        (["aten.view.default", [{"node": 0}, [{"node": 0}]], {}], "a node whose result is a number"),
        (["aten.view.default", [{"node": 0}, 4], {}], "'size' to be a list"),
        (["aten.view.dtype", [{"node": 0}, {"torch": "strided"}], {}], "'dtype' to be a dtype"),
        (["aten.view.dtype", [{"node": 0}, {"torch": "load"}], {}], "'dtype' to be a dtype"),
        (["aten.view.dtype", [{"node": 0}, {"torch": "__builtins__"}], {}], "'dtype' to be a dtype"),
        (["aten.gelu.default", [{"node": 0}], {"approximate": "tanh'"}], "'approximate' to be a text"),
        (["aten.full.default", [[2], 1e999], {}], "body: expected a text of JSON"),
        (["aten.full.default", [[2], {"float": "1.5"}], {}], "'fill_value' to be a number"),
        (["aten.zeros.default", [[2]], {"device": {"device": "cpu:__import__"}}], "a device"),
        (["aten.zeros.default", [[2]], {"device": {"device": 0}}], "'device' to be a device"),
        (["aten.bernoulli.default", [{"node": 0}], {"generator": {"node": 0}}], "'generator' to be null"),
        (["getitem", [{"node": 0}, 0], {}], "the number of a result"),
        (["getitem", [{"node": 0}], {}], "a node and a number"),
        (["add", [1, 2], {}], "a number that is known only as the graph runs"),
        (["pow", [2**62, 2**62], {}], "a number that is known only as the graph runs"),
        (["add", ["a", "b"], {}], "'add' to be a number"),
        (["mul", [{"node": 0}, 2], {}], "a node whose result is a number"),
        (["neg", [1, 2], {}], "1 numbers"),
        (["placeholder", [], {}], "an operator of torch"),
    ):
        hostile.assert_refused(seal({**body, "nodes": [node], "outputs": [], "specs": []}), text)
    none = ["fshard.seed.default", [{"node": 0}], {}]
    hostile.assert_refused(
        seal({**body, "nodes": [none, ["aten.sin.default", [first], {}]]}), "whose result is a Tensor"
    )
    several = ["aten.native_layer_norm.default", [{"node": 0}, [4], None, None, 1e-5], {}]
    hostile.assert_refused(seal({**body, "nodes": [several, ["getitem", [first, 3], {}]]}), "number of a result")
    hostile.assert_refused(seal({**body, "nodes": [several, ["getitem", [first, -1], {}]]}), "number of a result")


def test_collectives_over_axes_that_the_arguments_do_not_have(hostile):
    label = {"label": ["gather", ["w"], ["w"], ""]}
    good = ["fshard.all_gather.default", [[{"node": 0}], True, "shard", 1, {"group": 0}, label], {}]
    body = hostile.body()
    assert body["axes"] == [["shard", 1]]

    def with_argument(n, value):
        return seal({**body, "nodes": [replace_at(good, (1, n), value)], "outputs": [], "specs": []})

    hostile.assert_refused(with_argument(2, "other"), "the axis ('shard', 1)")
    hostile.assert_refused(with_argument(3, 2), "the axis ('shard', 1)")
    for group in ("0", "sum", 0, {"group": 1}, {"group": -1}, {"group": "0"}, {"group": False}):
        hostile.assert_refused(with_argument(4, group), "'group'")
    for wrong in (
        *(
            "gather",
            ["gather"],
            ["gather", [], [], 1],
            ["gather", "w", [], ""],
            [1, [], [], ""],
            [["gather"], [], [], ""],
        ),
        # torch.fx takes a line with this for its own, and leaves it out.
        ["gather", ["# COUNTER: 1"], [], ""],
    ):
        hostile.assert_refused(with_argument(5, {"label": wrong}), "'label'")
    hostile.assert_refused(with_argument(5, "sum"), "'label'")
    hostile.assert_refused(with_argument(5, {"group": 0}), "'label'")
    message = ["aten._assert_async.msg", [{"node": 0}, "# COUNTER: 1"], {}]
    hostile.assert_refused(seal({**body, "nodes": [message], "outputs": [], "specs": []}), "'assert_msg' to be a text")
    for name, value in (("axes", []), ("axes", [["shard", 1]] * 2), ("axes", [["shard", True]]), ("axes", ["shard"])):
        hostile.assert_refused(seal({**body, name: value}))


def test_fields_that_do_not_go_together(hostile):
    body = hostile.body()
    leaf = max(body["inputs"]) + 1
    for changes, text in (
        ({"inputs": body["inputs"][::-1]}, "inputs: expected a list of numbers that rise"),
        ({"inputs": [0, *body["inputs"]]}, "inputs: expected a list of numbers that rise"),
        ({"donated": [*body["donated"], leaf]}, f"donated: expected leaves that are inputs, got {leaf}"),
        ({"donated": []}, "written: expected leaves that are donated"),
        ({"outputs": []}, "specs: expected 0 of them"),
        ({"facts": []}, "facts: expected 1 of them"),
        ({"torch": "1.0"}, f"torch: expected {torch.__version__}, got '1.0'; save the graph again"),
        ({"fshard": ["0"]}, "fshard: expected "),
        ({"more": 1}, "body: expected an object of "),
        ({"result": {"as": [-1]}}, "result: expected tuples"),
        ({"result": {"as": [0], "tuple": []}}, "result: expected tuples"),
        ({"result": {"set": []}}, "result: expected tuples"),
        ({"result": {"dict": [], "keys": ["a"]}}, "result: expected tuples"),
        ({"result": {"dict": [{"as": []}] * 2, "keys": ["a", "a"]}}, "result: expected tuples"),
        ({"result": {"dict": [{"as": []}], "keys": [["a"]]}}, "result: expected tuples"),
    ):
        hostile.assert_refused(seal({**body, **changes}), text)
    for name in body:
        hostile.assert_refused(seal({key: value for key, value in body.items() if key != name}), "an object of")


def test_texts_that_are_no_json_of_a_graph(hostile):
    """Their digests are right: nesting without end, numbers of any length, and what is no JSON at all."""
    body = hostile.body()
    deep = b'{"a":' * 200_000
    for text in (
        *(b"", b"{", b"[]", b"null", b"1", b'"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN", b"9" * 5000, b"-" * 5000),
        *(b"[" * 100_000, b"[" * 900 + b"]" * 900, deep, deep + b"1" + b"}" * 200_000),
        *(json.dumps(body).encode().replace(b'"told": ', number + b'"told": ') for number in (b"1", b"Infinity")),
    ):
        hostile.assert_refused(seal(text), "body: expected ")
    for name in ("nodes", "result", "arguments", "fshard", "specs"):
        text = json.dumps({**body, name: 0}).replace(f'"{name}": 0', f'"{name}": ' + "[" * 900 + "]" * 900).encode()
        hostile.assert_refused(seal(text), str(hostile.path))
    nested = {"as": []}
    for _ in range(101):
        nested = {"tuple": [nested]}
    hostile.assert_refused(seal({**body, "result": nested}), "result: expected at most 100 levels")
    args = [0]
    for _ in range(500):
        args = [args]
    node = ["aten.sin.default", args, {}]
    hostile.assert_refused(seal({**body, "nodes": [node]}), "node ")


def test_damaged_files(hostile):
    """Bits that flipped, and files that were cut off, wherever they were."""
    chance, data = random.Random(1), hostile.data
    for _ in range(150):
        place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        hostile.assert_refused(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
    for size in [0, 1, 40, len(data) - 1, *(chance.randrange(len(data)) for _ in range(50))]:
        hostile.assert_refused(data[:size], "damaged, cut off or edited")
    for more in (data + b"\n", data + data, b"\xef\xbb\xbf" + data, data.replace(b'"body": ', b'"body":  ')):
        hostile.assert_refused(more)
    # A digit of a number, which the first version read in silence.
    assert b"0.999" in data
    hostile.assert_refused(data.replace(b"0.999", b"0.990"), "digest")
    hostile.assert_refused(b'{"format": "graph 1", "fshard": "0.1.0"}', "is no graph of version 2")


def test_what_is_no_file(hostile):
    hostile.path.unlink()
    hostile.path.mkdir()
    with pytest.raises(ValueError, match=r"^load_graph: .*graph-rank-00000.json must be a file of at most"):
        hostile.load()
    hostile.path.rmdir()


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        (
            {"inputs": lambda body: [*body["inputs"][:-1], body["inputs"][-1] + 1]},
            "its inputs are not the tensors of the arguments",
        ),
        (
            {"axes": lambda body: [["other", 1]], "nodes": lambda body: [], "outputs": lambda body: [None] * 1},
            "its axes",
        ),
        (
            {"specs": lambda body: [10**6 if n is not None else n for n in body["specs"]]},
            "its specs are more than the arguments have",
        ),
        ({"result": lambda body: {"as": [0, 10**6]}}, "its result has parts that the arguments do not have"),
        ({"result": lambda body: {"tuple": []}}, "its result does not have one leaf for each output"),
    ),
)
def test_what_only_a_call_can_tell_is_refused_by_the_call(hostile, changes, text):
    body = hostile.body()
    body |= {name: change(body) for name, change in changes.items()}
    if "nodes" in changes:
        body["specs"] = [None]
    hostile.path.write_bytes(seal(body))
    loaded = hostile.load()
    with pytest.raises(ValueError, match=rf"^load_graph: .*{NAME}: {text}"):
        hostile.call(loaded)
