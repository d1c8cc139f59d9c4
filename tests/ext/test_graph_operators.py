"""The operators that a graph file may name: whatever torch's dispatcher has under a listed name."""

import torch

from fshard.ext.saved_graph.operators import LISTED, find_operator


def test_listed_operators_take_tensors_and_numbers_and_return_them():
    """Of all that torch's dispatcher has under a listed name."""
    taken, returned, keywords, count = set(), set(), set(), 0
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        listed = find_operator(f"{namespace}.{base}.{overload or 'default'}")
        if listed is not None:
            count += 1
            parameters = [*listed.positional, *listed.keywords.values()]
            taken |= {(entry.kind, entry.name if entry.kind == "str" else "") for entry in parameters}
            returned |= {listed.result} if isinstance(listed.result, str) else {*listed.result}
            keywords |= {*listed.keywords}
    assert count > 1500
    assert {kind for kind, _ in taken} == {
        *("Tensor", "int", "float", "bool", "number", "ScalarType", "Layout", "MemoryFormat", "Device", "Generator"),
        "str",
    }
    # The last three are of fshard's collectives.
    texts = {"rounding_mode", "driver", "UPLO", "approximate", "mode", "reduce", "side", "assert_msg", "api_name"}
    # Schemas of torch 2.11 give the names of dims the type of texts; a file may pass words for modes alone.
    dims = {"dim", "dim0", "dim1", "dim2", "outdim", "names"}
    assert {name for kind, name in taken if kind == "str"} - dims == texts | {"axis", "group", "label"}
    assert returned == {"Tensor", "List[Tensor]", "number"}
    assert all(name.isidentifier() for name in keywords)
    assert {"set", "resize", "from_file", "_print", "record_stream", "_pin_memory"}.isdisjoint(LISTED["aten"])
