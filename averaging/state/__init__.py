"""The state that newcomers download: snapshots, donors, and the verified, resumable download."""
