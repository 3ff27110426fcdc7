//! Tests of the lab itself: without any proxy all hosts reach each other, and nothing is left
//! behind.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use lab::{
    Dial, Lab, Outcome, Protocol,
    address::FAMILIES,
    cluster::{OUTSIDE, PodProcesses, SERVER_PORT},
    namespace, taken,
};

const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

#[test]
fn everybody_reaches_everybody_and_nothing_stays() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let mut lab = Lab::new()?;
    lab.add_pod(1, "routed", PodProcesses::InNodeCgroup)?;
    lab.add_pod(1, "neighbour", PodProcesses::Elsewhere)?;
    lab.add_pod(2, "bridged", PodProcesses::InNodeCgroup)?;
    let pods = ["routed", "neighbour", "bridged"];
    let hosts = ["node1", "node2"];
    let agents = pods
        .iter()
        .chain(&hosts)
        .chain(&[OUTSIDE])
        .map(|host| lab.server(host))
        .collect::<Result<Vec<_>>>()?;
    for client in &agents {
        for server in &agents {
            let from = lab.netns(client.name())?;
            let to = lab.netns(server.name())?;
            // As in most clusters, there is no way between pods and the world outside.
            if (from.name == OUTSIDE) != (to.name == OUTSIDE)
                && [from, to].iter().any(|end| pods.contains(&&*end.name))
            {
                continue;
            }
            for family in FAMILIES {
                for protocol in PROTOCOLS {
                    let target = (to.addresses.of(family), SERVER_PORT).into();
                    let outcomes = client.dial(&Dial::new(protocol, target))?;
                    let case = format!("{} -> {} {protocol} {family}: {outcomes:?}", from.name, to.name);
                    let [Outcome::Answered(answer)] = &outcomes[..] else { panic!("{case}") };
                    assert_eq!(answer.by, to.name, "{case}");
                    assert_eq!(answer.peer, target, "{case}");
                }
            }
        }
    }
    let name = lab.name().to_owned();
    let cgroup = lab.netns("routed")?.cgroup.clone();
    let directory = lab.directory().to_owned();
    assert!(cgroup.exists() && directory.exists());
    // A proxy that is killed leaves its record.
    let bpffs = lab.bpffs(1).to_string_lossy().trim_matches('/').replace('/', "-");
    let record = Path::new("/run/proxy-ctl").join(format!("{bpffs}.json"));
    std::fs::create_dir_all("/run/proxy-ctl").context("a folder for records")?;
    std::fs::write(&record, "{}").context("a record")?;
    drop(agents);
    drop(lab);
    assert!(!cgroup.exists(), "{} is left", cgroup.display());
    assert!(!directory.exists(), "{} is left", directory.display());
    assert!(!record.exists(), "{} is left", record.display());
    assert_eq!(namespace::with_prefix(&name), Vec::<String>::new());
    let mounts = std::fs::read_to_string(Path::new("/proc/mounts")).context("mounts")?;
    assert!(!mounts.contains(&name), "mounts are left");
    Ok(())
}

#[test]
fn the_qdisc_is_taken_from_a_program_that_puts_it_there_again() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let namespace = format!("px-qdisc-{}", std::process::id());
    let tc = |arguments: &str| namespace::run(&namespace, "tc", &arguments.split(' ').collect::<Vec<_>>());
    namespace::ip(None, &format!("netns add {namespace}\n"))?;
    namespace::ip(Some(&namespace), "link add pod type veth peer name other\n")?;
    let is_over = AtomicBool::new(false);
    let taken = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // It fails while something is there.
                let _added = tc("qdisc add dev pod clsact");
                thread::sleep(Duration::from_millis(1));
            }
        });
        thread::sleep(Duration::from_millis(50));
        let taken = taken::take_qdisc(&namespace, "pod");
        is_over.store(true, Ordering::Relaxed);
        taken
    });
    let there = tc("qdisc show dev pod");
    namespace::ip(None, &format!("netns del {namespace}\n"))?;
    taken?;
    let there = there?;
    assert!(there.contains("qdisc ingress") && !there.contains("clsact"), "{there}");
    Ok(())
}
