"""Where checkpoints are kept. One module a store; ``base`` is what they promise, ``rows`` what they are given."""
