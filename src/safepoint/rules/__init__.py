"""The decisions, as pure functions of rows: no store, no clock, no network in sight."""
