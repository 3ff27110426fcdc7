//! Tests that next hops that XDP keeps in flows are looked up anew after each change of routes,
//! which the kernel reports.

use std::{
    thread,
    time::{Duration, Instant},
};

use proxy_common::layout::RouteEpoch;
use proxy_ctl::{
    config::{Ebpf, Xdp},
    model::node::Role,
    modes::ebpf::EbpfDataplane,
    sys::bpf::map::Map,
};

use crate::{
    hooks::{card, host},
    sandbox::{Sandbox, TakeHost as _, run},
};

fn epoch(sandbox: &Sandbox) -> u32 {
    let map: Map<u32, RouteEpoch> = sandbox.map("route_epoch");
    map.get(&0).unwrap().unwrap().number
}

fn opened(sandbox: &Sandbox, xdp: Xdp) -> EbpfDataplane {
    let mut dataplane = EbpfDataplane::open(&Ebpf { xdp, ..sandbox.config.clone() }).unwrap();
    dataplane.take_host(&host(&[("dpa", Role::Uplink)])).unwrap();
    dataplane
}

#[test]
fn each_change_of_routes_raises_the_epoch() {
    const CHANGES: [&str; 14] = [
        "neigh add 198.51.100.9 lladdr 02:00:00:00:00:09 dev dpa",
        "neigh replace 198.51.100.9 lladdr 02:00:00:00:00:0a dev dpa",
        "neigh del 198.51.100.9 dev dpa",
        "neigh add 2001:db8:9::9 lladdr 02:00:00:00:00:09 dev dpa",
        "addr add 203.0.113.1/24 dev dpa",
        "addr add 2001:db8:9::1/64 dev dpa",
        "nexthop add id 10 via 203.0.113.2 dev dpa",
        "nexthop replace id 10 via 203.0.113.3 dev dpa",
        "nexthop del id 10",
        "route add 192.0.2.0/24 via 203.0.113.2",
        "-6 route add 2001:db8:7::/64 dev dpa",
        "rule add to 192.0.2.0/24 lookup 9999",
        "-6 rule add to 2001:db8:7::/64 lookup 9999",
        "link set dpa mtu 1400",
    ];
    let Some(sandbox) = Sandbox::new() else { return };
    card("dpa");
    let dataplane = opened(&sandbox, Xdp::Native);
    for change in CHANGES {
        let before = epoch(&sandbox);
        run("ip", change);
        let begin = Instant::now();
        while epoch(&sandbox) == before {
            assert!(begin.elapsed() < Duration::from_secs(60), "ip {change}");
            thread::yield_now();
        }
    }
    drop(dataplane);
    let before = epoch(&sandbox);
    drop(opened(&sandbox, Xdp::Off));
    assert_eq!(epoch(&sandbox), before, "nothing is kept without XDP");
    let _dataplane = opened(&sandbox, Xdp::Native);
    assert!(epoch(&sandbox) > before, "what has changed while nobody followed");
}
