"""Compares averaging over slow links with long delays: this library, Gloo and plain TCP."""
