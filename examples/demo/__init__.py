"""The demo: real training averaged between processes that find each other; one is killed, and a new one joins."""
