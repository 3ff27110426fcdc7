//! Tests that the ports for translated sources follow the kernel's parameters.

use std::fs;

use proxy_ctl::{
    model::node::Host,
    modes::{Applied, Dataplane},
};

use crate::sandbox::{Sandbox, TakeHost as _};

const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;

type Ports<'a> = &'a [(u16, u16)];
const DEFAULT: Ports<'_> = &[(1_024, 29_999), (32_768, 65_535)];

#[test]
fn changed_parameters_are_followed() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.take_host(&Host::default()).unwrap();
    assert_eq!(sandbox.snapshot().node.masquerade_ports, DEFAULT);
    let steps: [(&str, &str, Ports<'_>); 3] = [
        (
            "ip_local_reserved_ports",
            "8080,40000-50000",
            &[(1_024, 8_079), (8_081, 29_999), (32_768, 39_999), (50_001, 65_535)],
        ),
        (
            "ip_local_port_range",
            "10000 65535",
            &[(1_024, 8_079), (8_081, 29_999), (32_768, 39_999), (50_001, 65_535)],
        ),
        ("ip_local_reserved_ports", "", DEFAULT),
    ];
    for (parameter, value, expected) in steps {
        fs::write(format!("/proc/sys/net/ipv4/{parameter}"), format!("{value}\n")).unwrap();
        for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
            dataplane.collect_garbage().unwrap();
        }
        assert_eq!(sandbox.snapshot().node.masquerade_ports, expected, "{parameter} = {value}");
        assert_eq!(
            dataplane.take_host(&Host::default()).unwrap(),
            Applied::default(),
            "nothing is written twice"
        );
    }
}

#[test]
fn a_folder_of_a_version_without_these_maps_gets_them() {
    let Some(sandbox) = Sandbox::new() else { return };
    drop(sandbox.open());
    for name in ["masquerade_ports", "remapped_ports", "host_connections4", "host_connections6"] {
        fs::remove_file(sandbox.map_pin(name)).unwrap();
    }
    let mut dataplane = sandbox.open();
    dataplane.take_host(&Host::default()).unwrap();
    assert_eq!(sandbox.snapshot().node.masquerade_ports, DEFAULT);
}
