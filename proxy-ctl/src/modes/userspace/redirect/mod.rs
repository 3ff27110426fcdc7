//! Rules that redirect clients of frontends to the listeners. They are rules of nf_tables in a
//! table of our own, or of iptables if the kernel has no nf_tables. The listener of each frontend
//! is decided without side effects, and [`Redirect`] has the differences written.

mod iptables;
mod nf_tables;
#[cfg(test)]
pub(super) mod noted;
mod refusing;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    thread,
};

pub(super) use self::nf_tables::{is_there as has_tables, remove as remove_tables};
use self::{iptables::PortalChains, nf_tables::Tables, refusing::RefusingPorts};
use crate::{
    model::{
        desired::{Frontend, ServicePortName},
        node::Host,
        objects::{IpFamily, Protocol},
    },
    modes::conntrack::{Repliers, StaleFlows},
    names::USERSPACE_TABLE as TABLE,
    sys::{
        CallError,
        proc::credentials,
        xtables::{self, Backend, ToolError},
    },
};

/// The group of the thread that dials endpoints. The rules do not redirect what its sockets send.
/// An endpoint may be behind its own frontend, such as a pod with hostNetwork behind an external IP
/// that is the node's address. If its connections were redirected to the listener again, each would
/// open the next.
///
/// Both kinds of rules can match the group of a socket on every kernel since 5.10, and packets do
/// not show it. Each bit of the fwmark may belong to a network plugin, to a routing rule or to the
/// secondary mode. systemd leaves this number unused, and a rootless node's user namespace has it.
pub(super) const DIALLING_GROUP: u32 = 65_529;

#[derive(Debug, thiserror::Error)]
pub(super) enum RedirectError {
    #[error("{0}")]
    Call(#[from] CallError),
    #[error("the kernel refuses the table {TABLE} of family {family}, in message {message}: {source}")]
    Refused { family: &'static str, message: u32, source: io::Error },
    #[error("the rules that redirect clients to this process: {0}")]
    Tool(#[from] ToolError),
}

/// A frontend for which there is a rule.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct RedirectedFrontend {
    family: IpFamily,
    protocol: Protocol,
    frontend: Frontend,
}

/// The port of the listener in this process for each frontend.
type PortRedirects = BTreeMap<RedirectedFrontend, u16>;

/// A frontend with the port of its listener.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct PortRedirect {
    pub(super) frontend: Frontend,
    pub(super) port: u16,
}

fn of_port<'a>(
    name: &'a ServicePortName,
    redirects: &'a [PortRedirect],
) -> impl Iterator<Item = (RedirectedFrontend, u16)> + 'a {
    let redirected = |frontend| RedirectedFrontend { family: name.family, protocol: name.protocol, frontend };
    redirects.iter().map(move |port_redirect| (redirected(port_redirect.frontend), port_redirect.port))
}

/// The rules that the kernel should have, by service port.
#[derive(Debug, Default)]
struct Wanted {
    ports: BTreeMap<ServicePortName, Vec<PortRedirect>>,
    /// The addresses at which node ports are served.
    addresses: BTreeSet<IpAddr>,
    /// The addresses of the node to which clients of other machines and of pods are redirected, at
    /// most one of each IP family.
    own: Vec<IpAddr>,
}

/// Checks that a thread can take [`DIALLING_GROUP`]. The error says why it cannot.
fn may_dial_as_group() -> io::Result<()> {
    let trial = thread::Builder::new().spawn(|| credentials::open_as_group(DIALLING_GROUP))?;
    let taken = trial.join().map_err(|_| io::Error::other("a thread has panicked"))?;
    taken.map_err(io::Error::other)
}

impl Wanted {
    fn redirects(&self) -> PortRedirects {
        self.ports.iter().flat_map(|(name, redirects)| of_port(name, redirects)).collect()
    }

    fn node_addresses(&self, family: IpFamily) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().copied().filter(move |address| IpFamily::of(*address) == family)
    }

    fn own(&self, family: IpFamily) -> Option<IpAddr> {
        self.own.iter().copied().find(|own| IpFamily::of(*own) == family)
    }

    /// Takes over the change. Returns the frontends that go and those that come.
    fn change(
        &mut self,
        changes: Vec<(ServicePortName, Vec<PortRedirect>)>,
    ) -> (PortRedirects, PortRedirects) {
        let (mut go, mut come) = (PortRedirects::new(), PortRedirects::new());
        for (name, redirects) in changes {
            come.extend(of_port(&name, &redirects));
            let before = if redirects.is_empty() {
                self.ports.remove(&name)
            } else {
                self.ports.insert(name.clone(), redirects)
            };
            go.extend(of_port(&name, before.as_deref().unwrap_or_default()));
        }
        go.retain(|redirected, port| {
            let stays = come.get(redirected) == Some(port);
            if stays {
                come.remove(redirected);
            }
            !stays
        });
        (go, come)
    }
}

/// A way to write the rules to the kernel.
trait RedirectRules: Send {
    /// Returns the name of what has the rules, for people.
    fn by(&self) -> String;

    /// Returns the IP families in which rules redirect clients.
    fn families(&self) -> Vec<IpFamily>;

    /// Writes the change to `wanted`: `go` is removed, and `come` is added.
    fn change(
        &mut self,
        wanted: &Wanted,
        go: &PortRedirects,
        come: &PortRedirects,
    ) -> Result<(), RedirectError>;

    /// Writes all rules as `wanted` says, whatever was written before.
    fn rewrite(&mut self, wanted: &Wanted) -> Result<(), RedirectError>;

    /// Writes what another program has removed. Returns true if anything was missing.
    fn restore(&mut self, wanted: &Wanted) -> Result<bool, RedirectError>;
}

/// The port of the listener whose flows go on. `None`: the flows of no listener go on.
#[derive(Debug)]
struct ListenerPort(Option<u16>);

impl Repliers for ListenerPort {
    fn has(&self, replier: SocketAddr) -> bool {
        self.0 == Some(replier.port())
    }
}

fn note(
    stale_flows: &mut StaleFlows<ListenerPort>,
    protocol: Protocol,
    go: &PortRedirects,
    come: &PortRedirects,
) {
    let listeners = go
        .keys()
        .map(|redirected| (redirected, None))
        .chain(come.iter().map(|(redirected, port)| (redirected, Some(*port))));
    for (redirected, port) in listeners.filter(|(redirected, _)| redirected.protocol == protocol) {
        stale_flows.answered_by(redirected.family, &redirected.frontend, ListenerPort(port));
    }
}

/// The rules of this mode.
pub(super) struct Redirect {
    rules: Box<dyn RedirectRules>,
    families: Vec<IpFamily>,
    refusing: RefusingPorts,
    wanted: Wanted,
    /// True if the last write has failed, so that the kernel's rules are not known.
    is_invalid: bool,
    stale_flows: StaleFlows<ListenerPort>,
    has_started: bool,
}

impl std::fmt::Debug for Redirect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redirect").field("families", &self.families).finish_non_exhaustive()
    }
}

impl Redirect {
    /// Makes the rules anew, so that they redirect nobody. Needs CAP_NET_ADMIN. `None`: the kernel
    /// cannot do it, or this process may not.
    pub(super) fn open() -> Option<Self> {
        if let Err(error) = may_dial_as_group() {
            tracing::warn!(%error, "no rules: what this process dials would be redirected to itself");
            return None;
        }
        Self::by_nf_tables().or_else(|| match xtables::choose() {
            Ok(chosen) => Self::by_iptables(chosen.backend),
            Err(error) => {
                tracing::debug!(%error, "no rules of iptables");
                None
            }
        })
    }

    pub(super) fn by_nf_tables() -> Option<Self> {
        Self::new(Box::new(Tables::open()?))
    }

    pub(super) fn by_iptables(backend: Backend) -> Option<Self> {
        Self::new(Box::new(PortalChains::open(backend)?))
    }

    fn new(rules: Box<dyn RedirectRules>) -> Option<Self> {
        let families = rules.families();
        let refusing = RefusingPorts::hold(&families);
        let refusing = refusing
            .inspect_err(|error| tracing::warn!(%error, "no rules: a port that refuses cannot be held"))
            .ok()?;
        let (wanted, is_invalid, stale_flows, has_started) = Default::default();
        Some(Self { rules, families, refusing, wanted, is_invalid, stale_flows, has_started })
    }

    /// Returns the name of what has the rules, for people.
    pub(super) fn by(&self) -> String {
        self.rules.by()
    }

    /// Returns true if rules redirect clients of this IP family.
    pub(super) fn has(&self, family: IpFamily) -> bool {
        self.families.contains(&family)
    }

    /// Returns the port that refuses connections. Clients of a service port that nobody serves are
    /// redirected to it.
    pub(super) fn refusing_port(&self, name: &ServicePortName) -> Option<u16> {
        self.refusing.port(name.family, name.protocol)
    }

    /// Makes the rules redirect clients of these service ports to the listeners in `changes`, and
    /// to no others. It also writes what the last write has failed to write. Returns the numbers of
    /// frontends that are added and removed.
    pub(super) fn apply(
        &mut self,
        changes: Vec<(ServicePortName, Vec<PortRedirect>)>,
    ) -> Result<(u64, u64), RedirectError> {
        let (go, come) = self.wanted.change(changes);
        note(&mut self.stale_flows, Protocol::Udp, &go, &come);
        let is_retry = self.is_invalid;
        if is_retry {
            self.rewrite()?;
        } else if !go.is_empty() || !come.is_empty() {
            self.is_invalid = true;
            self.rules.change(&self.wanted, &go, &come)?;
            self.is_invalid = false;
        }
        self.stale_flows.end(&self.wanted.addresses);
        Ok((come.len() as u64 + u64::from(is_retry), go.len() as u64))
    }

    fn rewrite(&mut self) -> Result<(), RedirectError> {
        self.is_invalid = true;
        self.rules.rewrite(&self.wanted)?;
        self.is_invalid = false;
        Ok(())
    }

    /// Ends connections from before this start that nobody answers, once. It is called when the
    /// rules redirect all frontends.
    pub(super) fn end_unanswered_once(&mut self) {
        if !self.has_started {
            let mut unanswered = StaleFlows::default();
            // No listener counts as a replier, because a new one may have the port that another
            // had.
            note(&mut unanswered, Protocol::Tcp, &self.wanted.redirects(), &PortRedirects::new());
            self.has_started = unanswered.end_unanswered(&self.wanted.addresses, &self.wanted.own);
        }
    }

    pub(super) fn set_host(&mut self, host: &Host) -> Result<(), RedirectError> {
        self.wanted.addresses = host.node_port_addresses.clone();
        self.wanted.own = host.masquerade_addresses.clone();
        self.rewrite()
    }

    /// Writes rules that another program has removed. Returns true if there were any.
    pub(super) fn restore_if_gone(&mut self) -> Result<bool, RedirectError> {
        self.rules.restore(&self.wanted)
    }

    /// Makes the rules redirect nobody. Established connections stay translated, because the kernel
    /// goes on while the chains exist.
    pub(super) fn redirect_nobody(&mut self) -> Result<(), RedirectError> {
        let before = std::mem::take(&mut self.wanted);
        self.rewrite()?;
        // The sessions of UDP clients end with the listeners.
        note(&mut self.stale_flows, Protocol::Udp, &before.redirects(), &PortRedirects::new());
        self.stale_flows.end(&before.addresses);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        model::{desired::FrontendKind, objects::TrafficPolicy},
        modes::userspace::test_support::web,
        sys::net::conntrack::TrackedFlow,
    };

    #[test]
    fn frontends_lead_to_listeners_and_only_differences_are_written() {
        let port = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
        let redirects = |number: u16| -> Vec<PortRedirect> {
            port.frontends.iter().map(|frontend| PortRedirect { frontend: *frontend, port: number }).collect()
        };
        let mut wanted = Wanted::default();
        let (go, come) = wanted.change(vec![(port.name.clone(), redirects(40_000))]);
        assert_eq!((go.len(), come.len()), (0, 4));
        let mut later = redirects(40_000);
        later[0].port = 40_001;
        let (go, come) = wanted.change(vec![(port.name.clone(), later)]);
        let frontend = port.frontends[0];
        let redirected = RedirectedFrontend { family: IpFamily::Ipv4, protocol: Protocol::Tcp, frontend };
        assert_eq!(
            (go, come),
            (PortRedirects::from([(redirected, 40_000)]), PortRedirects::from([(redirected, 40_001)]))
        );
        let (go, come) = wanted.change(vec![(port.name.clone(), Vec::new())]);
        assert_eq!((go.len(), come.len()), (4, 0));
        assert!(wanted.redirects().is_empty());
    }

    #[test]
    fn a_frontend_passes_to_another_service_port_in_one_step() {
        let port = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
        let mut heir = port.name.clone();
        heir.port = "heir".into();
        let port_redirect = |number| vec![PortRedirect { frontend: port.frontends[0], port: number }];
        let mut wanted = Wanted::default();
        wanted.change(vec![(port.name.clone(), port_redirect(40_000))]);
        let (go, come) = wanted.change(vec![(port.name.clone(), Vec::new()), (heir, port_redirect(40_001))]);
        assert_eq!((go.len(), come.len()), (1, 1));
        assert_eq!(go.keys().next(), come.keys().next());
    }

    fn redirected(kind: FrontendKind, protocol: Protocol, address: &str, port: u16) -> RedirectedFrontend {
        let frontend = Frontend { kind, address: address.parse().unwrap(), port };
        RedirectedFrontend { family: IpFamily::Ipv4, protocol, frontend }
    }

    #[rstest]
    #[case::another_listener("10.96.0.10:53", "192.0.2.1:40001", true)]
    #[case::the_same_listener("10.96.0.10:53", "127.0.0.1:40002", false)]
    #[case::not_led_before("10.96.0.10:53", "10.96.0.10:53", true)]
    #[case::another_port("10.96.0.10:54", "192.0.2.1:40001", false)]
    #[case::led_nowhere_now("10.96.0.11:53", "192.0.2.1:40001", true)]
    #[case::node_port("192.0.2.1:30053", "192.0.2.1:40001", true)]
    #[case::node_port_of_another_node("192.0.2.2:30053", "192.0.2.2:30053", false)]
    fn flows_after_a_change(#[case] destination: &str, #[case] replier: &str, #[case] expected: bool) {
        let cluster_ip = |address| redirected(FrontendKind::ClusterIp, Protocol::Udp, address, 53);
        let node_port = redirected(FrontendKind::NodePort, Protocol::Udp, "0.0.0.0", 30_053);
        let go =
            PortRedirects::from([(cluster_ip("10.96.0.10"), 40_001), (cluster_ip("10.96.0.11"), 40_001)]);
        let come = PortRedirects::from([(cluster_ip("10.96.0.10"), 40_002), (node_port, 40_003)]);
        let mut stale = StaleFlows::default();
        note(&mut stale, Protocol::Udp, &go, &come);
        let node = BTreeSet::from(["192.0.2.1".parse().unwrap()]);
        let flow = TrackedFlow::new(destination.parse().unwrap(), replier.parse().unwrap());
        assert_eq!(stale.is_stale(IpFamily::Ipv4, &flow, &node), expected);
    }

    #[test]
    fn connections_of_tcp_are_not_asked_for() {
        let mut stale = StaleFlows::default();
        let node_port = redirected(FrontendKind::NodePort, Protocol::Tcp, "0.0.0.0", 30_080);
        note(&mut stale, Protocol::Udp, &PortRedirects::from([(node_port, 40_001)]), &PortRedirects::new());
        assert!(stale.is_empty());
    }
}
