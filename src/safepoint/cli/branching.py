"""Commands that go back and apart: fork, rewind, branches. Each registers itself with the group of ``app``."""
