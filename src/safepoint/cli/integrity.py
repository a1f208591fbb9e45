"""Commands that look after what is stored: verify, repair, doctor, accept, edit. Each registers itself with the group of ``app``."""
