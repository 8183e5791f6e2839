"""The vLLM plugin, which no type checker sees with its base classes: its classes have what they use."""

import ast
from pathlib import Path

import pytest

import buckeye.inference.vllm

PLUGIN = Path(buckeye.inference.vllm.__file__).parent / "plugin"


@pytest.mark.parametrize("path", sorted(PLUGIN.glob("*.py")), ids=lambda path: path.stem)
def test_private_names_of_a_class_are_defined_in_it(path):
    for owner in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        defined = {
            node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        attributes = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute)]
        defined |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        used = {
            node.attr
            for node in attributes
            if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr.startswith("_")
        }
        assert used - defined == set()
