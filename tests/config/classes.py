"""The classes of a configuration."""

from buckeye.config.structure import fields_of


def all_classes(model):
    """The class and those of all sections in it, each once."""
    found = {model: None}
    pending = [model]
    while pending:
        for shape in fields_of(pending.pop()).values():
            for table in shape.tables + (shape.element.tables if shape.element is not None else ()):
                if table not in found:
                    found[table] = None
                    pending.append(table)
    return list(found)
