//! Writes what the programs need to know of the node: its addresses, its interfaces, the ports for
//! translated sources, and the settings that follow from them.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use proxy_common::{
    family::{V4, V6},
    flow,
    inventory::map_name,
    layout::{
        Address as _, FourPorts, INTERFACE_OF_BRIDGE, INTERFACE_OF_PODS, INTERFACE_OF_UPLINK,
        INTERFACE_WITHOUT_LINK_HEADERS, InterfaceSettings, NODE_ADDRESS_LOOPBACK, NodeAddress,
        PODS_BY_INTERFACE, PODS_BY_SOURCE, PODS_UNKNOWN,
    },
};

use super::{
    EbpfDataplane,
    error::Error,
    hooks::xdp::attach::vlan_devices,
    maps::{
        family::MapFamily,
        handles::{CommonMaps, FamilyMaps},
    },
    services::{
        self,
        writer::{Common, Failures},
    },
};
use crate::{
    model::node::{Host, Interface, LocalTraffic, Role},
    modes::{Applied, source_ports::SourcePorts},
};

/// The number of ports in a [`FourPorts`].
pub(super) const FOUR: usize = 4;

/// Makes `node_addresses4/6` hold exactly the host's addresses.
fn write_addresses<F: MapFamily>(maps: &FamilyMaps<F>, host: &Host) -> Result<Applied, Error> {
    // A ClusterIP that the node has itself serves no node ports to others, unless it was chosen for
    // node ports.
    let own_cluster_ips = host.own_cluster_ips.iter().map(|ip| (ip, NODE_ADDRESS_LOOPBACK));
    let serving = host.node_port_addresses.iter();
    let serving = serving.map(|ip| (ip, if ip.is_loopback() { NODE_ADDRESS_LOOPBACK } else { 0 }));
    let wanted: BTreeMap<F::Address, NodeAddress> = own_cluster_ips
        .chain(serving)
        .filter_map(|(ip, flags)| Some((F::address(*ip)?, NodeAddress { flags })))
        .collect();
    let found: BTreeMap<_, _> = maps.node_addresses.read_all()?.into_iter().collect();
    let mut applied = Applied::default();
    // Removals come first, because the other addresses may need the room.
    for address in found.keys().filter(|address| !wanted.contains_key(*address)) {
        applied.removed += u64::from(maps.node_addresses.remove(address)?);
    }
    // The addresses of the Node come first, because there may not be room for all.
    let first: Vec<_> = host.masquerade_addresses.iter().filter_map(|ip| F::address(*ip)).collect();
    let (first, others): (Vec<_>, Vec<_>) = wanted.iter().partition(|(address, _)| first.contains(address));
    for (address, value) in first.into_iter().chain(others) {
        if found.get(address) != Some(value) {
            maps.node_addresses.set(address, value)?;
            applied.written += 1;
        }
    }
    Ok(applied)
}

/// Makes `interfaces` hold exactly the uplinks, and the interfaces that have sources of their own
/// or bring traffic of pods.
fn write_interfaces(maps: &CommonMaps, host: &Host) -> Result<Applied, Error> {
    let settings = |interface: &Interface| {
        let (masquerade4, masquerade6) = masquerade(&interface.masquerade_addresses);
        let of_pods = if host.local_traffic.comes_in_by(interface) { INTERFACE_OF_PODS } else { 0 };
        let is_uplink = interface.role == Role::Uplink;
        let of_uplink = match (is_uplink, interface.ethernet) {
            (true, true) => INTERFACE_OF_UPLINK,
            (true, false) => INTERFACE_OF_UPLINK | INTERFACE_WITHOUT_LINK_HEADERS,
            (false, _) => 0,
        };
        // 0 stands for any length. No packet is too long for an MTU that does not fit.
        let mtu = if is_uplink { u16::try_from(interface.mtu).unwrap_or(0) } else { 0 };
        let of_bridge = if is_uplink && interface.bridge.is_some() { INTERFACE_OF_BRIDGE } else { 0 };
        InterfaceSettings { masquerade6, masquerade4, flags: of_pods | of_uplink | of_bridge, mtu }
    };
    let none = InterfaceSettings::default();
    let all = host.interfaces.iter().map(|interface| (interface.index, settings(interface)));
    let mut wanted: BTreeMap<_, _> = all.filter(|(_, settings)| *settings != none).collect();
    // If there is no room for all, entries with nothing but an MTU and flags of uplinks give way.
    // The other fields concern more packets.
    if wanted.len() > maps.interfaces.map().capacity() as usize {
        let others = |settings: &InterfaceSettings| InterfaceSettings {
            mtu: 0,
            flags: settings.flags & INTERFACE_OF_PODS,
            ..*settings
        };
        wanted.retain(|_, settings| others(settings) != none);
    }
    maps.interfaces.replace_all(&wanted)
}

/// Makes `pod_namespaces` hold the namespaces of pods, as far as there is room.
fn write_pod_namespaces(maps: &CommonMaps, host: &Host) -> Result<Applied, Error> {
    let pods = host.interfaces.iter().filter(|interface| interface.role == Role::Workload);
    let namespaces = pods.filter_map(|interface| Some((interface.index, interface.namespace?)));
    let room = maps.pod_namespaces.map().capacity() as usize;
    maps.pod_namespaces.replace_all(&namespaces.take(room).collect())
}

/// Returns how traffic of pods of a family is recognised (`PODS_*`), then a range and its prefix
/// length.
///
/// The range matters for `PODS_BY_SOURCE` alone. The configuration and the Node have at most one
/// range of each family.
pub(super) fn pods<F: MapFamily>(local: &LocalTraffic) -> (u16, F::Address, u8) {
    match local {
        LocalTraffic::FromCidrs(cidrs) => {
            let by_source =
                |cidr: &IpNet| Some((PODS_BY_SOURCE, F::address(cidr.network())?, cidr.prefix_len()));
            cidrs.iter().find_map(by_source).unwrap_or((PODS_UNKNOWN, F::Address::UNSPECIFIED, 0))
        }
        LocalTraffic::FromBridge(_) | LocalTraffic::FromInterfacePrefix(_) => {
            (PODS_BY_INTERFACE, F::Address::UNSPECIFIED, 0)
        }
    }
}

/// Returns the first address of each family. It is unspecified if there is none.
pub(super) fn masquerade(addresses: &[IpAddr]) -> ([u8; 4], [u8; 16]) {
    let v4 = addresses.iter().find_map(|ip| V4::address(*ip)).unwrap_or_default();
    let v6 = addresses.iter().find_map(|ip| V6::address(*ip)).unwrap_or_default();
    (v4, v6)
}

/// Writes the ports for translated sources, and returns true if they have changed.
pub(super) fn write_masquerade_ports(shared: &Common) -> Result<bool, Error> {
    let SourcePorts { programs, reserved_ranges, .. } = SourcePorts::read();
    let map = &shared.maps.masquerade_ports;
    let mut changed = false;
    // The ports come before the settings, which say how many there are. A port that programs
    // read in between is one of the former or one of the new ports.
    for (index, chunk) in programs.ports.chunks(FOUR).enumerate() {
        let mut four = FourPorts::default();
        four.ports[..chunk.len()].copy_from_slice(chunk);
        if map.get(index) != Some(four) {
            map.provide(index).map_err(|source| Error::Map { name: map_name::masquerade_ports, source })?;
            changed |= map.set(index, &four);
        }
    }
    changed |= shared.write_settings(|settings| {
        settings.reserved_ports = reserved_ranges;
        settings.masquerade_ports = programs.ports.len() as u16;
        settings.masquerade_ports_reserved = programs.reserved as u16;
    })?;
    Ok(changed)
}

/// The state of the node, as of the last `set_host`.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    pub(super) interfaces: Vec<Interface>,
    pub(super) host_namespace: u64,
    /// True if `attach` attaches to interfaces, because nothing is attached there yet.
    ///
    /// Programs of a predecessor are replaced in `set_host` instead, because they must not meet
    /// what this version writes.
    pub(super) attaches_later: bool,
    /// True if another mode serves all frontends too, for pods without packet programs.
    pub(super) are_frontends_shared: bool,
}

impl EbpfDataplane {
    fn write_node(&self, host: &Host) -> Result<bool, Error> {
        let (masquerade4, masquerade6) = masquerade(&host.masquerade_addresses);
        let ports = write_masquerade_ports(&self.services.shared)?;
        let settings = self.services.shared.write_settings(|settings| {
            settings.host_namespace = self.node.host_namespace;
            settings.masquerade4 = masquerade4;
            settings.masquerade6 = masquerade6;
            settings.masquerade_all = u8::from(host.masquerade_all);
            settings.openings_per_window = flow::openings_per_window(host.new_connections_per_core);
            settings.most_unproven_entries = self.most_unproven_entries();
            settings.encapsulation = services::entries::encapsulation_number(host.encapsulation);
            (settings.pods4, settings.pod_range4, settings.pod_range4_bits) = pods::<V4>(&host.local_traffic);
            (settings.pods6, settings.pod_range6, settings.pod_range6_bits) = pods::<V6>(&host.local_traffic);
        })?;
        Ok(ports || settings)
    }

    /// Writes what has changed of the node, and attaches to its interfaces.
    pub(super) fn follow_node(&mut self, host: &Host) -> Result<Applied, crate::modes::Error> {
        self.connections.lifetimes = host.flow_lifetimes;
        let (mut applied, mut failures): (Applied, Failures) = Default::default();
        self.use_choices(host, &mut applied, &mut failures);
        let addresses = [
            write_addresses(&self.services.v4.maps, host),
            write_addresses(&self.services.v6.maps, host),
            write_interfaces(&self.services.shared.maps, host),
            self.services.shared.maps.vlan_devices.replace_all(&vlan_devices(&host.interfaces)),
            write_pod_namespaces(&self.services.shared.maps, host),
        ];
        match self.write_node(host) {
            Ok(written) => applied.written += u64::from(written),
            Err(error) => failures.add("settings", error),
        }
        match self.maps.restore_pins() {
            Ok(()) => {}
            // Another controller's maps are pinned there now.
            Err(error @ Error::Locked { .. }) => return Err(error.into()),
            Err(error) => failures.add("pins", error),
        }
        self.node.interfaces.clone_from(&host.interfaces);
        self.hooks.look_for_bandwidth_plugin(host.limits_bandwidth);
        self.node.attaches_later = !self.hooks.are_at_interfaces();
        if !self.node.attaches_later {
            failures.merge(self.take_packets());
        } else if let Err(error) = self.services.shared.write_settings(|settings| settings.packets_held = 1) {
            failures.add("settings", error);
        }
        self.services.cidrs.set(host.service_cidrs.as_deref());
        self.services.write_cidrs(&mut applied, &mut failures);
        failures.into_result()?;
        for written in addresses {
            applied += written.map_err(Error::of_node_addresses)?;
        }
        Ok(applied)
    }
}
