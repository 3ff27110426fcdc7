//! Cases that a test cannot cause in the kernel: races, maps that are full at one certain write, lost entries.
//! Round trips of real packets are in `tests/packets`.

mod direct;
mod ends;
mod flood_limit;
mod forward;
mod host;
mod host_connection;
mod interleavings;
mod origins;
mod overlapping;
mod packets;
mod ports;
mod races;
mod segments;
mod unknown;
mod unserved;
mod whole;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    rc::Rc,
};

use rstest::rstest;

use self::{host::*, packets::*};
use super::{entries::REFRESH_AFTER, keep::SUSTAINED_AFTER, tcp::REACH, *};
use crate::{
    family::{Slot as _, V4},
    layout::*,
    map_access::{
        AffinityMaps, Maps,
        host::{HostMaps, KnownClient},
    },
    packet::{
        Ends, Fragment, Headers, Packet, Part, Rewrite, Segment, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN, Then,
    },
    port::{Port, PortPool},
    reason::Reason,
    select::Origin,
};
