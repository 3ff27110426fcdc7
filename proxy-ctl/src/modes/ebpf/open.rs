//! Opens the mode: adopts the pinned maps or makes new ones, loads this version's programs, and
//! attaches them to sockets.

use std::{collections::BTreeSet, net::UdpSocket, os::fd::AsFd as _, path::PathBuf};

use aya_obj::generated::bpf_attach_type;
use proxy_common::{
    family::{V4, V6},
    inventory::program,
};

use super::{
    EbpfDataplane,
    connections::{netfilter::NetfilterConnections, stale_sockets::StaleSockets, tend::Connections},
    error::Error,
    flow_maps::FlowMapResize,
    hooks::{
        self,
        attach::{Hooks, sockets::Cgroup},
        lease::LeaseRenewal,
    },
    maps::{
        self,
        family::MapFamily,
        handles::{CommonMaps, FamilyMaps},
        paths::Paths,
        pinned::PinnedMaps,
        pins::MapPins,
    },
    node::NodeState,
    services::{
        addresses::service_cidrs::ServiceCidrs,
        allocate::Ranges,
        programmed::Entries,
        sync::Services,
        writer::{Common, FamilyWriter},
    },
};
use crate::{
    config::{Ebpf, SocketLoadBalancing},
    sys::{
        CallError,
        bpf::grace::GracePeriod,
        net::{namespace, socket_diag::Transport},
        proc::{filesystem, limits},
    },
};

fn family_writer<F: MapFamily>(paths: &Paths) -> Result<FamilyWriter<F>, Error> {
    let maps = FamilyMaps::open(&paths.maps(), true)?;
    let entries = Entries::empty(maps.slots.len() as u32);
    Ok(FamilyWriter { maps, entries })
}

fn cgroup_folder(config: &Ebpf) -> Result<PathBuf, Error> {
    if let Some(folder) = &config.cgroup {
        return Ok(folder.clone());
    }
    provide_cgroup2()?.ok_or(Error::NoCgroup)
}

pub(super) fn provide_cgroup2() -> Result<Option<PathBuf>, Error> {
    filesystem::provide_cgroup2()
        .map_err(|source| Error::Folder { path: "/proc/self/mountinfo".into(), source })
}

/// Returns the cookie of this network namespace. It asks the program on connect4, which must be
/// attached to a cgroup that this process is in.
pub(super) fn learn_namespace(maps: &CommonMaps, probe: &UdpSocket) -> Result<u64, Error> {
    let cookie = namespace::socket_cookie(probe.as_fd()).map_err(Error::Namespace)?;
    let mut settings = maps.settings.get(&0)?.unwrap_or_default();
    // The namespace that a predecessor has learned stays in force meanwhile.
    settings.probe_socket = cookie;
    maps.settings.set(&0, &settings)?;
    // Connecting a datagram socket sends nothing.
    probe
        .connect("127.0.0.1:9")
        .map_err(|e| Error::Namespace(CallError::new("connecting a UDP socket to 127.0.0.1", e)))?;
    let learned = maps.settings.get(&0)?.unwrap_or_default().host_namespace;
    if learned == 0 {
        let problem =
            std::io::Error::other("the hook on connect was not reached: is this process in the cgroup?");
        return Err(Error::Namespace(CallError::new("connecting a UDP socket to 127.0.0.1", problem)));
    }
    Ok(learned)
}

impl EbpfDataplane {
    /// Takes over the pinned maps or makes new ones, and swaps this version's programs in. The
    /// service ports in the maps are not changed before the first `Dataplane::resync`.
    ///
    /// Needs Linux 5.10, and `CAP_BPF`, `CAP_PERFMON` and `CAP_NET_ADMIN`, or root.
    pub fn open(config: &Ebpf) -> Result<Self, Error> {
        if let Err(error) = limits::raise_locked_memory() {
            tracing::debug!(%error, "BPF memory stays limited if the kernel counts it as locked");
        }
        let paths = Paths::new(&config.bpffs);
        paths.create(&config.bpffs)?;
        let lock = paths.lock()?;
        let mut shapes = maps::handles::shapes(&config.limits);
        maps::resize::follow_names(&paths)?;
        let flow_maps = FlowMapResize::adopt(&paths, &mut shapes)?;
        maps::resize::set_aside(&paths, &mut shapes)?;

        let probe = UdpSocket::bind("127.0.0.1:0")
            .map_err(|e| Error::Namespace(CallError::new("binding a UDP socket to 127.0.0.1", e)))?;
        let cookie = match namespace::netns_cookie(&probe) {
            Ok(cookie) => Some(cookie),
            Err(e) if e.errno() == libc::ENOPROTOOPT => None,
            Err(e) => return Err(Error::Namespace(e)),
        };
        let balancing = config.sockets();
        let (mut programs, log) = hooks::load::load(&shapes, |_| paths.maps(), config, cookie.is_none())?;
        maps::resize::transfer(&paths, &shapes)?;

        let pins = MapPins::hold(&paths, &shapes, lock)?;
        let common = CommonMaps::open(&paths.maps(), true)?;
        let v4 = family_writer::<V4>(&paths)?;
        let v6 = family_writer::<V6>(&paths)?;
        let host_namespace = match cookie {
            Some(cookie) => cookie,
            None => {
                let own = filesystem::own_cgroup()
                    .map_err(|source| Error::Folder { path: "/proc/self/cgroup".into(), source })?
                    .ok_or(Error::NoCgroup)?;
                let connect4 = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
                let link = Cgroup::open(own)?.attach(&mut programs, program::learn_namespace, connect4)?;
                let learned = learn_namespace(&common, &probe);
                drop(link);
                learned?
            }
        };
        let cgroup = match balancing {
            SocketLoadBalancing::Off => None,
            SocketLoadBalancing::All | SocketLoadBalancing::Host => {
                Some(Cgroup::open(cgroup_folder(config)?)?)
            }
        };
        let lease = LeaseRenewal::begin(config.withdraw_after, &common)?;
        let grace = GracePeriod::new().map_err(Error::Grace)?;
        let stale_sockets = StaleSockets::begin(&paths, config);
        let ids = Ranges::new(common.services.len() as u32);
        let shared = Common {
            maps: common,
            ids,
            next_backend: 0,
            backends_set_aside: 0,
            grace,
            is_epoch_over: true,
            algorithm: config.algorithm,
            forwarding: config.forwarding(),
            // A predecessor may have been killed before it ended the sockets of lost backends.
            lost_backends: BTreeSet::from([Transport::Tcp, Transport::Udp]),
        };
        let loaded = (programs, log);
        let mut dataplane = Self {
            config: config.clone(),
            hooks: Hooks::new(paths.clone(), loaded, cgroup, config),
            maps: PinnedMaps::new(config.bpffs.clone(), paths, shapes, pins),
            flow_maps,
            services: Services { shared, v4, v6, cidrs: ServiceCidrs::begin(config), is_synced: false },
            connections: Connections::new(stale_sockets),
            netfilter: NetfilterConnections::new(),
            node: NodeState { host_namespace, ..NodeState::default() },
            lease,
            collections: 0,
            is_draining: false,
        };
        // A predecessor has counted connections, and its service ports are served until the first
        // resync.
        if dataplane.hooks.is_release_pinned() || !dataplane.services.v4.maps.connections.read()?.is_empty() {
            dataplane.begin_to_count();
        }
        // Programs may still read the ids and slots that a predecessor gave back at its end.
        dataplane.services.shared.grace.wait().map_err(Error::Grace)?;
        dataplane.services.shared.write_settings(|settings| {
            settings.host_namespace = host_namespace;
            // Since the predecessor's end, rules of others may have opened connections.
            settings.answers_unknown = 0;
        })?;
        // If sockets are left alone now, a predecessor's hooks are detached in `set_host`, when the
        // packet programs can take over.
        if balancing != SocketLoadBalancing::Off {
            dataplane.hooks.attach_sockets()?;
        }
        // The sources are still listing objects, so loading costs no time now. Without programs at
        // interfaces, `attach` loads them, once service ports are served to sockets.
        if dataplane.hooks.are_at_interfaces() {
            dataplane.hooks.load_ahead()?;
        }
        Ok(dataplane)
    }
}
