//! The commands `status`, `services` and `backends`. They read what is in the kernel, whether or
//! not a controller runs.

use std::{
    collections::HashSet,
    io::Write as _,
    path::{Path, PathBuf},
};

use nix::net::if_::if_indextoname;

use super::{
    args::{BackendsArgs, Output, OutputArgs, ServicesArgs, StatusArgs},
    service_filter::ServiceFilter,
    table,
    views::{
        self, BackendView, EndpointView, FormerView, FrontendKind, FrontendView, HookView, Policy,
        ServiceView, StatusView,
    },
    xdp::{self, WorkloadInterfaces},
};
use crate::{
    cleanup,
    config::Config,
    model::{
        desired::ServicePortName,
        mode::Mode,
        node::Encapsulation,
        objects::{Forwarding, Protocol, TrafficPolicy},
    },
    modes::{
        self, BackendSnapshot, EndpointSnapshot, FrontendSnapshot, Hook, Programmed, ServiceSnapshot,
        Snapshot, Usage, ebpf::hooks::xdp::choice::of_word,
    },
    node,
    process::record::{InterfaceRecord, Record},
};

const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

pub(super) fn bpffs(flag: Option<PathBuf>) -> PathBuf {
    flag.unwrap_or_else(|| PathBuf::from(DEFAULT_BPFFS))
}

/// Adds advice to an error if the kernel denies the caller access.
pub(super) fn explained(error: modes::Error) -> anyhow::Error {
    if !error.is_denied() {
        return error.into();
    }
    anyhow::anyhow!(
        "permission denied: what is programmed on this node is not known ({error}); run this as root, or in the \
         proxy's pod with `kubectl exec`"
    )
}

/// Returns a reader of what is programmed on this node, and its mode.
pub(super) fn programmed(bpffs: &Path) -> anyhow::Result<Option<(Mode, Box<dyn Programmed>)>> {
    modes::read(bpffs).map_err(explained)
}

/// Returns what the kernel has for the active mode and for the secondary mode. Returns `None` if
/// nothing is programmed. If a controller is still starting, a note on stderr says so.
pub(super) fn snapshot(bpffs: &Path) -> anyhow::Result<Option<Snapshot>> {
    if let Some((mode, programmed)) = programmed(bpffs)? {
        let mut snapshot = programmed.snapshot().map_err(explained)?;
        let record = Record::read(bpffs)?.filter(|record| record.mode == mode.name());
        let secondary = record.and_then(|record| record.secondary);
        if let Some(secondary) = Mode::ALL.into_iter().find(|mode| Some(mode.name()) == secondary.as_deref())
            && let Some(programmed) = modes::read_mode(secondary, bpffs)?
        {
            snapshot.add(secondary, programmed.snapshot()?);
        }
        return Ok(Some(snapshot));
    }
    if let Some(process) = modes::controller(bpffs) {
        // A closed stderr cannot be reported.
        let _ = writeln!(
            std::io::stderr(),
            "proxy-ctl (process {process}) is starting: nothing is programmed yet"
        );
    }
    Ok(None)
}

pub(super) fn print<T: serde::Serialize>(
    output: OutputArgs,
    value: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    match output.output {
        Output::Json => table::print_json(value),
        Output::Table => Ok(table::print(&text())?),
    }
}

/// Returns an error if no port of the Service is programmed.
pub(super) fn ensure_served(wanted: &ServiceFilter, services: &[ServiceSnapshot]) -> anyhow::Result<()> {
    let is_wanted = |ServicePortName { service, port, .. }: &ServicePortName| {
        wanted.matches(&service.namespace, &service.name, port)
    };
    anyhow::ensure!(
        !services.iter().any(|service| service.name.service.namespace.is_empty()),
        "{wanted} cannot be found by its name: IPVS keeps no names of Services; `proxy-ctl services` lists addresses"
    );
    let hint = if wanted.may_name_port_by_number() {
        ". The part after the colon is the name of a port, as in web:http, and not its number"
    } else {
        ""
    };
    anyhow::ensure!(
        services.iter().any(|service| is_wanted(&service.name)),
        "{wanted} is not served on this node; `proxy-ctl services` lists what is{hint}"
    );
    Ok(())
}

pub(super) fn services(args: &ServicesArgs, bpffs: &Path) -> anyhow::Result<()> {
    let Snapshot { services, backends, node, .. } = snapshot(bpffs)?.unwrap_or_default();
    if let Some(wanted) = &args.name {
        ensure_served(wanted, &services)?;
    }
    let terminating: HashSet<u32> =
        backends.iter().filter(|backend| backend.terminating).map(|backend| backend.id).collect();
    let terminating = |id| terminating.contains(&id);
    let mut services: Vec<ServiceView> =
        services.into_iter().map(|service| service_view(service, node.encapsulation, terminating)).collect();
    if let Some(wanted) = &args.name {
        services.retain(|service| service.matches(wanted));
    }
    print(args.output, &services, || views::services(&services))
}

pub(super) fn backends(args: &BackendsArgs, bpffs: &Path) -> anyhow::Result<()> {
    let backends = snapshot(bpffs)?.map(|snapshot| snapshot.backends).unwrap_or_default();
    let backends: Vec<BackendView> = backends.into_iter().map(backend_view).collect();
    print(args.output, &backends, || views::backends(&backends))
}

pub(super) fn status(args: &StatusArgs, bpffs: &Path) -> anyhow::Result<()> {
    let (programmed, denied) = match modes::read(bpffs) {
        Err(error) if error.is_denied() => (None, Some(error)),
        programmed => (programmed?, None),
    };
    let (record, record_denied) = match Record::read(bpffs) {
        Ok(record) => (record, None),
        Err(error) => (None, Some(error)),
    };
    // A process leaves its record once it has loaded its programs.
    let speaks = |process: &u32| record.as_ref().is_some_and(|record| record.pid == *process);
    let starting = modes::controller(bpffs).filter(|process| !speaks(process));
    let interfaces = record.as_ref().map(|record| record.interfaces.clone()).unwrap_or_default();
    let keeps = record.as_ref().map(Record::keeps).unwrap_or_default();
    let blocked_by =
        record.as_ref().filter(|record| record.is_alive()).map(|record| record.removal_blockers.clone());
    let mut status = StatusView::new(record.clone(), programmed.as_ref().map(|(mode, _)| *mode), starting);
    if let Some(error) = &denied {
        status.unreadable(format!("hooks, maps, counters and the lease: {error}"));
    }
    if let Some(error) = &record_denied {
        status.unreadable(error.to_string());
    }
    status.former_kube_proxy = FormerView::new(&cleanup::find(&keeps), blocked_by.unwrap_or_default());
    if let Some((_, programmed)) = programmed {
        let Snapshot { hooks, lease, node, .. } = programmed.snapshot()?;
        status.withdraws_in = lease.map(|left| left.as_secs() + u64::from(left.subsec_nanos() > 0));
        if let Some(record) = record {
            // If the kernel does not return the interfaces, nothing is shown about XDP.
            let network = node::network(&Config::default()).unwrap_or_default();
            let attached = |index| {
                let xdp = hooks.iter().find(|hook| hook.kind == "xdp" && hook.interface == Some(index));
                xdp.and_then(|hook| of_word(&hook.name))
            };
            status.workload_interfaces = WorkloadInterfaces::of(&record, &network, &node.redirect_targets);
            status.xdp = xdp::of_controller(&record, &network, attached, &node.redirect_targets);
        }
        status.hooks = hooks.into_iter().map(|hook| hook_view(hook, &interfaces)).collect();
        status.hooks.sort_unstable();
        Usage { maps: status.maps, reasons: status.counters } = programmed.usage()?;
    }
    print(args.output, &status, || status.text())?;
    match (denied, record_denied) {
        (Some(error), _) => Err(explained(error)),
        (None, record_denied) => record_denied.map_or(Ok(()), |error| Err(error.into())),
    }
}

fn state(terminating: bool) -> &'static str {
    if terminating { "terminating" } else { "active" }
}

fn service_view(
    service: ServiceSnapshot,
    encapsulation: Encapsulation,
    terminating: impl Fn(u32) -> bool,
) -> ServiceView {
    let ServiceSnapshot { id, name, frontends, cluster, internal, external, .. } = service;
    // The external policy has no effect if no frontend can be dialled from outside.
    let is_external = frontends.iter().any(|frontend| frontend.external);
    let policy = Policy::of(
        service.internal_policy == TrafficPolicy::Local,
        is_external && service.external_policy == TrafficPolicy::Local,
    );
    // Clients in the cluster get the set `cluster`. A service port with nothing but a cluster IP
    // has only the set `internal`.
    let shown = if cluster.is_empty() { &internal } else { &cluster };
    let endpoint = |endpoint: &EndpointSnapshot| EndpointView {
        address: endpoint.address.ip(),
        port: endpoint.address.port(),
        local: endpoint.local,
        state: state(terminating(endpoint.backend)),
    };
    let mut frontends: Vec<_> = frontends.into_iter().map(frontend_view).collect();
    frontends.sort_unstable();
    ServiceView {
        namespace: name.service.namespace.to_string(),
        name: name.service.name.to_string(),
        port: name.port.to_string(),
        protocol: name.protocol.name(),
        family: name.family.name(),
        id,
        policy,
        algorithm: service.algorithm,
        forwarding: service.forwarding,
        encapsulation: (service.forwarding == Forwarding::Dsr).then_some(encapsulation),
        frontends,
        endpoints: shown.iter().map(endpoint).collect(),
        internal_endpoints: internal.len(),
        external_endpoints: external.len(),
        delegated_to: service.secondary.map(Mode::name),
    }
}

fn frontend_view(frontend: FrontendSnapshot) -> FrontendView {
    let kind = match (frontend.address, frontend.external) {
        (None, _) => FrontendKind::NodePort,
        (Some(_), true) => FrontendKind::External,
        (Some(_), false) => FrontendKind::ClusterIp,
    };
    FrontendView { kind, address: frontend.address, port: frontend.port }
}

fn backend_view(backend: BackendSnapshot) -> BackendView {
    BackendView {
        id: backend.id,
        address: backend.address.ip(),
        port: backend.address.port(),
        protocol: backend.protocol.map_or("unknown", Protocol::name),
        state: state(backend.terminating),
        local: backend.local,
        services: backend.uses,
        connections: backend.connections,
    }
}

fn hook_view(hook: Hook, interfaces: &[InterfaceRecord]) -> HookView {
    let Hook { name, interface, kind, others } = hook;
    let known = interfaces.iter().find(|known| Some(known.index) == interface);
    let here = |index: u32| if_indextoname(index).ok().and_then(|name| name.into_string().ok());
    HookView {
        name,
        interface: interface.map(|index| match known {
            Some(known) => known.name.clone(),
            None => here(index).unwrap_or_else(|| format!("number {index}")),
        }),
        role: known.map(|known| known.role.clone()),
        reason: known.map(|known| known.reason.clone()),
        kind: kind.to_owned(),
        others,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::model::objects::{Algorithm, Forwarding, IpFamily, ObjectName};

    fn endpoint(address: &str, local: bool, backend: u32) -> EndpointSnapshot {
        EndpointSnapshot { address: address.parse::<SocketAddr>().unwrap(), local, backend }
    }

    fn web(internal: Vec<EndpointSnapshot>, external: Vec<EndpointSnapshot>) -> ServiceSnapshot {
        ServiceSnapshot {
            id: 7,
            name: ServicePortName {
                service: ObjectName::new("default", "web"),
                port: "http".into(),
                protocol: Protocol::Tcp,
                family: IpFamily::Ipv4,
            },
            frontends: vec![
                FrontendSnapshot { address: None, port: 30080, external: true },
                FrontendSnapshot { address: Some([10, 96, 0, 1].into()), port: 80, external: false },
            ],
            cluster: vec![endpoint("10.1.0.1:8080", true, 1), endpoint("10.1.0.2:8080", false, 2)],
            internal,
            external,
            any_endpoints: true,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Local,
            affinity_seconds: 0,
            algorithm: Algorithm::Maglev,
            forwarding: Forwarding::Snat,
            secondary: None,
        }
    }

    #[test]
    fn a_service_with_local_policy_for_outside_clients() {
        let all = web(Vec::new(), Vec::new()).cluster;
        let service = web(all, vec![endpoint("10.1.0.1:8080", true, 1)]);
        let view = service_view(service, Encapsulation::Geneve, |id| id == 2);
        assert_eq!(view.encapsulation, None);
        assert_eq!(view.policy, Policy::ExternalLocal);
        assert_eq!((view.endpoints.len(), view.internal_endpoints, view.external_endpoints), (2, 2, 1));
        assert_eq!(view.endpoints[1].state, "terminating");
        assert_eq!(view.frontends[0].kind, FrontendKind::ClusterIp);
        assert_eq!(view.frontends[1].kind, FrontendKind::NodePort);
    }

    #[test]
    fn a_local_policy_is_one_also_where_all_endpoints_are_local() {
        let all = vec![endpoint("10.1.0.1:8080", true, 1), endpoint("10.1.0.2:8080", true, 2)];
        let service = ServiceSnapshot { cluster: all.clone(), ..web(all.clone(), all) };
        assert_eq!(service_view(service, Encapsulation::Ip, |_| false).policy, Policy::ExternalLocal);
    }

    #[test]
    fn a_service_that_nobody_dials_from_outside_has_no_policy_for_them() {
        let all = web(Vec::new(), Vec::new()).cluster;
        let mut service = web(all, Vec::new());
        service.frontends.retain(|frontend| !frontend.external);
        assert_eq!(service_view(service, Encapsulation::Ip, |_| false).policy, Policy::Cluster);
    }

    #[test]
    fn a_service_that_is_not_there_is_refused() {
        let services = [web(Vec::new(), Vec::new())];
        let refusal = |wanted: &str| {
            let refused = ensure_served(&wanted.parse().unwrap(), &services).err();
            refused.map(|error| error.to_string())
        };
        for served in ["web", "default/web", "web:http"] {
            assert_eq!(refusal(served), None);
        }
        for (absent, is_number) in
            [("nosuch", false), ("kube-system/web", false), ("web:https", false), ("web:80", true)]
        {
            let told = refusal(absent).unwrap();
            assert!(told.starts_with(&format!("{absent} is not served on this node")), "{told}");
            assert_eq!(told.contains("and not its number"), is_number, "{told}");
        }
        assert!(ensure_served(&"web".parse().unwrap(), &[]).is_err(), "nothing is programmed");
    }

    #[test]
    fn hooks_are_named_for_people() {
        let hook = |interface| Hook { name: "ingress".into(), interface, kind: "tcx", others: Vec::new() };
        assert_eq!(hook_view(hook(None), &[]).interface, None);
        assert_eq!(hook_view(hook(Some(1)), &[]).interface.as_deref(), Some("lo"));
        let (name, role, reason) = ("eth0".into(), "uplink".into(), "why".into());
        let uplink = InterfaceRecord { index: 7, name, role, reason, ..InterfaceRecord::default() };
        let of_uplink = hook_view(hook(Some(7)), &[uplink]);
        assert_eq!(
            (of_uplink.interface.as_deref(), of_uplink.role.as_deref(), of_uplink.reason.as_deref()),
            (Some("eth0"), Some("uplink"), Some("why"))
        );
    }
}
