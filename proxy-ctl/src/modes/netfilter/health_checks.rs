//! Accepts in INPUT the connections by which load balancers check a node (`healthCheckNodePort`),
//! if a former kube-proxy did so. Without that, a node whose INPUT drops by default would fail
//! these checks once kube-proxy's rules are removed.
//!
//! The chain is in the same tables `filter` that kube-proxy's was in, because an accepting rule
//! elsewhere does not overrule a dropping rule there. The chain is also the memory: a later process
//! goes on with it, until `proxy-ctl cleanup` removes it.

use std::collections::BTreeSet;

use super::chains::{Chains, FamilyChains, Jump};
use crate::{
    cleanup::{self, FilterTable},
    model::objects::IpFamily,
    names::OWN_HEALTH_CHECKS as CHAIN,
    sys::{
        nftables::TableFamily,
        xtables::{ToolError, Tools, program},
    },
};

const TABLE: &str = "filter";
/// Owner tag of the jump.
const COMMENT: &str = "proxy-ctl accepts health checks";

const JUMP: Jump = Jump { table: TABLE, from: "INPUT", to: CHAIN, comment: COMMENT };

#[derive(Debug, thiserror::Error)]
pub enum HealthCheckError {
    #[error(transparent)]
    Cleanup(#[from] cleanup::Error),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(
        "the tools of {program}-{backend} are not on PATH: let TCP to the healthCheckNodePorts of your Services pass INPUT \
         by a rule of your own"
    )]
    NoTools { program: &'static str, backend: &'static str },
}

impl HealthCheckError {
    /// Returns true if another attempt cannot help.
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::NoTools { .. })
    }
}

/// The tables in which this proxy accepts health checks that a former kube-proxy accepted before.
/// There are none at first.
#[derive(Debug, Default)]
pub struct AcceptedHealthChecks {
    tables: Vec<FamilyChains>,
}

impl AcceptedHealthChecks {
    /// Goes on with what a former process of this proxy has left. It needs CAP_NET_ADMIN. After an
    /// error it may be called again.
    pub fn adopt(&mut self) -> Result<(), HealthCheckError> {
        self.add(cleanup::accepted_by_proxy_ctl()?)
    }

    /// Accepts health checks of `ports` wherever a kube-proxy does, before its rules are removed.
    /// Returns true if a table was added.
    pub fn take_over(&mut self, ports: &BTreeSet<u16>) -> Result<bool, HealthCheckError> {
        let before = self.tables.len();
        let added = self.add(cleanup::accepted_by_kube_proxy()?);
        // The tables that could be added are written even if others could not.
        self.write(ports)?;
        added?;
        Ok(self.tables.len() > before)
    }

    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Accepts health checks of these ports and of no others, and restores what another program has
    /// removed. Returns the number of tables that differed.
    pub fn write(&mut self, ports: &BTreeSet<u16>) -> Result<u64, ToolError> {
        let chains = chains(ports);
        self.tables.iter_mut().try_fold(0, |written, table| Ok(written + table.write(&chains, &[JUMP])?))
    }

    /// Adds those of `tables` that can be written. Returns the first error of the other
    /// tables.
    fn add(&mut self, tables: Vec<FilterTable>) -> Result<(), HealthCheckError> {
        let mut outcome = Ok(());
        for filter_table in tables {
            let is_known =
                |of: &FamilyChains| (TableFamily::from(of.family), of.tools.backend) == filter_table;
            if self.tables.iter().any(is_known) {
                continue;
            }
            match open(filter_table) {
                Ok(table) => self.tables.push(table),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }
}

fn open((table_family, backend): FilterTable) -> Result<FamilyChains, HealthCheckError> {
    let family = match table_family {
        TableFamily::Ipv4 => IpFamily::Ipv4,
        TableFamily::Ipv6 => IpFamily::Ipv6,
    };
    let missing = || HealthCheckError::NoTools { program: program(table_family), backend: backend.name() };
    let tools = Tools::find(table_family, backend).ok_or_else(missing)?;
    Ok(FamilyChains { family, failures: 0, tools })
}

fn chains(ports: &BTreeSet<u16>) -> Chains {
    let accept =
        |port: &u16| format!("-p tcp -m comment --comment \"{COMMENT}\" -m tcp --dport {port} -j ACCEPT");
    Chains::from([((TABLE, CHAIN), ports.iter().map(accept).collect())])
}

/// Removes the chain from every table, for `cleanup`, and returns the tables that had it. Nothing
/// is removed while a process is in a mode that writes netfilter rules.
pub(in crate::modes) fn remove() -> Result<Vec<String>, HealthCheckError> {
    if cleanup::is_any_mode_in_use() {
        return Ok(Vec::new());
    }
    from_each(cleanup::accepted_by_proxy_ctl()?, |filter_table| {
        let table = open(filter_table)?;
        Ok(table.tools.restore(&removal(&table.saved(TABLE)?))?)
    })
}

/// Removes the chain from all tables where this succeeds. Returns the first error of the other
/// tables.
fn from_each(
    tables: Vec<FilterTable>,
    remove: impl Fn(FilterTable) -> Result<(), HealthCheckError>,
) -> Result<Vec<String>, HealthCheckError> {
    let (mut removed, mut outcome) = (Vec::new(), Ok(()));
    for filter_table in tables {
        match remove(filter_table) {
            Ok(()) => removed.push(format!("{}-{} {TABLE}", program(filter_table.0), filter_table.1)),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome.map(|()| removed)
}

/// Returns the input of iptables-restore that removes the chain. `saved` is the table as
/// iptables-save prints it.
fn removal(saved: &str) -> String {
    let leads_there = |line: &&str| line.strip_suffix(CHAIN).is_some_and(|rule| rule.ends_with(" -j "));
    let jumps = saved.lines().filter(leads_there).filter_map(|line| line.strip_prefix("-A "));
    let jumps: String = jumps.map(|jump| format!("-D {jump}\n")).collect();
    format!("*{TABLE}\n:{CHAIN} - [0:0]\n{jumps}-X {CHAIN}\nCOMMIT\n")
}

#[cfg(test)]
mod tests {
    use std::{
        net::{SocketAddr, TcpListener, TcpStream},
        process::Command,
        time::Duration,
    };

    use rstest::rstest;

    use super::*;
    use crate::{
        cleanup::{PendingRemoval, Purpose},
        sys::xtables::Backend,
    };

    #[test]
    fn a_removal_takes_the_jumps_with_it() {
        let saved = format!(
            "*filter\n:INPUT DROP [0:0]\n:{CHAIN} - [0:0]\n-A INPUT -j {CHAIN}\n-A INPUT -j MINE\nCOMMIT\n"
        );
        let expected = format!("*filter\n:{CHAIN} - [0:0]\n-D INPUT -j {CHAIN}\n-X {CHAIN}\nCOMMIT\n");
        assert_eq!(removal(&saved), expected);
    }

    #[test]
    fn a_table_without_tools_leaves_no_other_as_it_is() {
        let tables = [Backend::Nft, Backend::Legacy].map(|backend| (TableFamily::Ipv4, backend));
        let tried = std::cell::RefCell::new(Vec::new());
        let removed = from_each(tables.into(), |filter_table| {
            tried.borrow_mut().push(filter_table);
            let missing = HealthCheckError::NoTools {
                program: program(filter_table.0),
                backend: filter_table.1.name(),
            };
            if filter_table.1 == Backend::Nft { Err(missing) } else { Ok(()) }
        });
        assert!(removed.unwrap_err().is_lasting());
        assert_eq!(*tried.borrow(), tables);
    }

    fn run(program: &str, arguments: &str) -> String {
        // A `~` is a space within an argument, such as a comment.
        let arguments = arguments.replace("~", "\u{a0}");
        let words = arguments.split(' ').map(|word| word.replace('\u{a0}', " "));
        let output = Command::new(program).args(words).output().unwrap();
        assert!(output.status.success(), "{program} {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn adopted() -> AcceptedHealthChecks {
        let mut accepted = AcceptedHealthChecks::default();
        accepted.adopt().unwrap();
        accepted
    }

    /// Returns true if a load balancer's check of this port is answered. A check that is dropped
    /// gets no answer.
    fn is_answered(port: u16) -> bool {
        let address = SocketAddr::from(([192, 0, 2, 1], port));
        TcpStream::connect_timeout(&address, Duration::from_millis(700)).is_ok()
    }

    fn in_a_namespace_that_drops(program: &str) {
        // The thread ends with the test, and its network namespace with it.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        run("ip", "link set lo up");
        run("ip", "address add 192.0.2.1/32 dev lo");
        run(program, "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");
        run(program, "-P INPUT DROP");
    }

    /// Writes what kube-proxy 1.36 has in the table filter.
    fn lay_rules_of_kube_proxy(program: &str, mode: &str, port: u16) {
        let (chain, comment, accepts) = match mode {
            "iptables" => {
                ("KUBE-NODEPORTS", "kubernetes~health~check~service~ports", format!("-m tcp --dport {port}"))
            }
            _ => ("KUBE-NODE-PORT", "kubernetes~health~check~rules", format!("--dport {port}")),
        };
        run(program, &format!("-N {chain}"));
        run(program, &format!("-I INPUT -m comment --comment {comment} -j {chain}"));
        run(program, &format!("-A {chain} -p tcp {accepts} -j ACCEPT"));
    }

    #[rstest]
    #[ignore = "needs root"]
    fn as_root_health_checks_are_answered_before_during_and_after_a_takeover(
        #[values(Backend::Nft, Backend::Legacy)] backend: Backend,
        #[values("iptables", "ipvs")] mode: &str,
    ) {
        const FIRST: u16 = 31_000;
        const LATER: u16 = 31_001;
        let program = format!("iptables-{backend}");
        in_a_namespace_that_drops(&program);
        let theirs = run(&program, "-S");
        lay_rules_of_kube_proxy(&program, mode, FIRST);
        let _listening = [FIRST, LATER].map(|port| TcpListener::bind(("192.0.2.1", port)).unwrap());
        assert!(is_answered(FIRST) && !is_answered(LATER), "as kube-proxy has it");

        let mut accepted = adopted();
        assert!(accepted.is_empty());
        assert!(accepted.take_over(&[FIRST].into()).unwrap());
        assert!(is_answered(FIRST), "while kube-proxy's rules are there too");
        let removed = cleanup::remove(Purpose::TakeOver, &[], &PendingRemoval::everything());
        assert!(!removed.parts.is_empty() && removed.problems.is_empty(), "{removed:?}");
        assert!(!run(&program, "-S").contains("KUBE-NODE"), "they are still there");
        assert!(is_answered(FIRST), "after they were removed");
        assert_eq!(accepted.write(&[FIRST].into()).unwrap(), 0, "the same again is not written");

        let mut accepted = adopted();
        assert!(!accepted.is_empty(), "a later process knows of it");
        accepted.write(&[LATER].into()).unwrap();
        assert!(is_answered(LATER) && !is_answered(FIRST), "it follows the Services");
        run(&program, "-D INPUT 1");
        assert_eq!(
            accepted.write(&[LATER].into()).unwrap(),
            1,
            "what another program has removed comes back"
        );
        assert!(is_answered(LATER));

        assert_eq!(remove().unwrap(), [format!("{program} filter")]);
        assert_eq!(run(&program, "-S"), theirs);
        assert_eq!(remove().unwrap(), [""; 0]);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_nothing_is_kept_of_a_kube_proxy_that_accepted_nothing() {
        in_a_namespace_that_drops("iptables-nft");
        run("nft", "add table ip kube-proxy");
        run("nft", "add chain ip kube-proxy services");
        let mut accepted = adopted();
        assert!(!accepted.take_over(&[31_000].into()).unwrap() && accepted.is_empty());
        assert!(!run("iptables-nft", "-S").contains(CHAIN));
    }
}
