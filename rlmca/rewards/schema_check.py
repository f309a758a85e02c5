"""The check of a JSON schema that runs in a checking process; jsonschema is imported there, and where a schema is read."""

from __future__ import annotations

import json
from typing import Any


def schema_error(schema: dict[str, Any]) -> str | None:
    """What is wrong with a schema, None when it is one."""
    import jsonschema  # type: ignore[import-untyped]

    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)
    return None


def valid(schema: str, document: str) -> bool:
    """Whether a document keeps to a schema, both JSON text. A reference to another document raises; nothing is fetched."""
    import jsonschema
    import referencing

    wanted = json.loads(schema)
    try:
        return bool(jsonschema.validators.validator_for(wanted)(wanted, registry=referencing.Registry()).is_valid(json.loads(document)))
    except RecursionError:
        return False
