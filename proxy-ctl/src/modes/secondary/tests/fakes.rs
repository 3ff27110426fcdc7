//! Two modes that record their calls.

use super::*;

/// The calls that the two modes got, in order: `own web` for a write to the active mode, and
/// `secondary -web` for a removal from the secondary mode.
#[derive(Clone, Default)]
pub(super) struct Log(pub(super) Arc<Mutex<Vec<String>>>);

impl Log {
    pub(super) fn add(&self, line: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A fake mode. If `who` is `own`, it serves neither SCTP nor node ports for the node itself.
pub(super) struct Fake {
    pub(super) who: &'static str,
    pub(super) log: Log,
    /// True if one service port cannot be written.
    pub(super) is_incomplete: Arc<Mutex<bool>>,
    /// True if interface 7 has no packet programs.
    pub(super) lacks_programs: Arc<Mutex<bool>>,
    pub(super) programs_come_later: Arc<Mutex<bool>>,
    /// The number of calls of `unserved_fields`.
    pub(super) asked: Arc<Mutex<usize>>,
    /// The last argument of `share_frontends`.
    pub(super) shares_frontends: bool,
}

impl Fake {
    pub(super) fn written(&self) -> Result<Applied, Error> {
        if *self.is_incomplete.lock().unwrap() {
            return Err(Error::new(ErrorKind::Other, "one service port could not be written"));
        }
        Ok(Applied::default())
    }
}

/// The value that both fake modes return from `inspection_share`.
pub(super) const SHARE: u32 = 200;

pub(super) fn kinds(port: &DesiredPort) -> String {
    let kinds = port.frontends.iter().map(|frontend| match frontend.kind {
        FrontendKind::ClusterIp => "c",
        FrontendKind::NodePort => "n",
        FrontendKind::ExternalIp => "e",
        FrontendKind::LoadBalancer => "l",
    });
    format!("{}:{}", port.name.service.name, kinds.collect::<String>())
}

impl Programmed for Fake {
    /// Returns a Service at 10.96.0.7, which only the active mode serves.
    fn snapshot(&self) -> Result<Snapshot, Error> {
        let address = Some(IpAddr::from([10, 96, 0, 7]));
        let frontends = vec![FrontendSnapshot { address, port: 80, external: false }];
        let name = ServicePortName {
            service: ObjectName::new("default", "served"),
            port: "".into(),
            protocol: Protocol::Tcp,
            family: IpFamily::Ipv4,
        };
        let served = ServiceSnapshot { frontends, ..ServiceSnapshot::new(name) };
        let services = if self.who == "own" { vec![served] } else { Vec::new() };
        Ok(Snapshot { services, ..Snapshot::default() })
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage::default())
    }
}

impl Dataplane for Fake {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        for port in &changes.changed {
            self.log.add(format!("{} {}", self.who, kinds(port)));
        }
        for name in &changes.removed {
            self.log.add(format!("{} -{}", self.who, name.service.name));
        }
        self.written()
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let all: Vec<String> = desired.iter().map(|port| kinds(port)).collect();
        self.log.add(format!("{} all {}", self.who, all.join(" ")));
        self.written()
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        let shares = if host.shares_addresses { " that is shared" } else { "" };
        self.log.add(format!("{} host{shares}", self.who));
        Ok(Applied::default())
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        *self.asked.lock().unwrap() += 1;
        let unserved = |effect| UnservedField { field: "spec.x", effect, instead: "not built".into() };
        let all = [
            (port.name.protocol == Protocol::Sctp, unserved(Effect::NotServed)),
            (port.affinity_seconds.is_some(), unserved(Effect::ServedDifferently)),
            (kinds(port).contains('n'), unserved(Effect::NotToOwnNode(FrontendKind::NodePort))),
        ];
        all.into_iter().filter(|(asked, _)| self.who == "own" && *asked).map(|(_, one)| one).collect()
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        Some(self)
    }
}

impl PacketMode for Fake {
    fn attach(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut *self.programs_come_later.lock().unwrap()) {
            self.log.add(format!("{} attached", self.who));
        }
        Ok(())
    }

    fn renew_lease(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn share_frontends(&mut self, are_shared: bool) -> Result<(), Error> {
        if std::mem::replace(&mut self.shares_frontends, are_shared) != are_shared {
            let told = if are_shared { "shared" } else { "its own" };
            self.log.add(format!("{} frontends are {told}", self.who));
        }
        Ok(())
    }

    fn packet_programs(&mut self) -> PacketPrograms {
        PacketPrograms {
            are_lacking: *self.lacks_programs.lock().unwrap(),
            come_later: *self.programs_come_later.lock().unwrap(),
            fit_nowhere: None,
        }
    }

    fn hook_problems(&mut self) -> HookProblems {
        let lacks_programs = *self.lacks_programs.lock().unwrap();
        let unattached = lacks_programs.then(|| (7, "it is full".to_owned()));
        HookProblems { unattached: unattached.into_iter().collect(), ..Default::default() }
    }

    fn inspection_share(&mut self) -> u32 {
        SHARE
    }
}

pub(super) struct FakeSecondary {
    pub(super) log: Log,
    pub(super) fails: Arc<Mutex<bool>>,
    pub(super) is_incomplete: Arc<Mutex<bool>>,
    /// The destinations that clients of established connections have dialled.
    pub(super) connections: Arc<Mutex<Vec<SocketAddr>>>,
}

impl SecondaryMode for FakeSecondary {
    fn mode(&self) -> Mode {
        Mode::Nftables
    }

    fn open(&self) -> Result<Box<dyn Dataplane>, Error> {
        if *self.fails.lock().unwrap() {
            return Err(Error::new(ErrorKind::Other, "no nf_tables"));
        }
        self.log.add("open".to_owned());
        Ok(Box::new(Fake {
            who: "secondary",
            log: self.log.clone(),
            is_incomplete: Arc::clone(&self.is_incomplete),
            lacks_programs: Arc::default(),
            programs_come_later: Arc::default(),
            asked: Arc::default(),
            shares_frontends: false,
        }))
    }

    fn has_connections(&self, to: &DialledFrontends) -> Result<bool, Error> {
        Ok(self.connections.lock().unwrap().iter().any(|dialled| to.has(*dialled)))
    }

    fn remove(&self) -> Result<(), Error> {
        self.log.add("remove".to_owned());
        Ok(())
    }
}
