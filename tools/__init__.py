"""Tools that build the documentation."""
