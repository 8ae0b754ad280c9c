"""Tests of synchronizer."""
