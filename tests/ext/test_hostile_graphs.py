"""Graph files that were damaged, and files made to do harm, their digests in order: none runs anything, none loads."""

import contextlib
import functools
import hashlib
import json
import random
import sys

import pytest
import torch

import fshard as fs
from fshard.ext.saved_graph.operators import ON_NUMBERS, find_operator
from tests.trees import one_axis

NAME = "graph-rank-00000.json"
PAYLOAD = "__import__('os').system('touch {}')"
# What Python runs, and which files and processes it opens.
WATCHED = {"exec", "compile", "open", "import", "os.system", "subprocess.Popen"}
TX = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True))


def step(state, x):
    def loss(params):
        h = (fs.gather(params)["w"] * x).softmax(-1).masked_fill(x > 2, -float("inf"))
        return h[x.nonzero().squeeze(-1)].clamp(-1, 1).sum() * x.nonzero().shape[0] ** 2

    value, grads = fs.value_and_grad(loss)(state.params)
    return {"state": fs.update(TX, state, grads), "losses": (value, [value.to(torch.float64)])}


def seal(body):
    """The file of a body, with the digest it needs: the encoder written once more."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return f'{{"format": "fshard.graph",\n "version": 5,\n "digest": "{digest}",\n "body": '.encode() + text + b"}\n"


class GraphFile:
    """A good file in a directory of its own, and others in its place."""

    def __init__(self, directory):
        self.path = directory / NAME
        self.marker = directory / "it ran"
        self.events = None
        # A hook stays for good; it notes nothing outside of `assert_refused`.
        sys.addaudithook(self.note)
        params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis()))
        self.state = fs.TrainState.create(params, TX)
        self.x = torch.arange(4.0)
        fs.save_graph(directory, fs.jit(step, donate_argnums=0), self.state, self.x)
        self.data = self.path.read_bytes()
        self.body = json.loads(self.data)["body"]
        assert seal(self.body) == self.data
        self.call(self.load())

    def note(self, event, args):
        if self.events is not None and event in WATCHED:
            self.events.append((event, str(args[0])))

    def load(self):
        return fs.load_graph(self.path.parent)

    def call(self, loaded):
        return loaded(fs.tree_map(torch.clone, self.state), self.x)

    def assert_refused(self, data, text="", in_call=False):
        """Whatever stands in the file, an error of the load names it, and nothing runs and no other file is opened.

        What depends on the arguments is refused by the call.
        """
        self.path.write_bytes(data)
        self.events = []
        try:
            with pytest.raises(ValueError, match=r"^load_graph: ") as raised:
                self.call(self.load()) if in_call else self.load()
        finally:
            events, self.events = self.events, None
        error = str(raised.value)
        assert str(self.path) in error
        assert text in error
        assert len(error) < 1500
        assert {event for event in events if event != ("open", str(self.path))} == set()
        assert not self.marker.exists()

    def assert_body_refused(self, text, **changes):
        self.assert_refused(seal(self.body | changes), text)

    def assert_nodes_refused(self, text, *nodes):
        self.assert_body_refused(text, nodes=nodes, outputs=[], specs=[])


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return GraphFile(tmp_path_factory.mktemp("graph"))


def places(value, path=()):
    """The path of every value of a body, the body's own first."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def replace_at(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copy


def test_a_name_of_a_keyword_is_no_code(graph):
    """It would stand in the Python text that torch.fx makes of a graph."""
    run = PAYLOAD.format(graph.marker)
    codes = f"**{{}} if {run} else {{}}, dtype", f"dtype = {run}, layout", f"x=0); {run}; (y"
    nodes, inputs = graph.body["nodes"], len(graph.body["inputs"])
    with_keywords = [number for number, (_, _, keywords) in enumerate(nodes) if keywords]
    assert len(with_keywords) > 3
    for number in with_keywords:
        first, *others = nodes[number][2].items()
        for name in (*codes, "self", "dtype ", "\uff44type", "lambda", "__class__", ""):
            renamed = replace_at(nodes, (number, 2), {name: first[1], **dict(others)})
            graph.assert_body_refused(f"node {number + inputs}: ", nodes=renamed)


def test_a_text_anywhere_is_no_code(graph):
    """In the place of each text but those that only a call can tell from others."""
    run = PAYLOAD.format(graph.marker)
    texts = [path for path in places(graph.body) if isinstance(at(graph.body, path), str)]
    assert {path[-1] for path in texts} >= {"torch", "device", "versions"}
    compared = ("arguments", "facts", "trace_facts", "result")
    for path in texts:
        if path[0] not in compared:
            graph.assert_refused(seal(replace_at(graph.body, path, run)))
    for name in compared:
        for path in [path for path in texts if path[0] == name][:3]:
            graph.path.write_bytes(seal(replace_at(graph.body, path, run)))
            with contextlib.suppress(ValueError):
                graph.call(graph.load())
            assert not graph.marker.exists()


OPERATORS = """
    os.system builtins.eval.default eval exec . .. aten aten. aten.. aten.sin aten.sin. aten.sin.default.
    aten.sin.default.__call__ aten.sin.__class__ aten.__class__.mro aten.__class__.__init__.__globals__ aten.sin._op
    aten.sin.op aten._dir.append aten.sin.overloads __class__.__mro__.default _ops.sin.default aten.__dict__.default
    import_module.x.default load_library.x.default fshard.__loader__.default
    aten.from_file.default aten.from_file.out aten._print.default aten.record_stream.default aten.set_.source_Storage
    aten.set_.source_Tensor aten.set_.default aten.resize_.default aten._reshape_alias.default aten.set_data.default
    aten.pin_memory.default aten._pin_memory.default
    aten.save.default aten.warn.default aten.format.default aten.add.int aten.add.str aten.add.t aten.append.t
    aten.manual_seed.default aten.hash.generic aten.sort.any aten.add.complex
    prim.Print.default prims.copy_to.default profiler._record_function_enter.default quantized.add.default
    inductor._reinterpret_tensor.default c10d.allreduce_.default fshard.record_facts.default fshard.wait.default
    _c10d_functional.all_reduce.default _c10d_functional.broadcast_.default symm_mem.stream_write_value32_
"""


def test_operators_that_are_not_listed_do_not_exist(graph):
    """Attributes of torch's, what opens files, prints or looks past storages, TorchScript's own, other namespaces."""
    for name in ("", "aten.sin.default\n", *OPERATORS.split()):
        assert find_operator(name) is None
        graph.assert_nodes_refused("is no operator of torch", [name, [FIRST], {}])
    graph.assert_nodes_refused("aten.from_file.default", ["aten.from_file.default", ["/etc/passwd"], {}])


@pytest.mark.parametrize("wrong", ({"surprise": 0}, [[[]]], {"node": 10**9}, {"torch": "load"}), ids=str)
def test_a_wrong_type_is_refused_in_every_place(graph, wrong):
    # The texts that a call or a cache compares are theirs to refuse.
    compared = ("arguments", "sources")
    inner = [path for path in places(graph.body) if len(path) > 1 and path[0] not in compared]
    for path in [(name,) for name in graph.body if name not in compared] + random.Random(0).sample(inner, 40):
        in_call = path[0] in ("inputs", "result", "specs", "donated", "written")
        graph.assert_refused(seal(replace_at(graph.body, path, wrong)), in_call=in_call)


FIRST = {"node": 0}
LABEL = json.dumps(["gather", ["w"], ["w"], ""])


def node(operator, *args, **keywords):
    return [operator, list(args), keywords]


def sine(*args, **keywords):
    return node("aten.sin.default", *args, **keywords)


def size(value):
    return node("aten.view.default", FIRST, value)


def dtype(name):
    return node("aten.view.dtype", FIRST, {"torch": name})


def gather(axis=0, label=LABEL):
    return node("fshard.all_gather.default", [FIRST], True, axis, label)


LAYER_NORM = node("aten.native_layer_norm.default", FIRST, [4], None, None, 1e-5)
# References to what comes later, is no tensor or has no such result, values of another type, and too many of them.
WRONG_NODES = (
    ("too many values to unpack", [sine(FIRST | {"torch": "float32"})]),
    ("expected Tensor, got <class 'NoneType'>", [sine(None)]),
    ("missing value for argument 'self'", [sine()]),
    ("at most 1 argument", [sine(FIRST, 1)], [sine(FIRST, out=FIRST)]),
    ("has no attribute 'items'", [["aten.sin.default", [FIRST], []]]),
    ("missing 1 required positional argument", [["aten.sin.default", [FIRST]]]),
    ("takes 4 positional arguments", [["aten.sin.default", [FIRST], {}, {}]]),
    ("'List[int]' for argument 'size'", *([size(value)] for value in ([1.5], [2**63], [FIRST], 4, "4"))),
    ("Overflow", [node("aten.add.Tensor", FIRST, 2**70)]),
    ("'number' for argument 'b'", [node("mul", 2, FIRST)]),
    ("'number' for argument 'a'", [node("mul", FIRST, FIRST)], [node("neg", FIRST)]),
    ("expected ScalarType, got", [dtype("torch.strided")], [node("aten.view.dtype", FIRST, 5)]),
    ("expected Optional[Layout], got", [node("aten.zeros.default", [2], layout=7)]),
    ("expected Optional[MemoryFormat], got", [node("aten.clone.default", FIRST, memory_format=77)]),
    ("expected bool, got", [node("aten.index_put.default", FIRST, [FIRST], FIRST, "x")]),
    ("KeyError('load')", [dtype("load")], [sine({"load": 0})], [sine({"node": "load"})]),
    ("Invalid device string", [node("aten.zeros.default", [2], device={"device": "cpu:__import__"})]),
    ("'fill_value'", [node("aten.full.default", [2], "1.5")]),
    ("'Optional[Device]' for argument 'device'", [node("aten.zeros.default", [2], device=0)]),
    ("'Optional[Generator]' for", [node("aten.bernoulli.default", FIRST, generator=FIRST)]),
    ("IndexError", [node("getitem", FIRST, 0)]),
    ("not enough values to unpack", [node("getitem", FIRST)]),
    # Python takes no text of a call with so many brackets, or with the keyword "from".
    ("unhashable", [node("getitem", functools.reduce(lambda x, _: [x], range(300), 0), 0)]),
    ("are given by their place", [node("aten.random.from", FIRST, **{"from": 0, "to": 2})], [sine(FIRST, self=FIRST)]),
    ("are given by their place", [node("add", FIRST, b=2)]),
    ("is no operator of torch", [node("getitem", FIRST, 0, index=0)]),
    ("known only as the graph runs", [node("add", 1, 2)], [node("pow", 2**62, 2**62)], [node("add", "a", "b")]),
    ("at most 1 argument", [node("neg", FIRST, 2)]),
    ("is no operator of torch", [node("placeholder", FIRST)]),
    ("must be str, bytes", *([gather(label=label)] for label in (["gather"], 1, None))),
    ("JSONDecodeError", [gather(label="gather")], [gather(label="")]),
    ("values to unpack", *([gather(label=label)] for label in ("{}", '["gather", [], []]'))),
    ("expected str instance", *([gather(label=label)] for label in ('[1, [], [], ""]', '["", [], [0], ""]'))),
    ("list index out of range", [gather(1)]),
    ("list indices must be", *([gather(axis)] for axis in ("0", None, FIRST))),
    # torch.fx takes a line with this for its own, and leaves it out.
    ("must not be in a text", [gather(label="# COUNTER: 1")]),
    ("must not be in a text", [node("aten._assert_async.msg", FIRST, "# COUNTER: 1")]),
)


def test_nodes_that_make_no_graph(graph):
    assert len(graph.body["facts"]) == 1
    for text, *graphs in WRONG_NODES:
        for nodes in graphs:
            graph.assert_nodes_refused(text, *nodes)
    # The first node is numbered behind the inputs.
    first = {"node": len(graph.body["inputs"])}
    for reference in (first, {"node": -1}, {"node": [0]}):
        graph.assert_nodes_refused(f"node {first['node']}: ", sine(reference))
    graph.assert_nodes_refused("expected Tensor", node("fshard.seed.default", FIRST), sine(first))
    for index in (3, -4, "0", None):
        graph.assert_nodes_refused("node 8: ", LAYER_NORM, node("getitem", first, index))
    number = node("aten.sym_size.int", FIRST, 0)
    graph.assert_body_refused("outputs: sym_size", nodes=[number], outputs=[first])


VALUES = (
    *(None, True, 0, -1, 2**31, 2**63, 2**70, 10**4000, 1.5, float("nan"), "", "x", "\ud800", "\0", "mean", "cpu"),
    *([], [0], [None], ["x"], [[]], [FIRST, None], [0] * 2000, {}, FIRST, {"node": 6}, {"torch": "torch.strided"}),
    *({"torch": "torch.float32"}, {"device": "meta"}, {"device": 0}, functools.reduce(lambda x, _: [x], range(800), 0)),
)


def test_arguments_of_any_kind_are_refused_or_read(graph):
    """Torch compares them with the schemas of its operators."""
    chance = random.Random(0)
    names = [name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()]
    names = [name if name.count(".") == 2 else f"{name}.default" for name in sorted(names)]
    names = [*ON_NUMBERS, "getitem", *filter(find_operator, names)]
    for name in chance.sample(names, 500):
        args = [chance.choice((*VALUES, *[FIRST] * 20)) for _ in range(chance.randrange(5))]
        keywords = {chance.choice(("dtype", "out", "generator", "device", "from")): chance.choice(VALUES)}
        call = node(name, *args, **chance.choice((keywords, {})))
        graph.path.write_bytes(seal(graph.body | {"nodes": [call], "outputs": [None], "specs": [None]}))
        try:
            graph.load()
        except ValueError as error:
            assert f"load_graph: {graph.path}: node " in str(error)  # noqa: PT017
            assert len(str(error)) < 1500  # noqa: PT017


def nest(value, levels, wrap):
    for _ in range(levels):
        value = wrap(value)
    return value


def test_fields_that_do_not_go_together(graph):
    body = graph.body
    leaf = max(body["inputs"]) + 1
    for text, *changes in (
        ("the leaves are not those", *({"inputs": [n]} for n in (-1, True, leaf))),
        ("the leaves are not those", {"donated": [*body["donated"], leaf]}, {"written": [leaf]}),
        ("the leaves are not those", {"donated": [body["donated"][0]] * 2}, {"donated": []}),
        ("the leaves are not those", {"outputs": []}, {"specs": []}),
        ("zip() argument 2 is longer", {"facts": [*body["facts"], "{}"]}),
        ("must be str, bytes or bytearray", {"facts": [1]}),
        ("JSONDecodeError", {"facts": ["text"]}, {"trace_facts": "text"}),
        ("body: ", *({"facts": [text]} for text in ("[1]", "null", '{"verb": []}')), {"trace_facts": "0"}),
        (f", torch {torch.__version__}, got 1.0; save the graph again", {"versions": "1.0"}),
        ("body: TypeError", {"more": 1}, {"versions": ["0"]}),
        ("result: ", {"result": ["as", 10**6]}, {"result": ["as", 0, "tuple"]}, {"result": ["set", []]}),
        ("result: ", {"result": [["a"], []]}, {"result": [["a", "a"], [["as", 1]] * 2]}),
        ("result: ", {"result": [[["a"]], [["as", 1]]]}, {"result": nest(["as", 0], 400, lambda x: ["list", [x]])}),
    ):
        for change in changes:
            nodes = {"nodes": [], "outputs": [None], "specs": [None]} if "inputs" in change else {}
            graph.assert_refused(seal(body | nodes | change), text, in_call=True)
    for name in body:
        graph.assert_refused(seal({key: value for key, value in body.items() if key != name}), "body: TypeError")


def test_texts_that_are_no_json_of_a_graph(graph):
    """Their digests are right: nesting without end, numbers of any length, and what is no JSON at all."""
    good = json.dumps(graph.body).encode()
    deep = b'{"a":' * 200_000
    for text in (
        *(b"", b"{", b"[]", b"null", b"1", b'"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN", b"9" * 5000, b"-" * 5000),
        *(b"[" * 100_000, b"[" * 900 + b"]" * 900, deep, deep + b"1" + b"}" * 200_000),
        *(good.replace(b'"trace_facts": ', number + b'"trace_facts": ') for number in (b"1", b"Infinity")),
    ):
        graph.assert_refused(seal(text), "body: ")
    for name in ("nodes", "arguments", "versions", "outputs"):
        text = json.dumps(graph.body | {name: 0}).replace(f'"{name}": 0', f'"{name}": ' + "[" * 900 + "]" * 900)
        graph.assert_refused(seal(text.encode()))
    graph.assert_nodes_refused("node ", ["aten.sin.default", nest([0], 500, lambda value: [value]), {}])


def test_damaged_files(graph):
    """Bits that flipped, and files that were cut off, wherever they were."""
    chance, data = random.Random(1), graph.data
    for _ in range(60):
        place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        graph.assert_refused(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
    for length in [0, 1, 40, len(data) - 1, *(chance.randrange(len(data)) for _ in range(20))]:
        graph.assert_refused(data[:length], "damaged, cut off or edited")
    for more in (data + b"\n", data + data, b"\xef\xbb\xbf" + data, data.replace(b'"body": ', b'"body":  ')):
        graph.assert_refused(more)
    # A digit of a number, which the first version read in silence.
    assert b"0.999" in data
    graph.assert_refused(data.replace(b"0.999", b"0.990"), "digest")
    graph.assert_refused(b'{"format": "graph 1", "fshard": "0.1.0"}', "or is of another format")


def test_what_is_no_file(graph):
    graph.path.unlink()
    graph.path.mkdir()
    with pytest.raises(ValueError, match=r"^load_graph: .*graph-rank-00000.json must be a file of at most"):
        graph.load()
    graph.path.rmdir()
