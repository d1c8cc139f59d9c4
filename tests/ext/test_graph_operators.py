"""The operators that a graph file may name: whatever torch's dispatcher has under a listed name."""

import torch

from fshard.ext.saved_graph.operators import LISTED, find_operator


def test_listed_operators_take_tensors_and_numbers_and_return_them():
    """Of all that torch's dispatcher has under a listed name."""
    count, kinds, texts, returned = 0, set(), set(), set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        listed = find_operator(f"{namespace}.{base}.{overload or 'default'}")
        if listed is None:
            continue
        count += 1
        for argument in listed.schema.arguments:
            # Without lists of it and None.
            kind = str(argument.real_type).rpartition("[")[2].rstrip("]")
            kinds.add(kind)
            if kind == "str":
                texts.add(argument.name)
            assert argument.name.isidentifier()
        returned |= {str(result.real_type) for result in listed.schema.returns}
    assert count > 1500
    assert " ".join(sorted(kinds)) == (
        "Device Generator Layout MemoryFormat ScalarType Tensor bool float int number str"
    )
    # Schemas of torch 2.11 give the names of dims the type of texts.
    modes = texts - {"dim", "dim0", "dim1", "dim2", "outdim", "names"} - {"axis", "group", "label"}
    assert " ".join(sorted(modes)) == "UPLO api_name approximate assert_msg driver mode reduce rounding_mode side"
    assert returned == {"Tensor", "List[Tensor]", "int", "number"}
    assert {"set", "resize", "from_file", "_print", "record_stream", "_pin_memory"}.isdisjoint(LISTED["aten"])
