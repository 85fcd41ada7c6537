from tests.moe_routing.processes import finish, start


def test_hot_paths_compile_into_one_graph():
    """In a process of its own: the type checker of the test run breaks the graph."""
    assert finish(start("compiled", JAXTYPING_DISABLE="1")).endswith("compiled\n")
