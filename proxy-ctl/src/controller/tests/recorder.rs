//! A dataplane that records its calls, and answers them as a test says.

use super::*;

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Call {
    SetHost(Box<Host>),
    /// Has the names of changed and removed service ports.
    Apply(Vec<String>, Vec<String>),
    Resync(Vec<String>),
    CollectGarbage,
    Drain,
    Invalidate(Known),
}

/// A dataplane that records its calls. Clones share their memory, so that a test can read it while
/// the controller owns one.
#[derive(Clone, Default)]
pub(super) struct Recorder(pub(super) Arc<Mutex<Recording>>);

#[derive(Default)]
pub(super) struct Recording {
    pub(super) calls: Vec<Call>,
    pub(super) ports: Vec<Arc<DesiredPort>>,
    /// The service ports that the node serves, by name.
    pub(super) programmed: BTreeMap<String, Arc<DesiredPort>>,
    /// The number of calls that write and are still to fail.
    pub(super) failures: usize,
    /// True if each call of `resync` fails.
    pub(super) resync_fails: bool,
    /// True if there is no room for the node's addresses.
    pub(super) addresses_fail: bool,
    /// True if the kernel refuses hooks.
    pub(super) attach_fails: bool,
    pub(super) packet_programs: PacketPrograms,
    pub(super) hook_problems: HookProblems,
    /// The number of calls of `hook_problems`.
    pub(super) problems_asked: usize,
    /// The number of calls that came before each attachment.
    pub(super) attached_after: Vec<usize>,
    /// True if another controller runs.
    pub(super) taken_over: bool,
    /// Service ports without room, if that has changed.
    pub(super) waiting: Option<BTreeMap<ServicePortName, Vec<UnservedField>>>,
    pub(super) renewals: usize,
    /// True if no connection needs the mode.
    pub(super) idle: bool,
    /// True if each service port is delegated.
    pub(super) delegates: bool,
    /// The number of changes that the next call for the node reports.
    pub(super) host_differs: u64,
}

impl Recording {
    fn check_owner(&self) -> Result<(), Error> {
        if self.taken_over { Err(Error::new(ErrorKind::TakenOver, "process 7 has it")) } else { Ok(()) }
    }
}

pub(super) fn names<'a>(ports: impl IntoIterator<Item = &'a Arc<DesiredPort>>) -> Vec<String> {
    ports.into_iter().map(|port| port.name.to_string()).collect()
}

impl Recorder {
    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, Recording> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fail(&self, times: usize) {
        self.lock().failures = times;
    }

    /// Returns what was called since the last time.
    pub(super) fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.lock().calls)
    }

    pub(super) fn write(&self, call: Call, ports: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let mut recording = self.lock();
        let fails = recording.failures > 0 || recording.resync_fails && matches!(call, Call::Resync(_));
        recording.calls.push(call);
        if fails {
            recording.failures = recording.failures.saturating_sub(1);
            return Err(full());
        }
        let mut applied = Applied::default();
        match recording.calls.last() {
            Some(Call::Apply(_, removed)) => {
                for name in removed.clone() {
                    applied.removed += u64::from(recording.programmed.remove(&name).is_some());
                }
            }
            Some(Call::Resync(wanted)) => {
                let wanted = wanted.clone();
                let before = recording.programmed.len();
                recording.programmed.retain(|name, _| wanted.contains(name));
                applied.removed += (before - recording.programmed.len()) as u64;
            }
            _ => {
                applied.written = std::mem::take(&mut recording.host_differs);
                return Ok(applied);
            }
        }
        for port in ports {
            let before = recording.programmed.insert(port.name.to_string(), Arc::clone(port));
            applied.written += u64::from(before.as_ref() != Some(port));
        }
        recording.ports = ports.to_vec();
        Ok(applied)
    }
}

impl Programmed for Recorder {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(Snapshot::default())
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage::default())
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        let (name, kind) = ("of_the_mode", MetricType::Gauge);
        Ok(vec![MetricFamily { name, help: "", kind, samples: Vec::new(), histograms: Vec::new() }])
    }
}

impl Dataplane for Recorder {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        let removed = changes.removed.iter().map(ToString::to_string).collect();
        self.write(Call::Apply(names(&changes.changed), removed), &changes.changed)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        self.write(Call::Resync(names(desired)), desired)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        self.lock().check_owner()?;
        let written = self.write(Call::SetHost(Box::new(host.clone())), &[]);
        if self.lock().addresses_fail {
            return Err(Error::new(ErrorKind::NodeAddresses, "map node_addresses4 is full"));
        }
        written
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        let mut recording = self.lock();
        recording.calls.push(Call::CollectGarbage);
        recording.check_owner()?;
        if recording.failures == 0 {
            return Ok(());
        }
        recording.failures -= 1;
        Err(full())
    }

    fn drain(&mut self) -> Result<bool, Error> {
        let mut recording = self.lock();
        recording.calls.push(Call::Drain);
        recording.check_owner()?;
        Ok(recording.idle)
    }

    fn invalidate(&mut self, known: Known) {
        self.lock().calls.push(Call::Invalidate(known));
    }

    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        self.lock().waiting.take()
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        let all = [
            (self.lock().delegates, DELEGATED),
            (port.affinity_seconds.is_some(), AFFINITY),
            (port.name.protocol == Protocol::Sctp, SCTP),
        ];
        all.into_iter().filter(|(asked, _)| *asked).map(|(_, one)| one).collect()
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        Some(self)
    }
}

impl PacketMode for Recorder {
    fn attach(&mut self) -> Result<(), Error> {
        let mut recording = self.lock();
        let calls = recording.calls.len();
        recording.attached_after.push(calls);
        if recording.attach_fails { Err(full()) } else { Ok(()) }
    }

    fn renew_lease(&mut self) -> Result<(), Error> {
        self.lock().renewals += 1;
        Ok(())
    }

    fn share_frontends(&mut self, _are_shared: bool) -> Result<(), Error> {
        Ok(())
    }

    fn packet_programs(&mut self) -> PacketPrograms {
        self.lock().packet_programs.clone()
    }

    fn hook_problems(&mut self) -> HookProblems {
        let mut recording = self.lock();
        recording.problems_asked += 1;
        recording.hook_problems.clone()
    }

    fn inspection_share(&mut self) -> u32 {
        0
    }
}
