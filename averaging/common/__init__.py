"""Checks and helpers that every room may use. None of them knows what a peer is.

`addresses` (endpoints, this machine's addresses, the proxy), `seed_sources` (what `join` may name), `options` (how they
are declared, checked, read and named), `safe_msgpack` (msgpack and text from strangers), `limits` (delays between
tries, quotas per host), `event_loop_thread` (an event loop in a thread of its own), `malloc`.
"""

from averaging.common.addresses import (
    CLIENT_PREFIX as CLIENT_PREFIX,
    Address as Address,
    address_for_others as address_for_others,
    apart as apart,
    are_same as are_same,
    chosen_proxy as chosen_proxy,
    client_name as client_name,
    covers as covers,
    every_address as every_address,
    format_address as format_address,
    ignored_proxies as ignored_proxies,
    in_zone as in_zone,
    is_endpoint as is_endpoint,
    is_loopback as is_loopback,
    is_name_of as is_name_of,
    is_own as is_own,
    loopback_here as loopback_here,
    member_of as member_of,
    objection as objection,
    parse_address as parse_address,
    parse_ip as parse_ip,
    proxy_for as proxy_for,
    shown_proxy as shown_proxy,
    zone_of as zone_of,
)
from averaging.common.event_loop_thread import (
    EventLoopThread as EventLoopThread,
    InProcess as InProcess,
    SignalSafeFuture as SignalSafeFuture,
    call_in as call_in,
    compute_in_one_thread as compute_in_one_thread,
    first_error as first_error,
    on_loop as on_loop,
)
from averaging.common.limits import Backoff as Backoff, HostQuota as HostQuota, backoff_delay as backoff_delay
from averaging.common.malloc import keep_freed_memory as keep_freed_memory
from averaging.common.options import (
    ADDRESS as ADDRESS,
    ADDRESS_TO_DIAL as ADDRESS_TO_DIAL,
    ADDRESSES_TO_DIAL as ADDRESSES_TO_DIAL,
    PATH as PATH,
    SECONDS as SECONDS,
    SEED as SEED,
    SWITCH as SWITCH,
    Kind as Kind,
    Option as Option,
    Setting as Setting,
    as_flag as as_flag,
    check_options as check_options,
    check_weight as check_weight,
    choice as choice,
    is_count as is_count,
    is_finite as is_finite,
    merge as merge,
    number as number,
    one_of as one_of,
    option as option,
    options_of as options_of,
    parse_duration as parse_duration,
    read_arguments as read_arguments,
    read_environment as read_environment,
    read_toml as read_toml,
    required as required,
    spelled as spelled,
    spelled_as_set as spelled_as_set,
    spelling as spelling,
    text as text,
    texts as texts,
    unknown_option as unknown_option,
    whole as whole,
)
from averaging.common.safe_msgpack import (
    MAX_NAMES as MAX_NAMES,
    all_numbers_finite as all_numbers_finite,
    counted as counted,
    duration as duration,
    is_number as is_number,
    listed as listed,
    pack as pack,
    pack_user as pack_user,
    plain as plain,
    size as size,
    unpack as unpack,
)
from averaging.common.seed_sources import (
    GOSSIP as GOSSIP,
    SeedSource as SeedSource,
    SourceKind as SourceKind,
    parse_discovery as parse_discovery,
    parse_seed as parse_seed,
)
from averaging.common.tensor_names import (
    VERSION_KEY as VERSION_KEY,
    contradict as contradict,
    digest_of_names as digest_of_names,
    first_moved_name as first_moved_name,
    first_other_name as first_other_name,
    is_placeholder as is_placeholder,
    plain_state as plain_state,
    without_wrappers as without_wrappers,
)
