"""Where the checkout, the package's source and its modules are."""

from pathlib import Path

__all__ = ["ROOT", "SRC", "module_name", "modules"]

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"


def module_name(path: Path) -> str:
    """Return the dotted name under which a file below src/ is imported."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    return {module_name(path): path for path in sorted((SRC / "safepoint").rglob("*.py"))}
