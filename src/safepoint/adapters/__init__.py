"""Adapters: safepoint's promises in other people's frameworks. Each is imported by its own name, and needs its own extra."""
