"""Receipts for tests."""

from typing import Any

from hypothesis import strategies as st

from averaging.receipts.receipt import Account, DropCode, Dropped, LateArrival, Outcome, Receipt, Role, Straggler

A, B, C, D = "10.0.0.1:5001", "10.0.0.2:5001", "10.0.0.3:5001", "10.0.0.7:5001"

SILENT = Dropped.overdue(D, "sent nothing", 4.12, 4.0, "3 × its median")

floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**64 - 1)
texts = st.text(max_size=20)


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
receipts = st.builds(
    Receipt,
    round=counts,
    outcome=st.sampled_from(Outcome),
    reason=texts,
    group_id=st.binary(max_size=20),
    members=several(texts),
    dropped=several(
        st.builds(Dropped, texts, texts, st.sampled_from(DropCode), st.none() | floats, st.none() | floats, basis=texts)
    ),
    gathered=st.dictionaries(texts, json_values, max_size=3),
    seconds=floats,
    allreduce_seconds=floats,
    bytes_sent=counts,
    bytes_received=counts,
    kept_local=counts,
    state_version=st.integers(-(2**63), 2**63 - 1),
    run_id=texts,
    endpoint=texts,
    topic=texts,
    started=floats,
    role=st.none() | st.sampled_from(Role),
    accounts=several(
        st.builds(
            Account,
            texts,
            st.sampled_from(Role),
            texts,
            floats,
            floats,
            counts,
            counts,
            texts,
            st.none() | floats,
            st.none() | floats,
        )
    ),
    phases=st.dictionaries(texts, floats, max_size=3),
    straggler=st.none() | st.builds(Straggler, texts, floats, texts),
    digest=texts,
    state=texts,
    last_to_arrive=st.none() | st.builds(LateArrival, texts, floats),
    strategy=texts,
)


def receipt(endpoint: str = A, number: int = 17, **changes: Any) -> Receipt:
    """One of the four peers' receipts of a round in which all went well."""
    values: dict[str, Any] = {
        "round": number,
        "outcome": Outcome.AVERAGED,
        "group_id": bytes([number]) * 20,
        "members": (A, B, C, D),
        "seconds": 2.5,
        "allreduce_seconds": 1.5,
        "bytes_sent": 3 << 20,
        "bytes_received": 2 << 20,
        "run_id": "demo",
        "endpoint": endpoint,
        "started": 1.7e9 + 10 * number,
        "role": Role.FOLLOWER,
        "accounts": tuple(Account(name, share=0.25, digest="0000000" + name[7]) for name in (A, B, C, D)),
        "phases": {"looking": 1.0, "allreduce": 1.5},
    }
    return Receipt(**{**values, **changes})
