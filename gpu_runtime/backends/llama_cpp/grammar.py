"""The grammar that forces an answer to match a JSON schema, or a given grammar.

The worker runs this file, because as a program the worker has no package. So it imports only the standard library and
llama_cpp.
"""

from __future__ import annotations

import itertools
import json
from typing import Any


def of_json_schema(schema: dict[str, Any], model: Any) -> Any:
    """The `LlamaGrammar` of `schema` for `model`. Raises ValueError if there is none."""
    from llama_cpp import llama_grammar as library

    class Converter(library.SchemaConverter):
        """The library's converter, with rules of unique names. It names them after properties and definitions, so that
        one such rule could replace another.
        """

        def __init__(self) -> None:
            super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
            self._numbers = itertools.count()
            self._names: dict[str, str] = {}  # of the rules of definitions, by reference

        def visit(self, schema: Any, name: str) -> str:
            number = next(self._numbers)
            return super().visit(schema, f"rule{number}" if number else "")

        def resolve_refs(self, schema: Any, url: str) -> Any:
            """Finds the schemas of all references. The library leaves out those beside another reference."""
            nodes = [schema]
            while nodes:
                node = nodes.pop()
                if isinstance(node, dict) and isinstance(node.get("$ref"), str):
                    self._refs[node["$ref"]] = _referred(node["$ref"], schema)
                nodes += node.values() if isinstance(node, dict) else ()
                nodes += node if isinstance(node, list) else ()
            return schema

        def _resolve_ref(self, ref: str) -> str:
            if ref not in self._names:
                name = self._names[ref] = f"ref{len(self._names)}"
                self._rules[name] = self.visit(self._refs[ref], "")
            return self._names[ref]

        def _format_literal(self, literal: str) -> str:
            """A JSON text as a literal of the grammar. The library leaves out the backslashes."""
            plain = json.dumps(json.loads(literal), ensure_ascii=False)
            return json.dumps(plain, ensure_ascii=False)

        def _generate_constant_rule(self, value: Any) -> str:
            return self._format_literal(json.dumps(value))

    converter = Converter()
    try:
        converter.visit(converter.resolve_refs(schema, "stdin"), "")
        text = converter.format_grammar()
    except Exception as error:
        raise ValueError(f"its JSON schema cannot be enforced: {error}") from None
    return of_grammar(text, model)


def _referred(reference: str, schema: Any) -> Any:
    """The part of `schema` that `reference` names. Raises ValueError if there is none."""
    if not reference.startswith("#"):
        raise ValueError(f"{reference} is not in the schema")
    found = schema
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"{reference} is not in the schema") from None
    return found


def of_grammar(text: str, model: Any) -> Any:
    """The `LlamaGrammar` with this `text`. Raises ValueError if llama.cpp cannot read it.

    Without this check, the library would continue without a sampler, which ends the process (SIGSEGV).
    """
    from llama_cpp import LlamaGrammar, llama_cpp

    data = text.encode()
    sampler = None
    if b"\0" not in data:  # the library would read the text up to this byte
        sampler = llama_cpp.llama_sampler_init_grammar(model._model.vocab, data, b"root")
    if not sampler:
        raise ValueError("its grammar cannot be read by llama.cpp")
    llama_cpp.llama_sampler_free(sampler)
    return LlamaGrammar.from_string(text, verbose=False)
