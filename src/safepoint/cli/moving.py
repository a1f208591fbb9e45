"""Commands that move and compare: copy, export, import, diff. Each registers itself with the group of ``app``."""
