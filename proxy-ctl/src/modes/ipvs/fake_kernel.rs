//! A kernel and tools of iptables that are data, for tests of the order of writes and of refusals.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{calls::Calls, family_rules::RuleTools, state::tests::shown, *};
use crate::{
    modes::netfilter::chains::{Chains, Jump},
    sys::{
        CallError,
        net::{
            ipvs::Destination,
            namespace_lock::{NamespaceAttempt, NamespaceLock},
        },
        xtables::ToolError,
    },
};

/// A rule of mode iptables.
pub(super) const OF_MODE_IPTABLES: &str = "-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-TCOU7JCQXEZGVUNU\n";

#[derive(Default)]
pub(super) struct Fake {
    pub(super) objects: KernelObjects,
    /// The table nat of each family.
    pub(super) nat: BTreeMap<IpFamily, String>,
    /// The writes, in their order.
    pub(super) journal: Vec<String>,
    /// Returns the error number of a write that is refused.
    pub(super) refuses: Option<fn(&Change) -> Option<i32>>,
    /// Returns true for a change whose call fails as a whole.
    pub(super) fails: Option<fn(&Change) -> bool>,
    pub(super) restore_fails: Option<IpFamily>,
    pub(super) save_fails: Option<IpFamily>,
}

impl Fake {
    pub(super) fn nat(&self, family: IpFamily) -> String {
        self.nat.get(&family).cloned().unwrap_or_default()
    }
}

/// Returns this table nat for both families.
pub(super) fn in_both(nat: &str) -> BTreeMap<IpFamily, String> {
    IpFamily::ALL.map(|family| (family, nat.to_owned())).into()
}

#[derive(Clone, Default)]
pub(super) struct FakeKernel(Arc<Mutex<Fake>>);

impl FakeKernel {
    pub(super) fn lock(&self) -> MutexGuard<'_, Fake> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take_journal(&self) -> Vec<String> {
        mem::take(&mut self.lock().journal)
    }
}

impl Calls for FakeKernel {
    fn provide(&self) -> Result<(), Error> {
        Ok(())
    }

    fn read(&self) -> Result<KernelObjects, Error> {
        Ok(self.lock().objects.clone())
    }

    /// Returns destinations without connections.
    fn destinations(&self, socket: VirtualSocket) -> Result<Vec<Destination>, CallError> {
        let fake = self.lock();
        let destinations = fake.objects.servers.get(&socket).map(|server| &server.destinations);
        let listed = |(address, is_used): (&_, &_)| Destination {
            address: *address,
            is_used: *is_used,
            connections: 0,
        };
        Ok(destinations.into_iter().flatten().map(listed).collect())
    }

    fn write(&self, portion: &[Change]) -> Result<Vec<(usize, CallError)>, CallError> {
        let mut fake = self.lock();
        let error = |errno| CallError::new("a call", std::io::Error::from_raw_os_error(errno));
        if fake.fails.is_some_and(|fails| portion.iter().any(fails)) {
            return Err(error(libc::ENOBUFS));
        }
        let mut refused = Vec::new();
        for (index, change) in portion.iter().enumerate() {
            if let Some(errno) = fake.refuses.and_then(|refuses| refuses(change)) {
                refused.push((index, error(errno)));
                continue;
            }
            fake.journal.extend(shown(std::slice::from_ref(change)));
            fake.objects.record(change.clone());
        }
        Ok(refused)
    }
}

pub(super) struct FakeTools {
    pub(super) family: IpFamily,
    pub(super) kernel: FakeKernel,
}

fn failure() -> ToolError {
    ToolError::Run { program: "iptables".to_owned(), source: std::io::ErrorKind::NotFound.into() }
}

impl RuleTools for FakeTools {
    fn family(&self) -> IpFamily {
        self.family
    }

    fn failures(&self) -> u64 {
        0
    }

    fn saved(&self, table: &str) -> Result<String, ToolError> {
        assert_eq!(table, "nat");
        let fake = self.kernel.lock();
        if fake.save_fails == Some(self.family) { Err(failure()) } else { Ok(fake.nat(self.family)) }
    }

    fn write(&mut self, chains: &Chains, _: &[Jump]) -> Result<u64, ToolError> {
        let mut fake = self.kernel.lock();
        if fake.restore_fails == Some(self.family) {
            return Err(failure());
        }
        let replaces = chains.contains_key(&("nat", "KUBE-SERVICES"));
        if replaces {
            fake.nat.remove(&self.family);
        }
        fake.journal.push(if replaces { "all rules" } else { "own rules" }.to_owned());
        Ok(1)
    }
}

/// Acquires a lock with a name of its own, because the tests are not about other controllers.
fn lock() -> NamespaceLock {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    match NamespaceLock::acquire(&name).unwrap() {
        NamespaceAttempt::Held(lock) => lock,
        NamespaceAttempt::Taken(holder) => panic!("{holder}"),
    }
}

pub(super) fn dataplane_of(families: &[IpFamily], kernel: &FakeKernel, keeps: &[&str]) -> IpvsDataplane {
    let keeps = keeps.iter().map(|network| network.parse().unwrap()).collect();
    let tools = families.iter().map(|family| FakeTools { family: *family, kernel: kernel.clone() });
    let rules = tools.map(FamilyRules::new).collect();
    IpvsDataplane::new(Kernel::new(kernel.clone(), keeps), rules, Site::new(""), lock())
}

/// Returns a dataplane of IPv4.
pub(super) fn dataplane(kernel: &FakeKernel, keeps: &[&str]) -> IpvsDataplane {
    dataplane_of(&[IpFamily::Ipv4], kernel, keeps)
}
