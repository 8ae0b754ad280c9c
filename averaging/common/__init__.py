"""Checks and helpers that every room may use. None of them knows what a peer is.

`addresses` (endpoints and the rules for them), `validation` (arguments), `option_sources` (options from files and the
environment), `safe_msgpack` (msgpack from strangers), `sanitize` (text from strangers), `backoff` (delays between
tries), `host_quota` (limits per host), `event_loop_thread` (an event
loop in a thread of its own), `malloc`.
"""

from averaging.common.addresses import (
    CLIENT_PREFIX,
    apart,
    covers,
    is_endpoint,
    is_loopback,
    member_of,
    objection,
    parse_address,
    parse_ip,
)
from averaging.common.backoff import Backoff, backoff_delay
from averaging.common.event_loop_thread import EventLoopThread, SignalSafeFuture, on_loop
from averaging.common.host_quota import HostQuota
from averaging.common.in_process import InProcess
from averaging.common.malloc import keep_freed_memory
from averaging.common.option_sources import (
    Setting,
    merge,
    read_arguments,
    read_environment,
    read_toml,
    unknown_option,
    with_sources,
)
from averaging.common.safe_msgpack import (
    MAX_INTEGER_KEYS,
    all_numbers_finite,
    check_keys,
    is_number,
    pack,
    pack_user,
    unpack,
)
from averaging.common.sanitize import MAX_NAMES, counted, duration, html_table, listed, plain, size
from averaging.common.tensor_names import (
    contradict,
    digest_of_names,
    first_moved_name,
    first_other_name,
    plain_state,
    without_wrappers,
)
from averaging.common.validation import check_weight, is_count, is_finite, named, one_of

__all__ = [
    "CLIENT_PREFIX",
    "MAX_INTEGER_KEYS",
    "MAX_NAMES",
    "Backoff",
    "EventLoopThread",
    "HostQuota",
    "InProcess",
    "Setting",
    "SignalSafeFuture",
    "all_numbers_finite",
    "apart",
    "backoff_delay",
    "check_keys",
    "check_weight",
    "contradict",
    "counted",
    "covers",
    "digest_of_names",
    "duration",
    "first_moved_name",
    "first_other_name",
    "html_table",
    "is_count",
    "is_endpoint",
    "is_finite",
    "is_loopback",
    "is_number",
    "keep_freed_memory",
    "listed",
    "member_of",
    "merge",
    "named",
    "objection",
    "on_loop",
    "one_of",
    "pack",
    "pack_user",
    "parse_address",
    "parse_ip",
    "plain",
    "plain_state",
    "read_arguments",
    "read_environment",
    "read_toml",
    "size",
    "unknown_option",
    "unpack",
    "with_sources",
    "without_wrappers",
]
