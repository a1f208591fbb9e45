"""What is optional: the import names that the base package never touches, and the parts of it that need an extra."""

__all__ = ["NEEDS_EXTRA", "OPTIONAL", "needs_extra"]

OPTIONAL = frozenset(
    {
        # the extras of pyproject.toml
        *("psycopg", "psycopg_pool", "redis", "cryptography", "starlette", "uvicorn", "jinja2", "opentelemetry"),
        *("hypothesis", "pytest", "_pytest"),
        # types that states may hold, known to the codec only once the application has imported them
        *("pydantic", "pydantic_core", "attr", "attrs", "numpy"),
        # frameworks with an adapter, and what a careless import of one would drag in
        *("langgraph", "langchain_core", "openai", "anthropic", "agents", "httpx"),
    }
)

# Prefixes of modules whose import may end in MissingExtra. A prefix ends at a dot: "a.b" covers "a.b" and "a.b.c".
NEEDS_EXTRA = (
    "safepoint.adapters",
    "safepoint.observe.otel",
    "safepoint.stores.postgres",
    "safepoint.stores.redis",
    "safepoint.testing",
    "safepoint.viewer",
)


def needs_extra(module: str) -> bool:
    """Say whether importing this module without extras may raise MissingExtra."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in NEEDS_EXTRA)
