"""Everything at once under faults: a harness with processes of five systems, and a judge of what they report."""
